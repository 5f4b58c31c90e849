"""Profile the steps of a training run by part."""

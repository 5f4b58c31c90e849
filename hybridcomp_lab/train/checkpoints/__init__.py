"""Write and read checkpoints of a run, and resume from them."""

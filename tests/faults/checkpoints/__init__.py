"""Saves of checkpoints that are killed or fail, and damaged files."""

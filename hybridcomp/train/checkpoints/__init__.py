"""Checkpoints of a run: written, read, and gone on from."""

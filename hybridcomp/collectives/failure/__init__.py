"""Detect failures: let no error on one rank, or in one thread, leave the others waiting in silence."""

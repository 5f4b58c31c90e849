"""Signals to ranks, and their deaths."""

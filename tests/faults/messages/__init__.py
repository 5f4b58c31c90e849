"""Faults in the messages of operations."""

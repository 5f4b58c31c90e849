"""Processes that live long, and arrays of more elements than an int counts."""

"""Predict the seconds, traffic and memory of a training step: programs of each rank are written and replayed."""

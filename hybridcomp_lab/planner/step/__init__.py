"""Predict the seconds, traffic and memory of a training step: write a program for each rank, and replay them."""

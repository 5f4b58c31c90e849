"""Schedules of the trainer with passes that sleep: what a schedule does, where the cores are too few to show it."""

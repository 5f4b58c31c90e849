"""Schedules of the trainer with passes that sleep, which show a schedule where cores are too few for real passes."""

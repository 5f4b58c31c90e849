"""The compiled engine, by its operations and against the run in Python."""

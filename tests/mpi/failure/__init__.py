"""Test failures, and the errors that all ranks get."""

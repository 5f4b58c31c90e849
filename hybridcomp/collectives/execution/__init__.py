"""Run operations: requests, waiting, the background thread, and operations as generators."""

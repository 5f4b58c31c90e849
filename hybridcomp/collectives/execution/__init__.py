"""How operations run: requests, waiting, the background thread, and operations as generators."""

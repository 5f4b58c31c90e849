"""Read, compare and draw results of runs, and say where they come from."""

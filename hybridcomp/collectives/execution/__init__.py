"""Python's side of the compiled engine: its set-up, the programs it runs, and what failures mean."""

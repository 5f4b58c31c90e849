"""The Python part of the compiled engine: its set-up, the programs that it runs, and its errors."""

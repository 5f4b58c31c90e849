"""Python's side of the compiled engine: programs, messages, steps that Python computes."""

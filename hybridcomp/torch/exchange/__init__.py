"""Run operations over a process group of torch's: what they send between two waits travels as one exchange."""

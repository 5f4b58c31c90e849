"""Run operations over a process group of torch's: their messages between two waits travel as one exchange."""

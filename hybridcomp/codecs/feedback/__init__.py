"""Error feedback: what a message lost is kept, and goes with a later one."""

"""Error feedback: add the error of a lossy message to a later one."""

"""The operations that callers call: mpi4py's methods by family, and the same on flat buffers."""

"""Error feedback in its forms, its state, and for another number of ranks."""

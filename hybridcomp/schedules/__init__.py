"""Schedules of collectives: what each rank does in an operation, as data. Imports neither MPI nor NumPy."""

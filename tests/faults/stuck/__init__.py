"""MPI that does not come back from a call, and holds a lock for which its other calls wait."""

"""Train without a centre: replicas exchange parameters with their neighbours in a graph only.

The rules work on NumPy arrays over a communicator, and import no torch; :mod:`.graph` needs no MPI either.
"""

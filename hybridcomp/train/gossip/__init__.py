"""Decentralised training: replicas that exchange parameters with their neighbours in a graph, and with nobody else.

The rules work on NumPy arrays over a communicator, and import no torch; :mod:`.graph` needs no MPI either.
"""

"""How bytes get from rank to rank: MPI, and memory that a host's ranks share."""

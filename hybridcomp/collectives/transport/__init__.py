"""How bytes get from rank to rank: MPI, memory that a host's ranks share, and how messages are framed."""

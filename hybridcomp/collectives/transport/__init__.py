"""Move bytes from rank to rank: through MPI, or through memory that a host's ranks share."""

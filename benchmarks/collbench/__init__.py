"""What the benchmarks of collectives are made of: figures, counters of links, peers, tables, plots, the matrix."""

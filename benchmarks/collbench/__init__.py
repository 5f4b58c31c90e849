"""Parts of the benchmarks of collectives: figures, counters of links, peers, tables, plots, the matrix."""

"""Measure cells on the ranks of benchmarks/model.py: a script for modelbench.cells, which lies in a package."""

from modelbench.cells import main

main()

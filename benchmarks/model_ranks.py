"""What the ranks of benchmarks/model.py run: modelbench.cells."""

from modelbench.cells import main

main()

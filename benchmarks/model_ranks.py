"""Run modelbench.cells or modelbench.alone, which lie in a package, on the ranks of benchmarks/model.py."""

import sys

from modelbench import alone, cells

{"alone": alone, "cells": cells}[sys.argv.pop(1)].main()

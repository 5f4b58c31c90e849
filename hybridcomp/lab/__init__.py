"""A cluster with slow links on one machine.

>>> from hybridcomp.lab import Lab
>>> with Lab(4, rate="1gbit") as lab:                         # doctest: +SKIP
...     lab.mpirun(["python", "train.py"], ppn=2, timeout=600)
"""

from __future__ import annotations

from hybridcomp.lab.lab import KINDS, Lab
from hybridcomp.lab.launch import LabError
from hybridcomp.lab.rate import Rate

__all__ = ["KINDS", "Lab", "LabError", "Rate"]

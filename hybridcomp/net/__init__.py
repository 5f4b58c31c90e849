"""Cluster with slow links on one machine.

>>> from hybridcomp.net import Lab
>>> with Lab(4, rate="1gbit") as lab:                         # doctest: +SKIP
...     lab.mpirun(["python", "train.py"], ppn=2, timeout=600)
>>> with Lab(2, "1gbit,200mbit", cores="all,0.5") as lab:     # doctest: +SKIP
...     lab.mpirun(["hybridcomp", "train", "--pp", "2", "--stage-layers", "6", "2"])
"""

from __future__ import annotations

from hybridcomp.net.lab import KINDS, Lab
from hybridcomp.net.launch import LabError
from hybridcomp.net.rate import Rate

__all__ = ["KINDS", "Lab", "LabError", "Rate"]

"""Measure shared memory, memory and codecs by themselves, with which a fit begins; rank 0 writes the profile."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpi4py import MPI

from hybridcomp.cli.calibration import machine
from hybridcomp.perfmodel import BUILT_IN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    hosts, _ = machine.hosts_of(comm)
    profile, notes = machine.calibrate(comm, hosts, BUILT_IN, machine.THOROUGH)
    if comm.rank == 0:
        profile.write(args.out)
        print(*notes, sep="\n")

"""Compare the policy auto with each fixed choice that its class allows, cell by cell, in the same run.

hybridcomp lab -n 4 --rate 1gbit -- python benchmarks/auto.py --link 1gbit --json benchmarks/results/auto/1gbit.json

Each cell is an operation and a size. Every choice has a communicator of its own. auto first runs until it has tried
and decided, 60 operations or more; their time is a figure of its own. Then all choices take turns, in an order drawn
anew each round; the first operations of a turn meet the link as the last turn has left it, and are not counted. A time
is the median over rounds of the slowest rank's. The best is found by every second round, and compared by the
others: the least of several times that waver is too little. PowerSGD is no fixed choice here: these arrays are flat.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import time
from pathlib import Path

import numpy as np
from harness import clocked
from mpi4py import MPI
from resultfile import write

import hybridcomp as hc
from hybridcomp.policy import Policy, Rule

WORLD = MPI.COMM_WORLD
SETTLING, LEAST = 800, 60  # operations until auto has ended its trials, at most and at least
TURN = 0.2  # seconds of a turn
LEAST_CALLS, MOST_CALLS = 5, 2000  # calls in a turn
ROUNDS = 20
FIXED = {
    "all_reduce": ("none", "exponent", "bf16", "int8:block=128", "int4:block=128"),  # class aggressive, named
    "reduce_scatter": ("none", "exponent", "bf16", "int8:block=128"),  # class safe, unnamed
    "all_gather": ("none", "exponent"),  # class exact
}
LOSSLESS = ("none", "exponent")
EXACT = 1 << 16  # named sums of fewer bytes: auto's class has the lossless codecs alone


def fixed(op: str, spec: str) -> Policy:
    """Return the policy that carries all of an operation by one codec, as auto would."""
    feedback = "ef" if op == "all_reduce" and spec not in LOSSLESS else None
    return Policy(spec, Rule(codecs=(hc.get_codec(spec),), feedback=feedback, min_bytes=0))


def run(comm: hc.Communicator, op: str, send: np.ndarray, recv: np.ndarray) -> None:
    """Run one operation."""
    if op == "all_reduce":
        comm.Allreduce(send, recv, name="w")
    elif op == "reduce_scatter":
        comm.Reduce_scatter_block(send, recv)
    else:
        comm.Allgather(send, recv)


def _slowest(comm: hc.Communicator, op: str, send: np.ndarray, recv: np.ndarray, calls: int) -> float:
    """Run an operation ``calls`` times; return the mean seconds of one on the slowest rank."""

    def operations() -> None:
        for _ in range(calls):
            run(comm, op, send, recv)

    return WORLD.allreduce(clocked(operations)[0] / calls, op=MPI.MAX)


def _calls_of_a_turn(comm: hc.Communicator, op: str, send: np.ndarray, recv: np.ndarray) -> int:
    for calls in (3, 3, 30):  # the first calls compile schedules
        took = _slowest(comm, op, send, recv, calls)
        if took * 30 > TURN:
            break
    return int(min(max(TURN / took, LEAST_CALLS), MOST_CALLS))


def cell(op: str, nbytes: int, rounds: int) -> dict[str, object]:
    """Measure one cell; return its figures."""
    p, n = WORLD.size, nbytes // 4 // WORLD.size * WORLD.size
    rng = np.random.default_rng(WORLD.rank)
    send = rng.standard_normal(n // p if op == "all_gather" else n, dtype=np.float32)
    recv = np.empty(n // p if op == "reduce_scatter" else n, np.float32)
    choices = LOSSLESS if op == "all_reduce" and nbytes < EXACT else FIXED[op]
    policies = {spec: fixed(op, spec) for spec in choices} | {
        "auto": hc.load_policy("auto:dp.reduce_scatter=safe")
    }
    comms = {name: hc.Communicator(WORLD, policy, "dp") for name, policy in policies.items()}
    began = time.perf_counter()
    decider = comms["auto"].decider
    assert decider is not None
    settling = 0
    while settling < LEAST or (decider.untried() and settling < SETTLING):  # the same on all ranks
        run(comms["auto"], op, send, recv)
        settling += 1
    settled = time.perf_counter() - began
    taken = decider.choices()[0].codec
    comms["again"] = hc.Communicator(WORLD, fixed(op, taken), "dp")
    calls = {name: _calls_of_a_turn(comm, op, send, recv) for name, comm in comms.items()}
    times: dict[str, list[float]] = {name: [] for name in comms}
    for number in range(rounds):
        for name in np.random.default_rng(number).permutation(list(comms)).tolist():
            for _ in range(calls[name] // 4):
                run(comms[name], op, send, recv)
            times[name].append(_slowest(comms[name], op, send, recv, calls[name]))
    found = {name: statistics.median(each[::2]) for name, each in times.items()}
    compared = {name: each[1::2] for name, each in times.items()}

    def speed(name: str, other: str) -> float:
        return round(statistics.median(map(operator.truediv, compared[other], compared[name])), 4)

    choice = decider.choices()[0]
    best = min(choices, key=lambda name: found[name])
    for comm in comms.values():
        comm.Free()
    return {
        "op": op,
        "bytes": n * 4,
        "seconds": {name: round(statistics.median(each), 7) for name, each in compared.items()},
        "rounds": rounds,
        "auto": choice.codec,
        "reason": choice.reason,
        "best": best,
        "of_best": speed("auto", best),
        "alike": speed("again", taken),
        "of_none": speed("auto", "none"),
        "settling_seconds": round(settled, 4),
        "settling_operations": settling,
    }


def main() -> None:
    """Measure all cells of a link."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", required=True, help="the link's name in the results")
    parser.add_argument("--sizes", default="16384,262144,1048576", help="bytes, separated by commas")
    parser.add_argument("--ops", default=",".join(FIXED), help="operations, separated by commas")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of all choices, of a cell")
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args()
    cells = []
    for op in given.ops.split(","):
        for nbytes in map(int, given.sizes.split(",")):
            cells.append(cell(op, nbytes, given.rounds))
            if WORLD.rank == 0:
                one = cells[-1]
                against = f"{one['of_best']} of the best ({one['best']}), {one['of_none']} of none"
                print(f"{given.link} {op} {nbytes}: auto takes {one['auto']}, {against}", flush=True)
                if given.json is not None:  # after each cell, so that measured cells are kept
                    record = {"link": given.link, "ranks": WORLD.size, "cells": cells}
                    write(given.json, record)


if __name__ == "__main__":
    main()

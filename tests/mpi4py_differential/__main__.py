"""Draw calls for minutes: ``python -m tests.mpi4py_differential --minutes 10``; ``--replay FILE`` makes one again."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.mpi4py_differential.draws import CALLS
from tests.mpi4py_differential.pool import Pool
from tests.mpi4py_differential.search import Search, shown
from tests.mpi4py_differential.verdict import POLICIES

FOUND = Path("build/mpi4py_differential")


def main() -> int:
    """Draw on each number of ranks in turn, print findings; 0 if there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", default="2,3,4,5", help="numbers of ranks, with commas between")
    parser.add_argument("--calls", help="calls, with commas between; all by default")
    parser.add_argument("--policies", help="policies, with semicolons between; all by default")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="of the first round")
    parser.add_argument("--round", type=int, default=150, help="draws of a round")
    parser.add_argument("--replay", type=Path, help="a finding's file")
    args = parser.parse_args()
    policies = args.policies.split(";") if args.policies else list(POLICIES)
    if args.replay is not None:
        draw = json.loads(args.replay.read_text())
        with Pool(draw["ranks"]) as pool:
            found = pool.check(draw, policies)
            print("no finding" if found is None else shown(found))
        return found is not None
    calls = args.calls.split(",") if args.calls else CALLS
    sizes = [int(n) for n in args.ranks.split(",")]
    FOUND.mkdir(parents=True, exist_ok=True)
    end, seed, findings = time.monotonic() + 60 * args.minutes, args.seed, 0
    searches = {n: Search(Pool(n), calls, policies) for n in sizes}
    known: set[str] = set()
    draws = 0
    try:
        while time.monotonic() < end:
            search = searches[sizes[seed % len(sizes)]]
            for found in search.round(seed, args.round, known, end):
                findings += 1
                file = FOUND / f"{seed}-{findings}.json"
                file.write_text(json.dumps(found.draw))
                print(f"\n{shown(found)}\n--replay {file}", flush=True)
            draws = sum(s.draws for s in searches.values())
            left = max(0.0, end - time.monotonic())
            print(
                f"seed {seed}, {search.pool.ranks} ranks: {draws} calls drawn, {findings} findings, {left:.0f} s left",
                flush=True,
            )
            search.pool.end()
            seed += 1
    finally:
        for search in searches.values():
            search.pool.end()
    print(f"{draws} calls drawn, {findings} findings")
    return findings > 0


if __name__ == "__main__":
    sys.exit(main())

"""Run scenarios of planted faults for a while: ``python -m tests.faults.chaos --minutes 60``; replay one by its seed.

Every scenario is printed by its kind and seed, ``messages:1234``; ``--replay messages:1234`` runs that one again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.resultfile import write
from tests.faults.outcome import Outcome

#: Kinds of scenarios: the module of each, and how often it is drawn beside the others; what takes longer, less often.
KINDS = {
    "messages": ("messages.messages", 4),
    "deaths": ("deaths.deaths", 4),
    "torch_deaths": ("deaths.torch_deaths", 1),
    "checkpoints": ("checkpoints.checkpoints", 2),
    "resources": ("resources.resources", 4),
    "memory_groups": ("resources.memory_group", 1),
    "age": ("age.age", 1),
    "links": ("links.links", 1),
}


def run(kind: str, seed: int) -> Outcome:
    """Run one scenario."""
    outcome: Outcome = importlib.import_module(f"tests.faults.{KINDS[kind][0]}").scenario(seed)
    return outcome


def chaos(minutes: float, seed: int, kinds: list[str]) -> Iterator[dict[str, Any]]:
    """Run scenarios for some minutes; after each, yield what was done and found up to then."""
    draw = random.Random(seed)
    total, scenarios, findings = Outcome(), Counter[str](), []
    began = time.monotonic()
    while time.monotonic() - began < 60 * minutes:
        kind = draw.choices(kinds, [KINDS[kind][1] for kind in kinds])[0]
        name = f"{kind}:{draw.getrandbits(31)}"
        started = time.monotonic()
        try:
            outcome = run(kind, int(name.split(":")[1]))
            total.add(outcome)
            words = ", ".join(f"{count} {what}" for what, count in sorted(outcome.outcomes.items()))
        except Exception:
            words = f"FOUND\n{traceback.format_exc()}"
            findings.append({"scenario": name, "error": traceback.format_exc()})
        scenarios[kind] += 1
        took = time.monotonic() - started
        print(
            f"[{(started - began) / 60:5.1f} of {minutes:g} min] {name} ({took:.1f} s): {words}", flush=True
        )
        yield {
            "minutes": round((time.monotonic() - began) / 60, 1),
            "seed": seed,
            "scenarios": dict(sorted(scenarios.items())),
            "operations": total.operations,
            "faults": dict(sorted(total.faults.items())),
            "outcomes": dict(sorted(total.outcomes.items())),
            "findings": findings,
        }


def main() -> int:
    """Read the command line; return 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, default=None, help="draws the scenarios; else another one each time"
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--replay", metavar="KIND:SEED", help="run one scenario alone")
    parser.add_argument("--out", type=Path, help="a JSON file for what was done and found")
    arguments = parser.parse_args()
    if arguments.replay:
        kind, seed = arguments.replay.split(":")
        print(run(kind, int(seed)))
        return 0
    kinds = arguments.kinds.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"--kinds are of {', '.join(KINDS)}, not {arguments.kinds}")
    seed = random.getrandbits(31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    for done in chaos(arguments.minutes, seed, kinds):
        if arguments.out:  # results so far, whatever becomes of this process
            write(arguments.out, done)
    print(json.dumps({key: value for key, value in done.items() if key != "findings"}, indent=1))
    print(f"{len(done['findings'])} findings")
    return 1 if done["findings"] else 0


if __name__ == "__main__":
    raise SystemExit(main())

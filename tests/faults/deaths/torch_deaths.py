"""Kill or stop a rank while PyTorch trains: the others end in time, with an error that names it."""

from __future__ import annotations

import json
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.deaths.jobs import Job
from tests.faults.outcome import Outcome

KINDS = ("ddp", "fsdp", "pipeline", "diloco")
_CODECS = ("int8", "int4", "topk:ratio=0.05", "lossless", "none")
_TIMEOUT = 3.0
_LATE = 8.0  # seconds that an error may come after its timeout, on a machine with more to do
_START_SECONDS = 40.0
_END_SECONDS = 40.0


def scenario(seed: int, kind: str | None = None) -> Outcome:
    """Kill one of 2 to 4 ranks that train, of which the launcher learns nothing; see :mod:`.torch_death_ranks`.

    Args:
        seed: decides all.
        kind: one of :data:`KINDS`, instead of one that is drawn.

    Raises:
        AssertionError: a rank that lives has no error, a late one or one that does not name the lost rank; ranks have
            different bits; something is left of the job.
    """
    random_ = random.Random(seed)
    ranks = random_.randint(2, 4)
    drawn = random_.choice(KINDS)
    plan = {
        "kind": kind or drawn,
        "codec": random_.choice(_CODECS),
        "victim": random_.randrange(ranks),
        "at": random_.randint(1, 8),
        "timeout": _TIMEOUT,
    }
    delay = random_.uniform(0, 0.03)
    with tempfile.TemporaryDirectory(prefix="hybridcomp-faults-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(plan))
        with Job(folder, ranks, ["tests.faults.deaths.torch_death_ranks"], ranks - 1) as job:
            try:
                job.armed(_START_SECONDS)
                time.sleep(delay)
                job.send(plan["victim"], signal.SIGKILL)
                job.end(_END_SECONDS)
                logs = [job.log(rank) for rank in range(ranks)]
                _judge(plan, logs)
            except AssertionError as error:
                raise AssertionError(f"torch_deaths:{seed}: {plan}, delay {delay}: {error}") from error
    outcomes = Counter(line["said"] for log in logs for line in log if line["said"] != "reached")
    steps = max(len(log) for log in logs)
    return Outcome(steps, Counter([f"SIGKILL in {plan['kind']}"]), outcomes + Counter(killed=1))


def _judge(plan: dict[str, Any], logs: list[list[dict[str, Any]]]) -> None:
    bits: dict[str, set[str]] = {}
    for log in logs:
        for line in log:
            if line["said"] == "right" and line["common"]:
                bits.setdefault(line["what"], set()).add(line["bits"])
    differ = [what for what, several in bits.items() if len(several) > 1]
    assert not differ, f"ranks have different bits: {differ}"
    named = 0
    for rank, log in enumerate(logs):
        if rank == plan["victim"]:
            continue
        failed = [line for line in log if "seconds" in line]
        assert failed, f"rank {rank} has no error"
        (line,) = failed
        assert line["seconds"] < _TIMEOUT + _LATE, f"rank {rank} has a late error: {line}"
        assert "still waiting for" in line["text"], f"rank {rank}: {line}"
        named += f"rank {plan['victim']}" in line["text"]
    # In a pipeline a rank waits for its neighbour, which has failed in its turn.
    least = 1 if plan["kind"] == "pipeline" else len(logs) - 1
    assert named >= least, f"{named} ranks name rank {plan['victim']}"

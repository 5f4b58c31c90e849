"""The command looks at ranks: what they have sent, and who keeps whom waiting."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.cli.main import main
from hybridcomp.launcher import find_mpiexec
from hybridcomp.top import watch
from tests.torch.harness import PATH
from tests.warm import python

SECONDS = 60.0

# Three sums, and one that rank 1 does not come to before it is told; what each has sent by then.
PROGRAM = """
    import json, os, pathlib, sys, time
    import numpy as np
    from mpi4py import MPI
    import hybridcomp as hc

    folder = pathlib.Path(sys.argv[1])
    freed = hc.Communicator(MPI.COMM_WORLD, "none", "tp")
    comm = hc.Communicator(MPI.COMM_WORLD, "int8", "dp")
    x = np.ones(300_000, np.float32)
    for each in (freed, comm):
        for _ in range(3):
            each.Allreduce(x, x.copy())
    rows = [(r.axis, r.calls, r.plain_bytes, r.wire_bytes) for each in (freed, comm) for r in each.stats()]
    (folder / f"said.{comm.rank}").write_text(json.dumps({"rows": rows, "pid": os.getpid()}))
    freed.Free()
    sleeper = folder / "go"
    while comm.rank and not sleeper.exists():
        time.sleep(0.02)
    comm.Allreduce(x, x.copy())
    comm.Free()
"""

# The same with a hook on gloo, without MPI.
HOOK = """
    import os, pathlib, sys, time
    import torch, torch.distributed as dist
    import hybridcomp.torch as hct

    folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["PMI_RANK"])
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
    ddp.register_comm_hook(hct.HookState("int8", module=ddp), hct.comm_hook)
    for _ in range(2):  # DDP itself meets in the second one
        ddp(torch.ones(2, 300)).sum().backward()
    while rank and not (folder / "go").exists():
        time.sleep(0.02)
    ddp(torch.ones(2, 300)).sum().backward()
    assert "mpi4py" not in sys.modules
    dist.destroy_process_group()
"""


@contextmanager
def running(program: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run two ranks, which keep their files in ``folder/top``."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYBRIDCOMP", "MASTER_"))}
    own = {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "HYBRIDCOMP_SUMMARY": "0"}
    job = subprocess.Popen(
        [find_mpiexec(), "-n", "2", python(), str(path), str(folder)],
        env=clean | own | {"HYBRIDCOMP_TOP": str(folder / "top")},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield job
        (folder / "go").touch()
        _, errors = job.communicate(timeout=SECONDS)
        assert job.returncode == 0, errors
    finally:
        (folder / "go").touch()
        if job.poll() is None:
            job.send_signal(signal.SIGINT)
            job.communicate(timeout=SECONDS)
    assert [path.name for path in (folder / "top").iterdir()] == ["watched"]  # they have tidied up


@pytest.fixture
def top(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    folder = tmp_path / "top"

    def look(*arguments: str) -> Any:
        assert main(["top", "--folder", str(folder), "--once", "--interval", "0.2", *arguments]) == 0
        printed = capsys.readouterr().out
        return json.loads(printed) if "--json" in arguments else printed

    return look


def until(
    job: subprocess.Popen[str], folder: Path, look: Callable[..., Any], wanted: Callable[[Any], bool]
) -> Any:
    """Return what the command says once that is as wanted."""
    deadline = time.monotonic() + SECONDS
    view = None
    while view is None or not wanted(view):
        assert time.monotonic() < deadline, view
        assert job.poll() is None, job.communicate()[1]
        time.sleep(0.1)
        if len(list((folder / "top").glob("rank.*"))) == 2:
            view = look("--json")
    return view


def stuck(view: Any) -> bool:
    return any(one["missing"] and one["seconds"] > 1 for one in view["operations"])


def test_it_shows_what_was_sent_and_who_is_waited_for(tmp_path: Path, top: Callable[..., Any]) -> None:
    with running(PROGRAM, tmp_path) as job:
        view = until(job, tmp_path, top, stuck)
        said = [json.loads((tmp_path / f"said.{rank}").read_text()) for rank in range(2)]
        table = top()
    assert [(rank["rank"], rank["pid"]) for rank in view["ranks"]] == [(i, said[i]["pid"]) for i in range(2)]
    for axis in ("dp", "tp"):
        rows = [row for each in said for row in each["rows"] if row[0] == axis]
        (found,) = (one["totals"] for one in view["axes"] if one["axis"] == axis)
        sums = tuple(sum(row[i] for row in rows) for i in (1, 2, 3))
        assert (found["calls"], found["plain_bytes"], found["wire_bytes"]) == sums
        assert sums[0] == 6
    (one,) = view["operations"]
    assert (one["op"], one["axis"], one["number"], one["ranks"]) == ("all_reduce", "dp", 4, [0])
    assert (one["missing"], one["awaits"], one["elsewhere"]) == ([1], [], 0)
    assert view["slowest"]["rank"] == 1
    assert view["slowest"]["seconds"] == one["seconds"]
    assert "rank 1 is slowest: the others have waited for it on dp" in table
    assert "1, not there yet" in table


def test_it_shows_a_hook_on_gloo(tmp_path: Path, top: Callable[..., Any]) -> None:
    with running(HOOK, tmp_path) as job:
        view = until(job, tmp_path, top, stuck)
    (axis,) = view["axes"]
    assert axis["axis"] == "dp"
    assert axis["totals"]["calls"] >= 2
    assert axis["totals"]["plain_bytes"] > 3 * axis["totals"]["wire_bytes"] > 0
    one = view["operations"][0]
    assert (one["op"], one["axis"], one["ranks"], one["missing"]) == ("all_reduce", "dp", [0], [1])
    assert view["slowest"]["rank"] == 1


def test_a_rank_that_is_killed_is_said_to_have_died(
    tmp_path: Path, top: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"""
        import os, sys, time
        from pathlib import Path
        from hybridcomp.top import publish
        from hybridcomp.top.publish import Activity
        class One:
            def activity(self):
                return Activity(7, "dp", 2, 1, [], [])
        one = One()
        publish.show(one, list, int(sys.argv[1]), 2)
        time.sleep({SECONDS})
    """
    environment = os.environ | {"HYBRIDCOMP_TOP": str(tmp_path / "top"), "PYTHONPATH": PATH}
    ranks = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), str(i)], env=environment)
        for i in range(2)
    ]
    try:
        until(ranks[0], tmp_path, top, lambda view: len(view["ranks"]) == 2)  # type: ignore[arg-type]
        ranks[1].kill()
        ranks[1].wait(SECONDS)
        view = top("--json")
        assert [rank["ended"] for rank in view["ranks"]] == [False, True]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(SECONDS)
    monkeypatch.setattr(watch, "_ANSWER_SECONDS", 0.1)
    assert main(["top", "--folder", str(tmp_path / "top"), "--once"]) == 2
    assert [path.name for path in (tmp_path / "top").iterdir()] == ["watched"]

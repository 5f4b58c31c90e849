"""Ranks that leave while others work: their exit status is the program's own, and the others learn of it in seconds."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from hybridcomp.torch.exchange.group import _wait
from tests.torch.cases.programs import program
from tests.torch.harness import mpiexec
from tests.torch.test_torchrun import Started, written

# Of the ranks that leave, by name: what they do, their exit status, and what the others read of it.
ENDED = "has left: its process has ended"
LEAVES = {
    "raise": ("raise KeyError('own')", 1, "has left: KeyError: 'own'"),
    "exit_0": ("sys.exit(0)", 0, ENDED),
    "exit_3": ("sys.exit(3)", 3, ENDED),
    "os_exit_0": ("os._exit(0)", 0, ENDED),
    "sigint": (
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
        -signal.SIGINT,
        "left: KeyboardInterrupt",
    ),
    "sigterm": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -signal.SIGTERM, ENDED),
    "in_flight": (
        "work = dist.all_reduce(x, async_op=True); raise KeyError('own')",
        1,
        "has left: KeyError: 'own'",
    ),
    "unawaited": ("work = dist.isend(torch.ones(300_000), (rank + 1) % size); sys.exit(3)", 3, ENDED),
    "callback": (
        "dist.all_reduce(torch.ones(3), group=alone, async_op=True).get_future().then(broken); sys.exit(3)",
        3,
        ENDED,
    ),
    "hook": ("leave_in_hook()", 1, "has left: ValueError: in a hook"),
    "closure": ("torch.optim.LBFGS([torch.ones(1)]).step(broken)", 1, "has left: ValueError: broken"),
}
SURVIVE = """
def broken(*_):
    raise ValueError("broken")

def leave_in_hook():
    def hook(state, bucket):
        raise ValueError("in a hook")
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=alone)
    ddp.register_comm_hook(None, hook)
    ddp(torch.ones(1, 2)).sum().backward()

dist.init_process_group("hybridcomp", timeout=timedelta(seconds=90))
alone = dist.new_group([rank], use_local_synchronization=True)
x = torch.ones(1000)
dist.all_reduce(x)
if rank in {leaving}:
    {leave}
began = time.monotonic()
try:
    while {works}:
        dist.all_reduce(x)
except Exception as error:
    assert time.monotonic() - began < 30
    print(type(error).__name__, error, flush=True)
"""


@pytest.fixture
def job() -> Started:
    return Started()


@pytest.mark.parametrize("how", LEAVES)
def test_the_others_are_told_at_once(job: Started, tmp_path: Path, how: str) -> None:
    """No launcher ends them here: they learn of it from the rank, or from the server of rank 0's."""
    leave, status, words = LEAVES[how]
    script = written(tmp_path, SURVIVE.format(leaving=(1,), leave=leave, works=True))
    (survived, said), (left, last) = job.ranks(script, 2)
    assert left == status, last
    assert "Abort" not in last
    if status == 1:
        kind = words[words.index("Error: ") - 5 :].split(": ", 1)[-1]
        assert last.rstrip().endswith(kind), last
    assert survived == 0, said
    assert said.startswith("RemoteError all_reduce number "), said
    assert words in said, said
    assert job.left() == []


@pytest.mark.parametrize("leaving", [(0,), (1, 2), (0, 1, 2)])
def test_whoever_leaves(job: Started, tmp_path: Path, leaving: tuple[int, ...]) -> None:
    """Rank 0's server outlives it, until nobody is left."""
    script = written(tmp_path, SURVIVE.format(leaving=leaving, leave="raise KeyError(rank)", works=True))
    for rank, (status, said) in enumerate(job.ranks(script, 3)):
        assert status == (1 if rank in leaving else 0), said
        assert "Abort" not in said
        if rank in leaving:
            assert said.rstrip().endswith(f"KeyError: {rank}"), said
        else:
            assert said.startswith("RemoteError all_reduce number 2"), said
    assert job.left() == []


def test_the_server_is_gone_first(job: Started, tmp_path: Path) -> None:
    leave = (
        "import subprocess; children = open(f'/proc/self/task/{os.getpid()}/children').read().split(); "
        "[os.kill(int(pid), 9) for pid in children]"
    )
    script = written(
        tmp_path,
        SURVIVE.format(leaving=(0,), leave=leave, works=False)
        + "dist.all_reduce(x)\nsys.exit(3 * (rank == 1))\n",
    )
    ended = job.ranks(script, 2)
    assert [status for status, _ in ended] == [0, 3], ended
    assert job.left() == []


@pytest.mark.parametrize("how", ["raise", "exit_3"])
def test_under_mpiexec_the_status_is_the_program_s_own(how: str) -> None:
    leave, status, _ = LEAVES[how]
    done = mpiexec(
        2,
        *program(f"""
        import time
        dist.init_process_group("hybridcomp", timeout=timedelta(seconds=90))
        rank = dist.get_rank()
        if rank == 1:
            {leave}
        dist.barrier()
        """),
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    assert "Abort" not in done.stdout + done.stderr
    assert "BAD TERMINATION" not in done.stdout + done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("[rank1]")]
    assert told[-1:] == (["[rank1]: KeyError: 'own'"] if how == "raise" else []), done.stderr


def test_a_forked_child_ends_by_itself() -> None:
    """Its end is not its parent's, whatever its status."""
    done = mpiexec(
        2,
        *program("""
        dist.init_process_group("hybridcomp")
        dist.barrier()
        for status in (0, 3):
            child = os.fork()
            if not child:
                sys.exit(status)
            say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status)
        dist.barrier()
        """),
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 4, done.stdout


@pytest.mark.long
def test_an_exception_on_all_ranks_under_torchrun(job: Started, tmp_path: Path) -> None:
    script = written(tmp_path, SURVIVE.format(leaving=(0, 1), leave="raise KeyError('own')", works=True))
    done = job.torchrun(script, ranks=2)
    assert done.returncode == 1
    assert "SIGSEGV" not in done.stderr, done.stderr
    assert "Abort" not in done.stderr, done.stderr
    assert "KeyError: 'own'" in done.stderr


@pytest.mark.parametrize("hosts", ["2x1", "1x2"])
def test_a_hook_that_waits_for_another_rank_leaves_the_status_alone(
    hosts: str, job: Started, tmp_path: Path
) -> None:
    """Over gloo, and over memory that ranks of a host share: a thread in compiled code that wakes when the interpreter
    is ending would abort the process."""
    script = written(
        tmp_path,
        dedent("""
        import signal, time
        dist.init_process_group("gloo", timeout=timedelta(seconds=90))
        rank = dist.get_rank()
        processes = [None, None]
        dist.all_gather_object(processes, os.getpid())
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
        state = hct.HookState("int8:min_bytes=0", module=ddp)
        kept = []

        def hook(state, bucket):
            future = hct.comm_hook(state, bucket)
            if len(kept) < 2:
                kept.append(future)
                return future
            kept.append(future)  # nobody waits for it
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        class Last:
            # The interpreter drops it when it is ending. The other rank's end wakes who waits for it.
            def __del__(self, other=processes[1], kill=os.kill, sleep=time.sleep):
                kill(other, 9)
                sleep(2)

        ddp.register_comm_hook(state, hook)
        for step in range(3):
            if step == 2 and rank:
                signal.pause()  # until it is killed
            ddp(torch.ones(1, 64)).sum().backward()
        sys.last = Last()
        raise KeyError("own")
        """),
    )
    (status, told), (other, _) = job.ranks(script, 2, HYBRIDCOMP_HOSTS=hosts)
    assert other == -signal.SIGKILL
    assert status == 1, told
    assert "KeyError: 'own'" in told
    assert "terminate called" not in told


@pytest.mark.parametrize("fails", [False, True])
def test_an_exchange_that_ends_just_after_a_look_has_ended(fails: bool) -> None:
    class Work:
        def wait(self, timeout: timedelta | None = None) -> None:
            if timeout is not None:
                raise RuntimeError("Operation timed out!")
            if fails:
                raise RuntimeError("the other rank is gone")

        def is_completed(self) -> bool:
            return True

    with pytest.raises(RuntimeError, match="is gone") if fails else nullcontext():
        _wait(Work(), torch.device("cpu"))

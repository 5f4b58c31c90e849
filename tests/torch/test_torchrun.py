"""The backend in ranks that torchrun and its like started: MPI starts by a server of rank 0's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from hybridcomp.launcher import reserve_port
from hybridcomp.pmi import hosts
from tests.torch.harness import PATH
from tests.warm import python

SECONDS = 100.0
HEAD = f"""
import faulthandler, os, signal, sys, time
faulthandler.dump_traceback_later({SECONDS - 10})  # where it stands, if it stands still
from datetime import timedelta
import torch, torch.distributed as dist
import hybridcomp.torch as hct
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""
SUM = """
x = torch.full((1000,), float(rank + 1))
dist.all_reduce(x)
assert x.tolist() == [size * (size + 1) / 2] * 1000, x
"""
MARK = "HYBRIDCOMP_TEST_MARK"  # every process of a job has it


class Started:
    """A job, and what it leaves."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYBRIDCOMP", "MASTER_"))}
        self.env = {
            **clean,
            "PYTHONPATH": PATH,
            "OMP_NUM_THREADS": "1",
            "HYBRIDCOMP_SUMMARY": "0",
            MARK: self.mark,
        }

    def torchrun(self, script: Path, *options: str, ranks: int = 3) -> subprocess.CompletedProcess[str]:
        """Run a program by torchrun itself."""
        how = ["--standalone", f"--nproc-per-node={ranks}", *options, "--no-python", python(), str(script)]
        return subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *how],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    def ranks(self, script: Path, ranks: int, **env: str) -> list[tuple[int, str]]:
        """Run a program as torchrun's like do, which set variables; return each rank's exit status and output."""
        with reserve_port() as reserved:
            port = str(reserved.getsockname()[1])
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), **env}
            started = [
                subprocess.Popen(
                    [python(), str(script)],
                    env={**self.env, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank in range(ranks)
            ]
            deadline = time.monotonic() + SECONDS
            try:
                printed = [
                    one.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for one in started
                ]
            except subprocess.TimeoutExpired:
                for one in started:
                    one.kill()
                said = [(one.communicate()[0], one.returncode) for one in started]
                raise AssertionError(f"not at an end after {SECONDS} s: {said}") from None
            finally:
                for one in started:
                    one.kill()
        return [(one.returncode, text) for one, text in zip(started, printed, strict=True)]

    def left(self) -> list[str]:
        """Return the processes of the job that stay after it, given a second to end."""
        deadline = time.monotonic() + 5
        while (found := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _processes(self) -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found


@pytest.fixture
def job() -> Started:
    return Started()


def written(folder: Path, body: str) -> Path:
    """Write a program; return its path."""
    script = folder / "train.py"
    script.write_text(HEAD + body, encoding="utf-8")
    return script


@pytest.mark.long
def test_torchrun_starts_again_what_dies(job: Started, tmp_path: Path) -> None:
    script = written(
        tmp_path,
        f"""
dist.init_process_group("hybridcomp")
{SUM}
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0 and rank == 1:
    os._exit(7)
if attempt == 0:
    time.sleep(60)
from mpi4py import MPI
assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (rank, size)
assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
assert not any(name.startswith("PMI") for name in os.environ)
node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
assert node.size == size
node.Free()
print(f"rank {{rank}} of attempt {{attempt}} is well\\n", end="", flush=True)
dist.destroy_process_group()
""",
    )
    # As if srun had started torchrun: its variables are not of these ranks.
    job.env |= {"PMI_RANK": "0", "PMI_SIZE": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    done = job.torchrun(script, "--max-restarts=1", "--monitor-interval=0.1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == [
        "",
        *(f"rank {rank} of attempt 1 is well" for rank in range(3)),
    ]
    assert job.left() == []


@pytest.mark.parametrize("main", ["127.0.0.1", *(["::1"] if "::1" in hosts._scopes() else [])])
def test_several_hosts(job: Started, tmp_path: Path, main: str) -> None:
    """Two hosts of two ranks: between them MPI's messages go by TCP over the interface that reaches MASTER_ADDR."""
    script = written(
        tmp_path,
        f"""
from hybridcomp.pmi import hosts
hosts.identity = lambda: f"{{rank // 2}}"
dist.init_process_group("hybridcomp")
{SUM}
from mpi4py import MPI
node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
assert (node.size, node.rank) == (2, rank % 2)
node.Free()
assert (os.environ["FI_PROVIDER"], os.environ["FI_TCP_IFACE"]) == ("tcp", "lo")
dist.destroy_process_group()
""",
    )
    for status, printed in job.ranks(script, 4, MASTER_ADDR=main):
        assert status == 0, printed
    assert job.left() == []


def test_without_variables(job: Started, tmp_path: Path) -> None:
    """Ranks of torch.multiprocessing, which say who they are to init_process_group."""
    script = written(
        tmp_path,
        f"""
where = f"tcp://127.0.0.1:{{os.environ['MASTER_PORT']}}"
for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
    del os.environ[name]
dist.init_process_group("hybridcomp", init_method=where, rank=rank, world_size=size)
{SUM}
dist.destroy_process_group()
""",
    )
    for status, printed in job.ranks(script, 2):
        assert status == 0, printed


def test_processes_of_torch_multiprocessing(job: Started, tmp_path: Path) -> None:
    """``mp.spawn`` starts Python anew, which imports the program; no launcher has a part in it."""
    script = tmp_path / "train.py"
    script.write_text(
        """
import os
import torch, torch.distributed as dist, torch.multiprocessing as mp

def rank(number, port):
    dist.init_process_group("hybridcomp", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    x = torch.full((1000,), 1.0 + number)
    dist.all_reduce(x)
    assert x.eq(3).all()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(rank, (os.environ["MASTER_PORT"],), nprocs=2)
    print("both ended")
"""
    )
    ((status, printed),) = job.ranks(script, 1)
    assert (status, printed.splitlines()[-1]) == (0, "both ended"), printed
    assert job.left() == []


def test_beside_gloo(job: Started, tmp_path: Path) -> None:
    """A group of all ranks beside a default group of another backend, then one of some."""
    script = written(
        tmp_path,
        """
dist.init_process_group("gloo")
group = dist.new_group(backend="hybridcomp")
x = torch.ones(10)
dist.all_reduce(x, group=group)
assert x.tolist() == [size] * 10
some = dist.new_group([0, 2], backend="hybridcomp")
if rank != 1:
    dist.all_reduce(x, group=some)
    assert x.tolist() == [2 * size] * 10
dist.destroy_process_group()
""",
    )
    for status, printed in job.ranks(script, 3):
        assert status == 0, printed


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank(job: Started, tmp_path: Path, victim: int) -> None:
    """The others end by their timeout, and the server with them."""
    script = written(
        tmp_path,
        f"""
dist.init_process_group("hybridcomp", timeout=timedelta(seconds=5))
{SUM}
mapped = {{line.split()[5] for line in open("/proc/self/maps") if "/dev/shm/" in line and "(deleted)" not in line}}
assert not mapped, mapped  # what is unlinked already is nobody's to leave
if rank == {victim}:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(x)
""",
    )
    ended = job.ranks(script, 3)
    assert all("AssertionError" not in printed for _, printed in ended), ended
    assert ended[victim][0] == -signal.SIGKILL
    assert all(status != 0 for status, _ in ended), ended
    assert job.left() == []


def test_a_rank_that_does_not_come(job: Started, tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
dist.init_process_group("gloo")
if rank == 1:
    time.sleep(8)
    os._exit(0)
dist.new_group(backend="hybridcomp", timeout=timedelta(seconds=3))
""",
    )
    ended = job.ranks(script, 3)
    assert ended[1][0] == 0
    for rank in (0, 2):
        assert f"starting MPI: rank {rank} waited, and rank 1 did not come" in ended[rank][1]
    assert job.left() == []


# Tensor parallelism by gloo, FSDP2 across by hybridcomp: the gradients of the whole model, within what int8 loses.
MESH = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
dist.init_process_group(DEFAULT)
own = ("hybridcomp", hct.Options(policy="int8:block=64:min_bytes=0"))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"dp": own, "tp": "gloo"})
assert [dist.get_backend(mesh[name].get_group()) for name in ("dp", "tp")] == ["hybridcomp", "gloo"]
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))
x = torch.randn(2, 8, 64)
whole = model()
whole(x).square().mean(dim=(1, 2)).mean().backward()
part = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(part, mesh=mesh["dp"])
part(x[rank // 2].clone()).square().mean().backward()
for (name, exact), p in zip(whole.named_parameters(), part.parameters(), strict=True):
    found = p.grad.full_tensor()
    error = ((found - exact.grad).norm() / exact.grad.norm()).item()
    assert error < 0.05, (name, error)
    everywhere = [torch.empty_like(found) for _ in range(size)]
    dist.all_gather(everywhere, found)
    assert all(torch.equal(one, found) for one in everywhere), name
sent = {(row.axis, row.op, row.codec) for row in hct.stats() if row.axis != "default"}
assert ("dp", "reduce_scatter", "int8:block=64") in sent and not any(axis == "tp" for axis, *_ in sent), sent
dist.destroy_process_group()
"""


@pytest.mark.parametrize("default", ["gloo", "hybridcomp"])
def test_a_mesh_of_two_backends(job: Started, tmp_path: Path, default: str) -> None:
    ended = job.ranks(written(tmp_path, f"DEFAULT = {default!r}\n{MESH}"), 4)
    assert [status for status, _ in ended] == [0] * 4, ended
    assert job.left() == []


def test_where_only_some_ranks_make_a_group(job: Started, tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
dist.init_process_group("gloo")
try:
    dist.new_group([0, 1], backend="hybridcomp", timeout=timedelta(seconds=2))
finally:
    dist.barrier()
""",
    )
    ended = job.ranks(script, 3)
    assert ended[2][0] == 0
    for rank in (0, 1):
        assert (
            f"starting MPI: rank {rank} waited, and rank 2 did not come; MPI starts in all 3 ranks"
            in ended[rank][1]
        )
    assert job.left() == []


def test_where_mpi_has_begun_already(job: Started, tmp_path: Path) -> None:
    script = written(tmp_path, 'from mpi4py import MPI\ndist.init_process_group("hybridcomp")\n')
    ended = job.ranks(script, 2)
    assert all(status != 0 for status, _ in ended)
    assert (
        "make a group of all ranks before anything else starts MPI (from mpi4py import MPI), or start the"
        in ended[1][1]
    )
    assert "(mpiexec -n 2 python ..., or srun)" in ended[1][1]


def test_a_wrong_interface(job: Started, tmp_path: Path) -> None:
    script = written(tmp_path, 'dist.init_process_group("hybridcomp")\n')
    ended = job.ranks(script, 2, HYBRIDCOMP_INTERFACE="none7")
    assert "HYBRIDCOMP_INTERFACE is 'none7'; allowed: one of lo" in ended[0][1]
    assert ended[1][0] != 0  # rank 0 says so, unless torch's store, which is rank 0's, has ended before

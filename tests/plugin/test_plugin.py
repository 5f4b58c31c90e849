"""Programs that know nothing of hybridcomp but a name, or not even that."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from hybridcomp.errors import ConfigError
from hybridcomp.plugin import ddp, replace
from tests.torch.harness import PATH, ROOT, mpiexec
from tests.warm import python

HEAD = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
def say(x): os.write(1, f"{x}\\n".encode())
def total(group=None):
    x = torch.ones(100_000)
    dist.all_reduce(x, group=group)
    return x[0].item()
"""


def command(body: str, *options: str, ranks: int = 2) -> list[str]:
    how = ["-n", str(ranks), *options, "--", python(), "-c", HEAD + body]
    return [sys.executable, "-m", "hybridcomp", "run", *how]


def environment(**env: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYBRIDCOMP", "MASTER_"))}
    return {**clean, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", **env}


def run(body: str, *options: str, ranks: int = 2, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program by ``hybridcomp run``."""
    return subprocess.run(
        command(body, *options, ranks=ranks),
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(
    ("backend", "replaced", "expected"),
    [
        ("gloo", {"gloo"}, True),
        ("GLOO", {"gloo"}, True),
        ("nccl", {"gloo"}, False),
        ("nccl", {"gloo", "nccl"}, True),
        ("undefined", {"gloo"}, True),  # torch's default without a GPU
        ("undefined", {"nccl"}, False),
        ("cpu:gloo,cuda:nccl", {"gloo"}, True),
        ("cpu:mpi,cuda:nccl", {"gloo"}, False),
        ("cpu:gloo", set(), False),
        ("fake", {"gloo", "nccl"}, False),
        ("hybridcomp", {"gloo", "nccl"}, False),
        ("undefined", set(), False),
    ],
)
def test_what_is_replaced_without_a_gpu(backend, replaced, expected):
    assert (replace.replacement(backend, replaced) == "hybridcomp") is expected


def test_pairs_are_replaced_with_a_gpu_if_all_are(monkeypatch):
    class Cuda:
        type = "cuda"

    monkeypatch.setattr("torch._C._get_accelerator", lambda: Cuda)
    assert replace.replacement("cpu:gloo,cuda:nccl", {"gloo"}) is None
    assert replace.replacement("cpu:gloo,cuda:nccl", {"gloo", "nccl"}) == "hybridcomp"
    assert replace.replacement("undefined", {"nccl"}) == "hybridcomp"


@pytest.mark.parametrize("value", ["ucc", "gloo,hybridcomp", "gloo nccl"])
def test_other_backends_are_not_replaced(monkeypatch, value):
    monkeypatch.setenv(replace.REPLACE.name, value)
    with pytest.raises(ConfigError, match=f"HYBRIDCOMP_REPLACE is '{value}'; allowed: gloo or nccl"):
        replace.REPLACE.read()


def test_the_package_names_the_variables_that_its_modules_read():
    from hybridcomp.plugin import _ON_DEMAND
    from hybridcomp.plugin.recording import COMPARE

    assert {replace.REPLACE.name: "replace", ddp.HOOK.name: "ddp", COMPARE.name: "recording"} == _ON_DEMAND


def test_the_package_names_the_functions_that_patch_libraries():
    from hybridcomp.plugin import _PATCHES, libraries

    assert all(callable(getattr(libraries, name)) for name in _PATCHES.values())


def test_the_entry_point_is_installed():
    """The entry point is of this checkout; the programs below show that importing torch finds it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torch.backends"] == {"hybridcomp": "hybridcomp.plugin:register"}


def test_importing_torch_loads_the_name_alone():
    code = """
import sys, torch, torch.distributed as dist
assert "hybridcomp" in dist.Backend.backend_list
loaded = {m.removeprefix("hybridcomp") for m in sys.modules if m.startswith("hybridcomp")}
assert loaded == {"", ".imports", ".moved", ".plugin"}, loaded
assert "mpi4py" not in sys.modules
"""
    for autoload, expected in ("1", 0), ("0", 1):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == expected, done.stderr


def test_a_name_is_enough_under_mpiexec():
    """The program needs no import of hybridcomp, and none of torchrun's variables."""
    done = mpiexec(
        3, "-c", HEAD + 'dist.init_process_group("hybridcomp"); say(f"{dist.get_backend()} {total()}")'
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["hybridcomp 3.0"] * 3


def test_variables_and_groups_of_a_replaced_backend():
    done = run(
        """
dist.init_process_group("gloo")
assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")] == [
    str(dist.get_rank()), "3", str(dist.get_rank()), "3", "0"]
from torch.distributed.device_mesh import init_device_mesh
groups = [None, dist.new_group(backend="gloo"), dist.new_group([0, 1], backend="cpu:gloo,cuda:nccl"), dist.new_group()]
mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
groups += [mesh.get_group()]
if dist.get_rank() == 2:
    del groups[2]
say([(dist.get_backend(group), total(group), type(group).__module__.split(".")[0]) for group in groups[1:]])
dist.destroy_process_group()
dist.init_process_group()
say(dist.get_backend())
dist.destroy_process_group()
""",
        "--replace=gloo",
        "--policy=int8",
        ranks=3,
    )
    assert done.returncode == 0, done.stderr
    whole, two = ("gloo", 3.0, "hybridcomp"), ("cpu:gloo,cuda:nccl", 2.0, "hybridcomp")
    assert sorted(done.stdout.splitlines()) == sorted(
        [str([whole, two, whole, whole])] * 2 + [str([whole, whole, whole])] + ["undefined"] * 3
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("hybridcomp: makes")]
    assert said == ["hybridcomp: makes the groups of gloo (HYBRIDCOMP_REPLACE=gloo)"]
    assert "3 ranks on this machine; policy int8; its groups in the place of gloo" in done.stderr


def test_a_replaced_backend_answers_as_the_one_it_replaces():
    program = [python(), str(Path(__file__).parent / "names_and_uses.py")]
    said = []
    for options in [], ["--replace=gloo"]:
        done = subprocess.run(
            [sys.executable, "-m", "hybridcomp", "run", "-n", "2", *options, "--", *program],
            env=environment(HYBRIDCOMP_POLICY="none"),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert ("makes the groups of gloo" in done.stderr) == bool(options)
        said.append(sorted(done.stdout.splitlines()))
    assert said[0]
    assert said[0] == said[1]


def test_nccl_is_called_gloo_where_torch_has_none():
    """A torch without NCCL asks for NCCL's version where it finds the name, and fails."""
    done = run(
        """
dist.init_process_group("nccl")
say((dist.get_backend(), dist.group.WORLD.name(), total()))
""",
        "--replace=nccl",
    )
    assert done.returncode == 0, done.stderr
    expected = "nccl" if torch.distributed.is_nccl_available() else "gloo"
    assert done.stdout.splitlines() == [str((expected, expected, 2.0))] * 2


def test_what_is_not_named_stays_and_its_port_is_kept_for_it():
    done = run(
        """
import errno, socket
try:
    with socket.socket() as other:  # which takes the port if no one else has it, even for a moment
        other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        raise SystemExit("any program may take MASTER_PORT")
except OSError as error:
    assert error.errno == errno.EADDRINUSE, error
dist.init_process_group("gloo")
say(f"{dist.get_backend()} {total()} {'hybridcomp.torch' in sys.modules}")
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["gloo 2.0 False"] * 2


def test_a_wrong_variable_is_an_error_where_a_group_is_made():
    body = 'os.environ["HYBRIDCOMP_REPLACE"] = "mpi"; dist.init_process_group("gloo")\n'
    done = run(body, "--replace", "gloo", ranks=1)
    assert done.returncode != 0
    assert "ConfigError: HYBRIDCOMP_REPLACE is 'mpi'; allowed: gloo or nccl, or both with a" in done.stderr


DDP = """
dist.init_process_group("gloo")
def net():
    torch.manual_seed(0)
    return DistributedDataParallel(torch.nn.Linear(300, 300))
def step(module):
    for _ in range(2):
        module(torch.ones(8, 300)).square().mean().backward()
"""


def test_modules_get_the_hook_unless_they_have_one():
    done = run(
        DDP
        + """
plain, own, builtin, unused = (net() for _ in range(4))
def hook(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])
own.register_comm_hook(None, hook)
builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
for module in (plain, own, builtin):
    step(module)
say([[f.__name__ for f, _ in module._comm_hooks] for module in (plain, own, builtin, unused)])
assert "mpi4py.MPI" not in sys.modules
""",
        "--hook",
        "--policy=int4",
        HYBRIDCOMP_SUMMARY="1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[['comm_hook'], ['hook'], [], []]"] * 2
    assert "int4:block=128" in done.stderr


COMPILED = """
dist.init_process_group("gloo")
def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
data = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
def trained(module, batch):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])
want = trained(net(), data.flatten(0, 1))
for wrap in (lambda m: torch.compile(DistributedDataParallel(m), backend="aot_eager"),
             lambda m: DistributedDataParallel(torch.compile(m, backend="aot_eager"))):
    torch._dynamo.reset()
    module = wrap(net())
    got = trained(module, data[dist.get_rank()])
    assert torch.allclose(got, want, atol=1e-6), (got - want).abs().max()
    say([f.__name__ for f, _ in module._comm_hooks])
"""


@pytest.mark.parametrize("option", ["--replace=gloo", "--hook"])
def test_compiled_programs_run_unchanged(option: str):
    done = run(COMPILED, option, "--policy=none")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['comm_hook']" if option == "--hook" else "[]"] * 4


@pytest.mark.parametrize("backend", ["gloo", "hybridcomp"])
def test_no_use_of_ddp_fails_or_changes_by_the_hook(backend):
    program = [python(), str(Path(__file__).parent / "uses_of_ddp.py"), backend]
    done = subprocess.run(
        [sys.executable, "-m", "hybridcomp", "run", "-n", "2", "--hook", "--policy=none", "--", *program],
        env=environment(HYBRIDCOMP_SUMMARY="1"),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    reasons = ["the policy says none", "sparse gradients go as DDP sends them"]
    assert all(reason in done.stderr for reason in reasons), done.stderr


def test_the_hook_steps_aside_where_it_cannot_be_used():
    done = run(
        """
import torch.testing._internal.distributed.fake_pg, warnings
warnings.simplefilter("always")
dist.init_process_group("fake", rank=0, world_size=4, store=dist.HashStore())
module = DistributedDataParallel(torch.nn.Linear(3, 2))
module(torch.ones(1, 3)).sum()
say(module._comm_hooks)
torch._dynamo.config.optimize_ddp = "python_reducer"
other = DistributedDataParallel(torch.nn.Linear(3, 2))
other(torch.ones(1, 3)).sum()
say(other._comm_hooks)
""",
        "--hook",
        ranks=1,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n[]\n"), done.stderr
    aside = "HYBRIDCOMP_HOOK: a module goes on without the hook: "
    assert f"{aside}nothing is known of the backend fake" in done.stderr
    assert f"{aside}torch's Python reducer hands out no buckets" in done.stderr


def test_the_hook_is_wanted_by_one_alone():
    done = run(DDP + 'os.environ["HYBRIDCOMP_HOOK"] = "yes"; net()\n', "--hook", ranks=1)
    assert done.returncode != 0
    assert "ConfigError: HYBRIDCOMP_HOOK is 'yes'; allowed: 0 or 1" in done.stderr


def test_no_hook_where_it_is_switched_off():
    done = run(DDP + "module = net(); step(module); say(module._comm_hooks)\n", HYBRIDCOMP_HOOK="0", ranks=1)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_a_rank_that_is_started_already_takes_its_launchers_place(tmp_path: Path):
    """``mpiexec -n 3 hybridcomp run -- python ...``, which a lab and srun do, too."""
    script = tmp_path / "where.py"
    script.write_text(HEAD + 'dist.init_process_group("gloo"); say((os.environ["RANK"], total()))\n')
    done = mpiexec(3, "-m", "hybridcomp", "run", "--replace", "gloo", "--", python(), str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [str((str(rank), 3.0)) for rank in range(3)]


def test_an_exit_status_is_the_commands():
    assert run("sys.exit(7 if os.environ['RANK'] == '1' else 0)\n").returncode == 7


def test_a_rank_that_fails_without_mpi_ends_all():
    """The others would wait in init_process_group for its half hour."""
    done = run("sys.exit(7) if os.environ['RANK'] == '0' else dist.init_process_group('gloo')\n")
    assert done.returncode == 7
    assert "hybridcomp run: rank 0 failed with exit status 7; ending all ranks" in done.stderr


def test_a_rank_that_is_killed_ends_all():
    done = run("os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else dist.init_process_group('gloo')\n")
    assert done.returncode == 128 + 9
    assert "hybridcomp run: rank 1 was ended by signal 9; ending all ranks" in done.stderr


def test_signals_of_mpiexec_reach_the_command_once():
    """mpiexec passes a signal on to its ranks, which save their work and end in their own way."""
    body = """
import signal, time
caught = []
signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
say(f"ready {os.getpid()}")
limit = time.monotonic() + 60
while not caught and time.monotonic() < limit:
    time.sleep(0.05)
time.sleep(0.5)
say(f"caught {caught}")
"""
    with subprocess.Popen(command(body), env=environment(), stdout=subprocess.PIPE, text=True) as job:
        try:
            ready = [job.stdout.readline() for _ in range(2)]
            assert all(line.startswith("ready") for line in ready), ready
            job.terminate()
            printed, _ = job.communicate(timeout=60)
        finally:
            job.kill()
    assert printed.splitlines() == ["caught [15]"] * 2
    assert job.returncode == 0

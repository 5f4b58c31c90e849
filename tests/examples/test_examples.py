"""Every program in examples/, run as a user would, at a small size."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.torch.harness import PATH, ROOT, mpiexec
from tests.warm import python

FOLDER = ROOT / "examples"
sys.path.append(str(ROOT / "benchmarks"))  # where its own modules are, as for a script
STUDY = importlib.import_module("onebit_losses")
pytestmark = pytest.mark.timeout(400)  # a test starts up to three programs, each of which imports torch
PROGRAMS = {
    *("ddp", "fsdp2", "tp_pp", "moe", "dlrm", "nanogpt", "torchrun_hook", "onebit"),
    "torchft_ddp",  # run by tests/torch/test_torchft.py
    *("hf_accelerate", "hf_trainer", "lightning_ddp", "ray_train", "heat"),
}


@dataclass
class Said:
    """Output of a program.

    Attributes:
        losses: losses by step or epoch.
        agree: whether all ranks ended with the same bits.
        saved: how many times fewer bytes were sent; 1 where the program does not know.
        summary: all that it printed.
    """

    losses: dict[int, float]
    agree: bool
    saved: float
    summary: str


def read(done: subprocess.CompletedProcess[str]) -> Said:
    assert done.returncode == 0, done.stdout + done.stderr
    losses = {
        int(at): float(loss) for at, loss in re.findall(r"(?:step|epoch) (\d+): loss ([\d.]+)", done.stdout)
    }
    verdict = re.search(r"replicas agree: (\w+)", done.stdout)
    sent = re.search(r"sent ([\d.]+) MB in the place of ([\d.]+) MB", done.stdout)
    assert losses, done.stdout
    assert verdict, done.stdout
    saved = float(sent[2]) / float(sent[1]) if sent else 1.0
    return Said(losses, verdict[1] == "True", saved, done.stdout + done.stderr)


def run(ranks: int, program: str, *args: str, **env: str) -> Said:
    return read(mpiexec(ranks, str(FOLDER / f"{program}.py"), *args, **env))


def started(*command: str, **env: str) -> Said:
    """Run a command with the programs of this environment, in no launcher's."""
    others = ("PMI", "HYBRIDCOMP", "MASTER_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    done = subprocess.run(
        [sys.executable, *command],
        env={**clean, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return read(done)


def torchrun(program: str, *args: str) -> Said:
    how = ["--standalone", "--nproc-per-node", "2", "--no-python", python()]
    return started("-m", "torch.distributed.run", *how, str(FOLDER / f"{program}.py"), *args)


def run_command(program: str, *args: str, options: tuple[str, ...] = ()) -> Said:
    return started(
        "-m", "hybridcomp", "run", "-n", "2", *options, "--", python(), str(FOLDER / f"{program}.py"), *args
    )


def check(said: Said, *, falls_to: float, saved: float = 0) -> None:
    assert said.agree
    first, *_, last = (loss for _, loss in sorted(said.losses.items()))
    assert last < falls_to * first, said.losses
    assert said.saved > saved


def test_each_program_is_tested_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == PROGRAMS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """The checkpoint and the output of two epochs of DDP on two ranks."""
    folder = tmp_path_factory.mktemp("ddp")
    return folder, run(2, "ddp", "--epochs", "2", "--checkpoint", str(folder))


@pytest.mark.long
def test_ddp_goes_on_from_a_checkpoint_as_if_nothing_had_been(checkpoint: tuple[Path, Said], tmp_path: Path):
    saved, first = checkpoint
    shutil.copytree(saved, tmp_path / "run")
    rest = run(2, "ddp", "--epochs", "4", "--checkpoint", str(tmp_path / "run"))
    whole = run(2, "ddp", "--epochs", "4")
    check(whole, falls_to=0.95, saved=4)
    assert first.losses | rest.losses == whole.losses


def test_ddp_goes_on_with_another_number_of_ranks(checkpoint: tuple[Path, Said], tmp_path: Path):
    saved, first = checkpoint
    shutil.copytree(saved, tmp_path / "run")
    rest = run(3, "ddp", "--epochs", "4", "--checkpoint", str(tmp_path / "run"))
    assert rest.agree
    assert rest.losses[4] < rest.losses[3] < first.losses[2]


def test_ddp_with_nothing_but_the_backend():
    said = run(3, "ddp", "--no-hook", "--epochs", "4", "--policy", "topk:ratio=0.1")
    check(said, falls_to=0.98, saved=4)


@pytest.mark.parametrize(("policy", "saved"), [(["--policy", "int4", "--difference"], 4), ([], 2.5)])
def test_fsdp2(policy: list[str], saved: float):
    check(run(2, "fsdp2", "--steps", "10", *policy), falls_to=0.7, saved=saved)


@pytest.mark.long
def test_tensor_and_pipeline_parallel():
    # The default leaves tp's sums alone where all ranks are on one host.
    said = run(4, "tp_pp", "--steps", "10", "--batch", "8", "--policy", "int8:block=128")
    check(said, falls_to=0.7, saved=2.5)
    for axis in ("pp", "tp"):
        assert re.search(rf"{axis} .*int8:block=128", said.summary)


@pytest.mark.long
def test_a_mixture_of_experts():
    said = run(3, "moe", "--steps", "10")
    check(said, falls_to=0.6, saved=3)
    assert re.search(r"ep .*int8:block=128", said.summary)


def test_a_program_that_names_gloo():
    said = run_command("nanogpt", "--steps", "20", "--layers", "2", options=("--replace", "gloo"))
    check(said, falls_to=0.8)
    assert "backend gloo" in said.summary  # it answers to the name that it replaces
    assert re.search(r"default +all_reduce +int8:block=128", said.summary)


def test_a_program_on_gloo_whose_gradients_are_compressed():
    said = run_command("nanogpt", "--steps", "20", "--layers", "2", options=("--hook", "--policy", "int4"))
    check(said, falls_to=0.8)
    assert "backend gloo" in said.summary
    assert re.search(r"dp +all_reduce +int4:block=128", said.summary)


@pytest.mark.long
def test_accelerate():
    launch = (
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--mixed_precision",
        "no",
    )
    said = started(*launch, str(FOLDER / "hf_accelerate.py"), "--steps", "10")
    check(said, falls_to=0.8, saved=4)


@pytest.mark.long
def test_transformers_trainer():
    said = torchrun("hf_trainer", "--max_steps", "10", "--ddp_backend", "hybridcomp")
    check(said, falls_to=0.8)
    assert "backend hybridcomp" in said.summary
    assert re.search(r"default +all_reduce +int8:block=128", said.summary)


@pytest.mark.long
def test_lightning():
    said = run_command("lightning_ddp", "--epochs", "3")
    check(said, falls_to=0.97, saved=4)
    assert re.search(r"dp .*int4:block=128", said.summary)  # the hook took effect


@pytest.mark.long
@pytest.mark.parametrize("program", ["hf_accelerate", "hf_trainer", "lightning_ddp"])
def test_libraries_train_by_exchanged_momenta(program: str):
    options = {
        "hf_accelerate": ("--backend", "gloo", "--freeze-step", "12", "--steps", "20"),
        "hf_trainer": ("--freeze_step", "4", "--max_steps", "10"),
        "lightning_ddp": ("--backend", "gloo", "--freeze-step", "8", "--epochs", "3"),
    }
    check(torchrun(program, *options[program]), falls_to=0.97, saved=5.5)


@pytest.mark.long
def test_ray_train():
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # names of sockets are short
        env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"}
        said = started(str(FOLDER / "ray_train.py"), "--steps", "30", **env)
    check(said, falls_to=0.95, saved=2.5)
    assert "backend hybridcomp" in said.summary


@pytest.mark.long
def test_hook_alone_under_torchrun():
    said = torchrun("torchrun_hook", "--steps", "30")
    check(said, falls_to=0.7, saved=1.2)
    assert "MPI loaded: False" in said.summary


@pytest.mark.long
@pytest.mark.parametrize(("optimizer", "saved", "since"), [("onebit", 5, 8), ("zero-one", 4, 4)])
def test_momenta_are_exchanged(optimizer: str, saved: float, since: float):
    said = torchrun("onebit", "--steps", "50", "--width", "64", "--layers", "2", "--optimizer", optimizer)
    check(said, falls_to=0.75, saved=saved)
    assert float(re.search(r"after step 10 [\d.]+ MB, ([\d.]+) times fewer", said.summary)[1]) > since
    assert STUDY.SAID.search(said.summary)["agree"] == "True"  # what the study of losses reads


def plate(ranks: tuple[int, int], edge: int, steps: int) -> np.ndarray:
    """Return the plate of heat.py, float32 [ranks[0] * edge, ranks[1] * edge], as one process computes it."""
    y, x = (np.linspace(-1, 1, n * edge, dtype=np.float32) for n in ranks)
    cells = np.pad((y[:, None] ** 2 + x**2 < 0.25).astype(np.float32), 1)
    for _ in range(steps):
        around = cells[:-2, 1:-1] + cells[2:, 1:-1] + cells[1:-1, :-2] + cells[1:-1, 2:]
        cells[1:-1, 1:-1] += np.float32(0.2) * (around - 4 * cells[1:-1, 1:-1])
    return cells[1:-1, 1:-1]


@pytest.mark.parametrize(
    ("grid", "policy", "bound", "saved"), [((2, 1), "none", 0, 1), ((2, 2), "bounded:abs=1e-3", 1e-3, 10)]
)
def test_objects_a_window_a_file_and_a_grid(
    grid: tuple[int, int], policy: str, bound: float, saved: float, tmp_path: Path
):
    out, edge, steps = tmp_path / "plate.npy", 1100, 5
    out.write_bytes(b"of an earlier run" * 10**6)
    options = f"--policy {policy} --edge {edge} --steps {steps} --out {out}"
    done = mpiexec(grid[0] * grid[1], str(FOLDER / "heat.py"), *options.split())
    assert done.returncode == 0, done.stdout + done.stderr
    got, want = np.load(out), plate(grid, edge, steps)
    assert out.stat().st_size == 128 + want.nbytes
    assert np.abs(got - want).max() <= 0.4 * bound * steps
    heat = [float(said) for said in re.findall(r"step \d+: heat ([\d.]+)", done.stdout)]
    assert len(heat) == 5
    assert heat[-1] == pytest.approx(got.sum(dtype=np.float64), abs=1e-3)
    wire, plain = map(float, re.findall(r"([\d.]+) MB", done.stdout))
    assert plain >= saved * wire > 0

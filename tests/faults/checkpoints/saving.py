"""Save and load checkpoints in processes that may be killed at it: forks of this one, which has loaded PyTorch.

``python -m tests.faults.checkpoints.saving`` with ``libc.c`` preloaded reads one job after another, as JSON, from
standard input. A fork does each; the result is written: ``{"status": ..., "said": ..., "output": ...}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hybridcomp.torch  # noqa: F401  (so that no fork loads it)
from hybridcomp.errors import ConfigError
from hybridcomp_lab.train.checkpoints.checkpoint import Trained, load_checkpoint, save_checkpoint
from hybridcomp_lab.train.checkpoints.resume import Checkpoint, find_checkpoint
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.topology import Topology, make_topology
from tests.faults.preload import Planted

_JOB_SECONDS = 40.0


def _topology() -> Topology:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return make_topology(1, 1, 1)


def _trained(seed: int, step: int, numbers: int) -> Trained:
    """Return the state after a step: random, but for the seed and the step."""
    torch.manual_seed(seed * 1_000 + step)
    parameters = {f"layer{i}": nn.Parameter(torch.randn(1 + numbers // (1 + i))) for i in range(2)}
    optimizer = torch.optim.AdamW(parameters.values())
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.randn_like(parameter),
            "exp_avg_sq": torch.rand_like(parameter),
        }
    return Trained(parameters, optimizer, {})


def _record(root: str, step: int) -> Checkpoint:
    return Checkpoint(Path(root, "checkpoints", f"step-{step:08d}"), step, step / 7, "policy", {"seed": 1})


def save(
    root: str, seed: int, numbers: int, steps: list[int], keep: int, fault: dict[str, Any] | None
) -> Any:
    """Save checkpoints, the last with a fault; say how many calls that took, and the error."""
    topology, planted = _topology(), Planted()
    *before, last = steps
    for step in before:
        trained = _trained(seed, step, numbers)
        save_checkpoint(_record(root, step), trained, torch.tensor([step]), topology, keep=keep)
    trained, error = _trained(seed, last, numbers), None
    planted.files(Path(root), **(fault or {}))
    try:
        save_checkpoint(_record(root, last), trained, torch.tensor([last]), topology, keep=keep)
    except ConfigError as found:
        error = str(found)
    return {"calls": planted.file_calls(), "error": error}


def load(root: str, seed: int, numbers: int, then: list[int], keep: int) -> Any:
    """Find the checkpoint to go on from, and load it; save others, and do so again.

    Say of each what it is, and which of its values are not as they were saved.
    """
    topology = _topology()
    first = _loaded(root, seed, numbers, topology)
    for step in then:
        trained = _trained(seed, step, numbers)
        save_checkpoint(_record(root, step), trained, torch.tensor([step]), topology, keep=keep)
    return [first, _loaded(root, seed, numbers, topology) if then else None]


def _loaded(root: str, seed: int, numbers: int, topology: Topology) -> Any:
    found = find_checkpoint(TrainConfig(resume="auto", out=root, steps=1_000))
    if found is None:
        return None
    loaded = _trained(seed, 999, numbers)
    traffic = load_checkpoint(found, loaded, topology, same_policy=True)["traffic"]
    rng = torch.get_rng_state()
    want = _trained(seed, found.step, numbers)
    wrong = [] if torch.equal(rng, torch.get_rng_state()) else ["rng"]
    wrong += [] if traffic.tolist() == [found.step] else ["traffic"]
    wrong += [] if found == _record(root, found.step) or found.passed_over else ["record"]
    for name, parameter in want.parameters.items():
        other = loaded.parameters[name]
        wrong += [] if torch.equal(parameter, other) else [name]
        for key, value in want.optimizer.state[parameter].items():
            wrong += [] if torch.equal(value, loaded.optimizer.state[other][key]) else [f"{name}.{key}"]
    return {"step": found.step, "passed over": found.passed_over, "wrong": wrong}


def train(folder: str, arguments: str, fault: dict[str, Any] | None) -> Any:
    """Run ``hybridcomp train`` on one rank; its checkpoints meet the fault."""
    from hybridcomp_lab.cli.train import main

    os.chdir(folder)
    planted, words = Planted(), arguments.split()
    planted.files(Path(words[words.index("--out") + 1], "checkpoints"), **(fault or {}))
    status = main(words)
    return {"calls": planted.file_calls(), "status": status}


JOBS: dict[str, Callable[..., Any]] = {"save": save, "load": load, "train": train}


def _do(job: dict[str, Any], answer: int, output: int) -> None:
    """Do a job in a fork, and end."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        os.write(answer, json.dumps(JOBS[job.pop("job")](**job)).encode())
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(process: int) -> int:
    """Wait for a fork; one that takes too long is ended."""
    deadline = time.monotonic() + _JOB_SECONDS
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return -1000
        time.sleep(0.002)


def main() -> None:
    """Serve until the input ends."""
    _trained(0, 0, 1)  # loads what PyTorch loads late
    for line in sys.stdin:
        assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread"
        with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as output:
            process = os.fork()
            if not process:
                _do(json.loads(line), answer.fileno(), output.fileno())
            status = _wait(process)
            answer.seek(0)
            output.seek(0)
            said, text = answer.read().decode(), output.read().decode(errors="replace")
        done = {"status": status, "said": json.loads(said) if said else None, "output": text}
        print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()

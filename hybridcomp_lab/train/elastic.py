"""Train one replica of several that come and go: ``hybridcomp train --elastic``, over torchft."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import importlib
import json
import logging
import math
import os
import queue
import socket
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from hybridcomp import style
from hybridcomp.errors import ConfigError, DivergedError
from hybridcomp.files import listed, read_bytes, write_text
from hybridcomp_lab.train.checkpoints.checkpoint import Trained, load_checkpoint, state_of, write_checkpoint
from hybridcomp_lab.train.checkpoints.resume import Checkpoint
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.data import Batches
from hybridcomp_lab.train.metrics import MetricsFile, Traffic, per_axis
from hybridcomp_lab.train.model.gpt import GPT, ModelShape, build_gpt, loss_of
from hybridcomp_lab.train.model.precision import compute_in_bf16
from hybridcomp_lab.train.model.recompute import recompute_blocks
from hybridcomp_lab.train.optimizer.optimizers import (
    clip_gradients,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    square_sum,
)
from hybridcomp_lab.train.pipelines.loop import accumulate
from hybridcomp_lab.train.progress import Progress
from hybridcomp_lab.train.reading import to_toml
from hybridcomp_lab.train.start import Job, agreed_text, with_whole_checkpoint

_AXES = ("dp",)
_BETWEEN_QUORUMS = 0.2  # seconds
_BATCHES = (
    "batches"  # name in a checkpoint, among the first rank's own, of the batches of all replicas so far
)
_OWN = (
    *(
        "lighthouse",
        "replica",
        "threads",
        "log_every",
        "timeout",
        "quorum_timeout",
        "digest_every",
        "elastic",
        "checkpoint_every",
        "keep",
        "resume",
        "checkpoint's step",
    ),
    *("policy", "policy's rules", "frozen shares"),
)
"""Settings that replicas may have each of its own; the process group compares the policy."""


def run(job: Job, stop_requested: Callable[[], bool]) -> bool:
    """Train one replica until the last step of all; return whether it is done, not stopped before.

    Args:
        job: job to train, its ``elastic`` true.
        stop_requested: function that tells whether this replica has been asked to leave.

    Raises:
        ConfigError: torchft is absent, there is no lighthouse, too few replicas have come, or the checkpoint that the
            run is to go on from is damaged.
        DivergedError: this replica's loss is not finite.
        MismatchError: this replica's version, policy or settings differ from those of others.
    """
    out = Path(job.config.out or ".")
    if finished(out):
        style.say(f"{out} is done")
        return True
    torch.set_num_threads(job.config.threads)
    with contextlib.closing(Replica(with_whole_checkpoint(job), out)) as replica:
        return replica.train(stop_requested)


def finished(out: Path) -> bool:
    """Tell whether a replica has written that the run is done: who comes later would begin it anew."""
    return any(b'\n{"kind": "summary"' in read_bytes(path) for path in listed(out, "*/metrics.jsonl"))


def name_of(job: Job) -> str:
    """Return the name of this replica: as configured, or that of its host and process."""
    return job.config.replica or f"{socket.gethostname()}-{os.getpid()}"


def settings_of(job: Job) -> dict[str, str]:
    """Return what all replicas must have alike, by name."""
    values = json.loads(agreed_text(job))
    usual = json.loads(json.dumps(dataclasses.asdict(TrainConfig())))
    # Replicas of one version have the same defaults; torchft logs all that they tell each other.
    told = {key: value for key, value in values.items() if key not in _OWN and value != usual.get(key)}
    return {key: json.dumps(value) for key, value in told.items()}


class Replica:
    """A replica of the model, with torchft's manager, which tells of the others.

    Args:
        job: job to train.
        out: run directory of all replicas; this one writes to a folder of its name in it.

    Raises:
        ConfigError: see :func:`run`.
    """

    def __init__(self, job: Job, out: Path) -> None:
        os.environ.setdefault("RUST_LOG", "warn")  # torchft tells of each step
        warnings.filterwarnings(
            "ignore", "The given buffer is not writable"
        )  # of torch, at each live recovery
        try:
            hft = importlib.import_module("hybridcomp.torch.torchft")  # which says what is missing
            theirs = importlib.import_module("torchft.manager")
        except ImportError as error:
            raise ConfigError(f"elastic is over torchft: {error}") from error
        self._config = config = job.config
        lighthouse = config.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
        if not lighthouse:
            raise ConfigError(
                "elastic takes a lighthouse: start torchft_lighthouse, and give --lighthouse http://HOST:PORT, or set "
                "TORCHFT_LIGHTHOUSE"
            )
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled"
        )  # it is: a replica writes by itself
        self._job = job
        self._corpus = job.corpus
        self._name = name_of(job)
        self._out = out / self._name
        self._elapsed = 0.0
        logging.getLogger("torchft").setLevel(logging.CRITICAL)  # what it would say, this says once
        self._plain = self._built(ModelShape.of(job.identity))
        self._parameters = dict(self._plain.named_parameters())
        self._optimizer = make_optimizer(self._parameters, config)
        self._traffic = Traffic(_AXES)
        self._saves = Saves(out, config.keep)
        begun = self._begin_at(job.checkpoint)
        limit = datetime.timedelta(seconds=config.timeout)
        self._group = hft.ProcessGroupGloo(job.policy, limit, settings=settings_of(job))
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        try:
            self._manager = theirs.Manager(
                pg=self._group,
                load_state_dict=self._load,
                state_dict=self._state,
                min_replica_size=config.min_replicas,
                use_async_quorum=False,  # who joins has the others' weights before it begins
                timeout=limit,
                quorum_timeout=datetime.timedelta(seconds=config.quorum_timeout),
                connect_timeout=limit,
                rank=0,
                world_size=1,
                store_addr="localhost",
                store_port=self._store.port,
                lighthouse_addr=lighthouse,
                replica_id=self._name,
            )
        except (RuntimeError, TimeoutError) as error:
            raise ConfigError(
                f"lighthouse {lighthouse} does not answer within {config.timeout:g} s: {error}"
            ) from error
        self._manager.load_state_dict(begun)
        self._lighthouse = lighthouse
        self._model = hft.DistributedDataParallel(
            self._manager, self._plain, bucket_cap_mb=config.bucket_mb, gradient_as_bucket_view=True
        )
        self._policy = job.policy.name

    def close(self) -> None:
        """Leave the others; a checkpoint that is being written is finished first."""
        self._saves.wait()
        self._manager.shutdown(wait=False)
        self._group.shutdown()

    def train(self, stop_requested: Callable[[], bool]) -> bool:
        """Train until the last step, or until asked to leave; return whether it was the last."""
        config = self._config
        values = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("config", "resume")}
        write_text(self._out / "config.toml", to_toml(values), what="to the run directory")
        metrics = MetricsFile(self._out / "metrics.jsonl", config.steps)  # who starts again writes on
        with contextlib.closing(metrics), Progress(config.steps, config.log_every) as progress:
            count = sum(p.numel() for p in self._parameters.values())
            metrics.write(
                "start", {"config": values, "replica": self._name, "parameters": count, "time": time.time()}
            )
            progress.say(
                f"{count:,} parameters, replica {self._name} of those at {self._lighthouse}, policy {self._policy}, "
                f"text: {self._corpus.source} ({self._corpus.train.size:,} tokens), writing {self._out}"
            )
            if self._job.checkpoint is not None:
                for damage in self._job.checkpoint.passed_over:
                    progress.say(f"passed over: {damage}")
                progress.say(f"resumed from {self._job.checkpoint.path}")
            began = self._job.checkpoint is not None
            while self._manager.current_step() < config.steps:
                told = self._step()
                if told is None:
                    progress.say(f"step {self._manager.current_step() + 1} was not committed: {self._why()}")
                    continue
                step = told["step"]
                if began:  # from a checkpoint, or where the others are, if some have gone on
                    metrics.drop_after(step - 1)
                    began = False
                metrics.write("train", told)
                progress.stepped(
                    step,
                    told["loss"],
                    told["tokens_per_s"],
                    told["wire_bytes"],
                    f"{told['replicas']} replicas",
                )
                done = step == config.steps
                if config.checkpoint_every and (done or step % config.checkpoint_every == 0):
                    self._checkpoint(step)
                self._saves.tell(progress.say)
                if config.eval_batches and (done or (config.eval_every and step % config.eval_every == 0)):
                    loss = self._evaluate()
                    metrics.write("eval", {"step": step, "loss": loss})
                    progress.evaluated(step, loss)
                if stop_requested() and not done:
                    progress.say(
                        f"asked to stop (SIGUSR1) after step {step} of {config.steps}: the others go on"
                    )
                    return False
            self._saves.wait()
            self._saves.tell(progress.say)
            metrics.write(
                "summary", {"steps": self._manager.current_step(), "seconds": round(self._elapsed, 6)}
            )
        return True

    # -- a step ----------------------------------------------------------------------------------------

    def _step(self) -> dict[str, Any] | None:
        """Train a step with the replicas that there are; return what to write of it, or None: not committed."""
        config, manager = self._config, self._manager
        start = time.perf_counter()
        self._join()
        replicas, place = manager.num_participants(), manager.participating_rank()
        step = manager.current_step()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._passes(step, replicas, place or 0)
        if not manager.should_commit():
            return None
        norm = math.sqrt(square_sum(list(self._parameters.values())))
        rate = learning_rate(config, step)
        if math.isfinite(norm):
            set_learning_rate(self._optimizer, rate)
            clip_gradients(list(self._parameters.values()), norm, config.clip)
            self._optimizer.step()
        if not math.isfinite(loss):
            raise DivergedError(f"step {step + 1}: the loss is {loss} on replica {self._name}")
        seconds = time.perf_counter() - start
        self._elapsed += seconds
        per_replica = config.replica_batch * config.seq_len
        told: dict[str, Any] = {
            "step": step + 1,
            "loss": loss,
            "lr": rate,
            "grad_norm": norm,
            "replicas": replicas,
            "tokens": manager.batches_committed() * per_replica,
            "step_seconds": round(seconds, 6),
            "tokens_per_s": round(replicas * per_replica / seconds, 3),
            "time": time.time(),
            **per_axis(self._traffic.total(), _AXES),
        }
        if config.digest_every and (step + 1) % config.digest_every == 0:
            told["digest"] = self._digest()
        return told

    def _join(self) -> None:
        """Wait for a quorum of enough replicas, and take over the others' weights where this one has none.

        Raises:
            ConfigError: too few have come within ``quorum_timeout``.
        """
        config, deadline = self._config, time.monotonic() + self._config.quorum_timeout
        while True:
            why = ""
            try:
                self._manager.start_quorum()
                if self._manager.num_participants() >= config.min_replicas:
                    return
            except TimeoutError as error:
                why = f": {error}"
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"no quorum of at least {config.min_replicas} replicas within {config.quorum_timeout:g} s at "
                    f"lighthouse {self._lighthouse}{why}"
                )
            time.sleep(_BETWEEN_QUORUMS)

    def _passes(self, step: int, replicas: int, place: int) -> float:
        """Run the step's forward and backward passes; return the mean loss of this replica's batch."""
        batches = Batches(self._corpus, dataclasses.replace(self._config, dp=replicas))
        batch = torch.from_numpy(batches.train(step, place))
        return accumulate(self._model, batch, self._config.micro_batch_size)

    def _why(self) -> str:
        error = self._manager.errored()
        return "another replica failed" if error is None else str(error.original_exception).partition("\n")[0]

    @torch.no_grad()
    def _evaluate(self) -> float:
        micro = map(torch.from_numpy, Batches(self._corpus, self._config).evaluate(0))
        losses = [float(loss_of(self._plain(tokens[:, :-1]), tokens[:, 1:])) for tokens in micro]
        return sum(losses) / len(losses)

    # -- checkpoints -----------------------------------------------------------------------------------

    def _trained(self) -> Trained:
        return Trained(self._parameters, self._optimizer, {}, buffers=dict(self._plain.named_buffers()))

    def _checkpoint(self, step: int) -> None:
        """Begin to write a checkpoint, if this replica is the first of those that have committed the step."""
        if self._manager.participating_rank() != 0:
            return
        state = state_of(self._trained(), self._traffic.total(), None)
        state[f"rank0.{_BATCHES}"] = torch.tensor(self._manager.batches_committed())
        path = self._saves.folder / f"step-{step:08d}"
        self._saves.begin(
            Checkpoint(path, step, self._elapsed, self._job.policy.digest, self._job.identity), state
        )

    def _begin_at(self, checkpoint: Checkpoint | None) -> dict[str, int]:
        """Take over a checkpoint's weights; return the steps, and the batches of all replicas, until then."""
        if checkpoint is None:
            return {"step": 0, "batches_committed": 0}
        self._elapsed = checkpoint.elapsed
        own = load_checkpoint(checkpoint, self._trained(), None, same_policy=False)
        self._traffic.earlier = own["traffic"]
        # A run of one replica has had as many as steps.
        return {"step": checkpoint.step, "batches_committed": int(own.get(_BATCHES, checkpoint.step))}

    def _built(self, shape: ModelShape) -> GPT:
        model = build_gpt(shape, self._config.seed)
        if self._config.dtype == "bf16":
            compute_in_bf16(model)
        if self._config.recompute == "blocks":
            recompute_blocks(model, self._config.recompute_blocks)
        return model

    def _digest(self) -> str:
        found = hashlib.blake2b(digest_size=16)
        for parameter in self._parameters.values():
            found.update(parameter.detach().view(torch.uint8).numpy().data)
        return found.hexdigest()

    # -- live recovery ---------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {"model": self._plain.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self._plain.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])


class Saves:
    """Write checkpoints in a thread, one at a time: who waits for a disk falls behind the other replicas.

    Args:
        out: run directory of all replicas.
        keep: number of the newest checkpoints to keep.
    """

    def __init__(self, out: Path, keep: int) -> None:
        self.folder = out / "checkpoints"
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def begin(self, checkpoint: Checkpoint, state: dict[str, torch.Tensor]) -> None:
        """Copy the tensors, and write them; after the one that is being written."""
        self.wait()
        copied = {key: tensor.detach().clone() for key, tensor in state.items()}
        self._thread = threading.Thread(target=self._write, args=(checkpoint, copied), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is whole, or has failed."""
        if self._thread is not None:
            self._thread.join()

    def tell(self, say: Callable[[str], None]) -> None:
        """Say what is to be told of the checkpoints since the last call."""
        while not self._said.empty():
            say(self._said.get())

    def _write(self, checkpoint: Checkpoint, state: dict[str, torch.Tensor]) -> None:
        try:
            write_checkpoint(checkpoint, state, None, keep=self._keep)
        except ConfigError as error:  # the others go on, and so does this one
            self._said.put(f"warning: {error}")

"""The training loop of one rank."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hybridcomp.torch as hct
from hybridcomp.errors import ConfigError
from hybridcomp.train.checkpoint import load_checkpoint, save_checkpoint
from hybridcomp.train.config import to_toml
from hybridcomp.train.metrics import MetricsFile, local_traffic, per_axis
from hybridcomp.train.model import ModelShape
from hybridcomp.train.optim import (
    clip_gradients,
    global_norm,
    learning_rate,
    local_square_sums,
    make_optimizer,
    set_learning_rate,
)
from hybridcomp.train.parallel import build_stage, rehearse
from hybridcomp.train.pipeline import make_runner
from hybridcomp.train.progress import Progress
from hybridcomp.train.resume import Checkpoint
from hybridcomp.train.start import Job
from hybridcomp.train.topology import Topology, make_topology

_SETTLING_STEPS = 3  # not counted in the summary's speed: allocations, caches, first connections


@contextlib.contextmanager
def process_group(job: Job) -> Iterator[Topology]:
    """Initialise torch.distributed and the mesh as the job says; ends it again. Collective."""
    config = job.config
    torch.set_num_threads(config.threads)
    if config.backend == "hybridcomp":
        hct.set_policy(job.policy)
    dist.init_process_group(config.backend, timeout=datetime.timedelta(seconds=config.timeout))
    yield make_topology(config.dp, config.pp, config.tp)
    dist.destroy_process_group()


def run(job: Job) -> None:
    """Train; collective over all ranks."""
    with process_group(job) as topology:
        trainer = Trainer(job, topology)
        if topology.rank == 0:
            trainer.run_visibly()
        else:
            trainer.run()


class Trainer:
    """One rank's part of a run.

    Args:
        job: what to train.
        topology: where this rank stands.
    """

    def __init__(self, job: Job, topology: Topology) -> None:
        config = job.config
        self._job = job
        self._config = config
        self._topology = topology
        self._out = Path(config.out or ".")
        shape = ModelShape(job.corpus.vocab_size, config.layers, config.d_model, config.heads, config.seq_len)
        torch.manual_seed(config.seed)  # the default seed differs from process to process
        self._stage = build_stage(shape, config, job.policy, topology)
        self._split = [p for name, p in self._stage.parameters.items() if name in self._stage.split]
        self._shared = [p for name, p in self._stage.parameters.items() if name not in self._stage.split]
        self._optimizer = make_optimizer(self._stage.parameters, config)
        self._runner = make_runner(self._stage, shape, config, topology)
        rehearse(self._stage, shape, config, topology)
        self._step = 0
        self._elapsed = 0.0
        self._timed: list[float] = []
        self._val_loss = math.nan
        self._earlier = torch.zeros(2, 3, dtype=torch.int64)
        if job.checkpoint is not None:
            self._step, self._elapsed = job.checkpoint.step, job.checkpoint.elapsed
            for _ in range(self._step):
                hct.advance_step()  # process groups count steps for the policy's warm-up, but do not save the count
            self._earlier = load_checkpoint(
                job.checkpoint,
                self._stage,
                self._optimizer,
                topology,
                same_policy=job.checkpoint.policy == job.policy.digest,
            )
        # Traffic that is not training's (rehearsal, evaluation, checkpoints) is taken off the counters.
        self._aside = local_traffic()
        self._progress: Progress | None = None
        self._metrics: MetricsFile | None = None

    def run_visibly(self) -> None:
        """Run, and write and show what happens: rank 0."""
        values = {k: v for k, v in dataclasses.asdict(self._config).items() if k not in ("config", "resume")}
        resumed = self._job.checkpoint
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            (self._out / "config.toml").write_text(to_toml(values), encoding="utf-8")
            self._metrics = MetricsFile(
                self._out / "metrics.jsonl", None if resumed is None else resumed.step
            )
        except OSError as error:
            raise ConfigError(f"cannot write to the run directory {self._out}: {error.strerror}") from error
        with (
            contextlib.closing(self._metrics),
            Progress(self._config.steps, self._config.log_every) as progress,
        ):
            self._progress = progress
            self.run()

    def run(self) -> None:
        """Train until the last step, with evaluations and checkpoints; collective."""
        config = self._config
        self._announce()
        while self._step < config.steps:
            self._train_step()
            done = self._step == config.steps
            if config.eval_batches and (done or (config.eval_every and self._step % config.eval_every == 0)):
                self._evaluate()
            if config.checkpoint_every and (done or self._step % config.checkpoint_every == 0):
                self._checkpoint()
        self._summarize()

    def _train_step(self) -> None:
        start = time.perf_counter()
        rate = learning_rate(self._config, self._step)
        set_learning_rate(self._optimizer, rate)
        loss = self._runner.train(self._batch())
        report = self._gather(
            [*local_square_sums(self._split, self._shared), loss], local_traffic() - self._aside
        )
        norm = global_norm(self._topology, report[:, :2])
        parameters = [*self._split, *self._shared]
        if math.isfinite(norm):
            clip_gradients(parameters, norm, self._config.clip)
            self._optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        hct.advance_step()
        self._step += 1
        seconds = time.perf_counter() - start
        self._elapsed += seconds
        self._timed.append(seconds)
        self._show_step(self._mean_loss(report[:, 2]), rate, norm, seconds, report[:, 3:].sum(0).view(2, -1))

    def _batch(self) -> Tensor:
        if self._topology.is_first_stage or self._topology.is_last_stage:
            return torch.from_numpy(self._job.batches.train(self._step, self._topology.dp))
        return torch.empty(0, dtype=torch.int64)

    def _gather(self, values: list[float], counters: Tensor) -> Tensor:
        """Every rank's values and byte counters, fp64 [ranks, values + counters], in one exact message."""
        total = (self._earlier + counters).flatten().double()
        mine = torch.cat([torch.tensor(values, dtype=torch.float64), total])
        everyone = torch.empty(dist.get_world_size(), mine.numel(), dtype=torch.float64)
        # As integers: no policy compresses those.
        dist.all_gather(list(everyone.view(torch.int64)), mine.view(torch.int64))
        return everyone

    def _mean_loss(self, losses: Tensor) -> float:
        """Mean over the replicas of the losses [ranks] that their last stages hold."""
        sizes = self._topology.sizes
        last = [self._topology.rank_of(sizes["pp"] - 1, dp, 0) for dp in range(sizes["dp"])]
        return float(losses[last].mean())

    def _evaluate(self) -> None:
        before = local_traffic()
        micro = [torch.from_numpy(batch) for batch in self._job.batches.evaluate(self._topology.dp)]
        loss = self._runner.evaluate(micro)
        self._val_loss = self._mean_loss(self._gather([loss], before)[:, 0])
        self._aside += local_traffic() - before
        if self._metrics is not None and self._progress is not None:
            self._metrics.write(
                "eval", {"step": self._step, "loss": self._val_loss, "elapsed": round(self._elapsed, 6)}
            )
            self._progress.evaluated(self._step, self._val_loss)

    def _checkpoint(self) -> None:
        before = local_traffic()
        checkpoint = Checkpoint(
            self._out / "checkpoints" / f"step-{self._step:08d}",
            self._step,
            self._elapsed,
            self._job.policy.digest,
            self._job.identity,
        )
        traffic = self._earlier + before - self._aside
        save_checkpoint(
            checkpoint, self._stage, self._optimizer, traffic, self._topology, keep=self._config.keep
        )
        self._aside += local_traffic() - before

    def _announce(self) -> None:
        count = sum(p.numel() for p in self._split) + (
            sum(p.numel() for p in self._shared) if self._topology.tp == 0 else 0
        )
        counts = self._gather([float(count if self._topology.dp == 0 else 0)], local_traffic())[:, 0]
        if self._metrics is None or self._progress is None:
            return
        config = self._config
        mesh = {"pp": config.pp, "dp": config.dp, "tp": config.tp}
        parameters = int(counts.sum())
        values = dataclasses.asdict(config)
        self._metrics.write(
            "start", {"config": values, "ranks": config.ranks, "mesh": mesh, "parameters": parameters}
        )
        self._progress.say(
            f"{parameters:,} parameters on {config.ranks} ranks "
            f"({', '.join(f'{axis} {size}' for axis, size in mesh.items())}), backend {config.backend}, "
            f"policy {self._job.policy.name}, text: {self._job.corpus.source} "
            f"({self._job.corpus.train.size:,} tokens), writing {self._out}"
        )
        if self._job.checkpoint is not None:
            self._progress.say(f"resumed from {self._job.checkpoint.path}")
            if self._job.checkpoint.policy != self._job.policy.digest:
                self._progress.say("it was made under another policy: its error-feedback memory is not used")

    def _show_step(self, loss: float, rate: float, norm: float, seconds: float, counters: Tensor) -> None:
        if self._metrics is None or self._progress is None:
            return
        speed = self._config.tokens_per_step / seconds
        axes = per_axis(counters)
        values: dict[str, Any] = {
            "step": self._step,
            "loss": loss,
            "lr": rate,
            "grad_norm": norm,
            "tokens": self._step * self._config.tokens_per_step,
            "step_seconds": round(seconds, 6),
            "elapsed": round(self._elapsed, 6),
            "tokens_per_s": round(speed, 3),
        }
        self._metrics.write("train", values | axes)
        if not math.isfinite(norm):
            self._progress.say(f"step {self._step}: the gradient's norm is {norm}; weights left as they were")
        self._progress.stepped(self._step, loss, speed, axes["wire_bytes"])

    def _summarize(self) -> None:
        counters = self._gather([], local_traffic() - self._aside).sum(0).view(2, -1)
        if self._metrics is None or self._progress is None:
            return
        timed = self._timed[_SETTLING_STEPS:] or self._timed
        speed = len(timed) * self._config.tokens_per_step / sum(timed)
        axes = per_axis(counters)
        values = {
            "steps": self._step,
            "seconds": round(self._elapsed, 6),
            "tokens_per_s": round(speed, 3),
            "val_loss": self._val_loss,
            **axes,
            "policy": self._job.policy.name,
            "comm": [dataclasses.asdict(row) for row in hct.stats()],
        }
        self._metrics.write("summary", values)
        self._progress.say(
            f"{self._step} steps in {self._elapsed:.1f} s, {speed:,.0f} tokens/s"
            + (f", validation loss {self._val_loss:.4f}" if self._config.eval_batches else "")
        )

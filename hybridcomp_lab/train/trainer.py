"""Run the training loop of one rank."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hybridcomp.torch as hct
from hybridcomp import trace
from hybridcomp.errors import DivergedError
from hybridcomp.files import write_text
from hybridcomp.torch.adapting import new_decisions
from hybridcomp_lab.train.checkpoints.checkpoint import Trained, load_checkpoint, save_checkpoint
from hybridcomp_lab.train.checkpoints.resume import Checkpoint, newest
from hybridcomp_lab.train.metrics import MetricsFile, Traffic, per_axis
from hybridcomp_lab.train.optimizer.update import Replicas, Result, mean_loss
from hybridcomp_lab.train.parallel.exchange import Exchange
from hybridcomp_lab.train.pipelines import Run, make_schedule
from hybridcomp_lab.train.progress import Progress
from hybridcomp_lab.train.reading import to_toml
from hybridcomp_lab.train.start import Job
from hybridcomp_lab.train.techniques import concerns
from hybridcomp_lab.train.topology import Topology, make_topology

_GRADIENTS = "gradient_bytes"  # key in the summary: each rank's peak
_SETTLING_STEPS = 3  # not counted in the summary's speed: allocations, caches, first connections


@contextlib.contextmanager
def process_group(job: Job) -> Iterator[Topology]:
    """Initialise torch.distributed and the mesh as the job says; end them again. Collective."""
    config = job.config
    torch.set_num_threads(config.threads)
    if config.backend == "hybridcomp":
        hct.set_policy(job.policy)
    dist.init_process_group(config.backend, timeout=datetime.timedelta(seconds=config.timeout))
    yield make_topology(config.dp, config.pp, config.tp)
    dist.destroy_process_group()


def run(job: Job, stop_requested: Callable[[], bool]) -> bool:
    """Train; collective over all ranks.

    Args:
        job: job to train.
        stop_requested: function that tells whether this rank has been asked to stop, which all ranks then do together.

    Returns:
        Whether the last step is done; else there is a checkpoint to go on from. The same on all ranks.
    """
    with process_group(job) as topology:
        trainer = Trainer(job, topology, stop_requested)
        return trainer.run_visibly() if topology.rank == 0 else trainer.run()


class Trainer:
    """One rank's part of a run.

    Args:
        job: job to train.
        topology: mesh, with this rank's place in it.
        stop_requested: function that tells whether this rank has been asked to stop.
    """

    def __init__(self, job: Job, topology: Topology, stop_requested: Callable[[], bool]) -> None:
        config = job.config
        self._job = job
        self._config = config
        self._topology = topology
        self._out = Path(config.out or ".")
        torch.manual_seed(config.seed)  # the default seed differs from process to process
        self._traffic = Traffic(config.axes)
        with self._traffic.aside():
            run = Run.of(job, topology, self._traffic.total, stop_requested)
        self._schedule = make_schedule(run)
        self._step = 0
        self._elapsed = [0.0]  # seconds of training after each step since the first of this process
        self._val_loss = math.nan
        if job.checkpoint is not None:
            self._step, self._elapsed = job.checkpoint.step, [job.checkpoint.elapsed]
            for _ in range(self._step):
                hct.advance_step()  # process groups count steps for the policy's warm-up, but do not save the count
            with self._traffic.aside():
                same = job.checkpoint.policy == job.policy.digest
                own = load_checkpoint(job.checkpoint, self._trained(), topology, same_policy=same)
                self._traffic.earlier = own["traffic"]
            self._schedule.resume(self._step)
        self._began = self._step
        self._replicas: Replicas | None = None
        self._progress: Progress | None = None
        self._metrics: MetricsFile | None = None

    def run_visibly(self) -> bool:
        """Run as :meth:`run` does; on rank 0, write metrics and show progress."""
        values = {k: v for k, v in dataclasses.asdict(self._config).items() if k not in ("config", "resume")}
        resumed = self._job.checkpoint
        write_text(self._out / "config.toml", to_toml(values), what="to the run directory")
        self._metrics = MetricsFile(self._out / "metrics.jsonl", None if resumed is None else resumed.step)
        with (
            contextlib.closing(self._metrics),
            Progress(self._config.steps, self._config.log_every) as progress,
        ):
            self._progress = progress
            return self.run()

    def run(self) -> bool:
        """Train until the last step, or until a rank is asked to stop; return whether it was the last.

        It evaluates and writes checkpoints, one of them after the step at which it stops. Collective.
        """
        config = self._config
        self._announce()
        stopping = False
        while self._step < config.steps:
            done = self._step + 1 == config.steps
            evaluates = bool(config.eval_batches) and (done or self._due(config.eval_every))
            saves = bool(config.checkpoint_every) and (done or self._due(config.checkpoint_every))
            results = self._train_step(last=done or evaluates or saves or stopping)
            stopping = stopping or any(result.stop for result in results)
            # A schedule that is behind has begun the next step when it learns of it: that one is the last.
            stops = stopping and not done and results[-1].step + 1 == self._step
            if evaluates:
                self._evaluate()
            if saves or stops:
                self._checkpoint()
            if stops:
                self._say_stopped()
                return False
        self._summarize()
        return True

    def _due(self, every: int) -> bool:
        """Tell whether something that happens after so many steps (0: never) follows the next one."""
        return every > 0 and (self._step + 1) % every == 0

    def _train_step(self, *, last: bool) -> list[Result]:
        start = time.perf_counter()
        try:
            results = self._schedule.train(self._step, last=last)
        except DivergedError as error:
            kept = newest(self._out)
            whence = "there is no checkpoint" if kept is None else f"the newest checkpoint is {kept}"
            raise DivergedError(f"{error}; {whence}. A smaller lr or clip may help") from error
        if trace.recorder is not None:
            trace.recorder.step("hybridcomp train", start)
        hct.advance_step()
        self._step += 1
        self._elapsed.append(self._elapsed[-1] + time.perf_counter() - start)
        for result in results:
            self._show_step(result)
        self._show_decisions()
        return results

    def _evaluate(self) -> None:
        with self._traffic.aside():
            micro = [torch.from_numpy(batch) for batch in self._job.batches.evaluate(self._topology.dp)]
            losses = Exchange([self._schedule.evaluate(micro)]).wait()[:, 0]
        self._val_loss = mean_loss(self._topology, losses)
        if self._metrics is not None and self._progress is not None:
            self._metrics.write(
                "eval",
                {"step": self._step, "loss": self._val_loss, "elapsed": round(self._elapsed[-1], 6)},
            )
            self._progress.evaluated(self._step, self._val_loss)

    def _checkpoint(self) -> None:
        checkpoint = Checkpoint(
            self._checkpoint_path(),
            self._step,
            self._elapsed[-1],
            self._job.policy.digest,
            self._job.identity,
        )
        traffic = self._traffic.total()
        with self._traffic.aside():
            save_checkpoint(checkpoint, self._trained(), traffic, self._topology, keep=self._config.keep)

    def _checkpoint_path(self) -> Path:
        return self._out / "checkpoints" / f"step-{self._step:08d}"

    def _say_stopped(self) -> None:
        dist.barrier()  # no rank leaves before rank 0 has given the checkpoint its name
        if self._progress is not None:
            self._progress.say(
                f"asked to stop (SIGUSR1) after step {self._step} of {self._config.steps}: "
                f"to go on, --resume {self._checkpoint_path()}"
            )

    def _trained(self) -> Trained:
        """Return the state to save or load now."""
        updater = self._schedule.updater
        return Trained(
            updater.parameters,
            updater.optimizer,
            self._schedule.state(),
            updater.apart,
            updater.whole,
            self._schedule.run.model.buffers,
        )

    def _announce(self) -> None:
        updater, topology, model = self._schedule.updater, self._topology, self._schedule.run.model
        mine = [
            size
            for name, size in updater.sizes().items()
            if (topology.tp == 0 or name in model.split) and updater.counts(name) and name not in model.copies
        ]
        count = float(sum(mine))
        with self._traffic.aside():
            counts = Exchange([count]).wait()[:, 0]
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
        for concern in concerns(self._job.policy, config):
            self._progress.say(concern)
        if self._job.checkpoint is not None:
            for damage in self._job.checkpoint.passed_over:
                self._progress.say(f"passed over: {damage}")
            self._progress.say(f"resumed from {self._job.checkpoint.path}")
            if self._job.checkpoint.policy != self._job.policy.digest:
                self._progress.say("it was made under another policy: its error-feedback memory is not used")

    def _show_step(self, result: Result) -> None:
        if self._metrics is None or self._progress is None:
            return
        step = result.step + 1
        after = self._elapsed[step - self._began]
        seconds = after - self._elapsed[result.step - self._began]
        speed = self._config.tokens_per_step / seconds
        axes = per_axis(result.traffic, self._config.axes)
        values: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "lr": result.rate,
            "grad_norm": result.norm,
            "tokens": step * self._config.tokens_per_step,
            "step_seconds": round(seconds, 6),
            "elapsed": round(after, 6),
            "tokens_per_s": round(speed, 3),
        }
        if result.replicas is not None:
            self._replicas = result.replicas
        self._metrics.write("train", values | axes | self._told_of_replicas(result.replicas))
        if not math.isfinite(result.norm):
            self._progress.say(
                f"step {step}: the gradient's norm is {result.norm}; weights left as they were"
            )
        told = "" if self._replicas is None else self._replicas.text
        self._progress.stepped(step, result.loss, speed, axes["wire_bytes"], told)

    def _show_decisions(self) -> None:
        """Write the decisions that were made in the last step: they hold from it on.

        Their own steps are averages where replicas synchronise rarely.
        """
        if self._metrics is not None:
            for decision in new_decisions():
                self._metrics.write("decision", {**decision._asdict(), "step": self._step})

    @staticmethod
    def _told_of_replicas(replicas: Replicas | None) -> dict[str, Any]:
        return {} if replicas is None else {"replicas": dataclasses.asdict(replicas)}

    def _summarize(self) -> None:
        peaks = {**self._schedule.peaks(), _GRADIENTS: self._schedule.updater.gradient_bytes}
        gathered = Exchange([float(n) for n in peaks.values()], self._traffic.total()).wait()
        most = dict(zip(peaks, gathered[:, : len(peaks)].long().T.tolist(), strict=True))
        counters = gathered[:, len(peaks) :].sum(0)
        if self._metrics is None or self._progress is None:
            return
        timed = self._elapsed[_SETTLING_STEPS:] if len(self._elapsed) > _SETTLING_STEPS + 1 else self._elapsed
        speed = (len(timed) - 1) * self._config.tokens_per_step / (timed[-1] - timed[0])
        axes = per_axis(counters.view(2, -1).long(), self._config.axes)
        values = {
            "steps": self._step,
            "seconds": round(self._elapsed[-1], 6),
            "tokens_per_s": round(speed, 3),
            "val_loss": self._val_loss,
            **axes,
            **self._told_of_replicas(self._replicas),
            "policy": self._job.policy.name,
            _GRADIENTS: most.pop(_GRADIENTS),
            "schedule": {"name": self._config.schedule, **most},
            "comm": [dataclasses.asdict(row) for row in hct.stats()],
        }
        self._metrics.write("summary", values)
        self._progress.say(
            f"{self._step} steps in {self._elapsed[-1]:.1f} s, {speed:,.0f} tokens/s"
            + (f", validation loss {self._val_loss:.4f}" if self._config.eval_batches else "")
            + ("" if self._replicas is None else f", {self._replicas.text}")
        )

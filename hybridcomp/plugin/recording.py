"""Record an unmodified program's optimizer steps for ``hybridcomp compare``, and end it after the last one.

The variable ``HYBRIDCOMP_COMPARE`` names a folder with ``plan.json``: how many steps are passed over, measured,
and profiled. A process that imports torch writes ``seen`` there, each rank ``rank-N.json``, rank 0 now and then the
number of its steps, and each process that was rank N to the end a file of its own, ``made-N-...``: two of them tell
that several jobs have run at once.

A step ends when the optimizer that stepped first has stepped after another backward pass: programs with several
optimizers, with one for each parameter, or with one that steps group by group, as DeepSpeed's ZeRO does, count as
others do. Nothing waits for a GPU until the last step: losses stay where they are, and times are events of the GPU's
stream. The share of waiting is read from torch's profiler, in a few steps after the measured ones, for backends of any
kind alike.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import json
import math
import os
import resource
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from hybridcomp.files import checked, read_json, read_text, write_text
from hybridcomp.imports import when_imported
from hybridcomp.intervals import Interval, difference, intersection, length, union
from hybridcomp.launcher import rank_here
from hybridcomp.variables import COMPARE, REPLACE

PLAN = {"warmup": int, "steps": int, "profiled": int}
PROGRESS, SEEN, MADE = "progress.json", "seen", "made"
# What a rank has done: all; all but reading its profile; fewer steps than it was to make; trained without others.
DONE, STEPPED, EARLY, ALONE = "done", "stepped", "early", "alone"
_TOLD_SECONDS = 1.0  # between two writes of the number of steps
_MEET_SECONDS = 30.0  # that a rank waits for the others at the end
_CONNECTION = "hybridcomp-compare"  # prefix of keys in the program's store


def install() -> None:
    """Count steps and losses from now on; does nothing in a process that inherited the variable from a rank.

    Raises:
        ConfigError: the folder has no plan, or a damaged one.
    """
    folder = Path(COMPARE.read())
    plan = checked(read_json(folder / "plan.json"), PLAN, str(folder / "plan.json"))
    if not (folder / SEEN).exists():
        write_text(folder / SEEN, "")
    from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415  (torch is being imported)

    recorder = Recorder(folder, plan["warmup"], plan["steps"], plan["profiled"])
    register_optimizer_step_post_hook(recorder.stepped)
    _watch_losses(recorder.losses)
    atexit.register(recorder.left)


class Losses:
    """Scalars that ``backward`` was called on, step by step: copies that stay on their device until they are read."""

    def __init__(self) -> None:
        self._steps: list[list[Any]] = [[]]
        self.unscaled: dict[int, Any] = {}  # by the id of what a gradient scaler returned
        self.passes = 0  # backward passes, of all kinds

    def note(self, tensors: Any, gradients: Any) -> None:
        """Take the scalars among the tensors of a backward pass that start it, which are given no gradient."""
        self.passes += 1
        many = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
        given = list(gradients) if isinstance(gradients, list | tuple) else [gradients] * len(many)
        for tensor, gradient in zip(many, given, strict=False):
            if gradient is None and hasattr(tensor, "numel") and tensor.numel() == 1:
                scalar = self.unscaled.get(id(tensor), tensor)
                local = scalar.to_local() if hasattr(scalar, "to_local") else scalar
                self._steps[-1].append(local.detach().clone())
        self.unscaled.clear()

    def next_step(self) -> None:
        """Begin the next step's."""
        self._steps.append([])

    def read(self, first: int, count: int) -> list[float | None]:
        """Return each step's mean over its backward passes, or None where it had none."""
        return [
            sum(float(one) for one in losses) / len(losses) if losses else None
            for losses in self._steps[first : first + count]
        ]


def _watch_losses(losses: Losses) -> None:
    """Have every backward pass, and every gradient scaler, show its scalars."""
    import torch  # noqa: PLC0415  (torch is being imported)

    theirs = torch.autograd.backward

    @functools.wraps(theirs)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        losses.note(tensors, grad_tensors)
        return theirs(tensors, grad_tensors, *args, **kwargs)

    def watch(scaler: Any) -> None:
        scale = scaler.scale

        @functools.wraps(scale)
        def scale_and_note(self: Any, outputs: Any) -> Any:
            scaled = scale(self, outputs)
            several = isinstance(outputs, list | tuple)
            for one, its in zip(outputs, scaled, strict=True) if several else ((outputs, scaled),):
                if isinstance(one, torch.Tensor) and one.numel() == 1:
                    losses.unscaled[id(its)] = one.detach()
            return scaled

        scaler.scale = scale_and_note

    torch.autograd.backward = backward
    watch(torch.amp.GradScaler)
    when_imported(  # FSDP's has a method of its own
        "torch.distributed.fsdp.sharded_grad_scaler", lambda module: watch(module.ShardedGradScaler)
    )


class Recorder:
    """Counter of one process's steps.

    Args:
        folder: folder of the run.
        warmup, steps, profiled: optimizer steps that are passed over, measured, and profiled, one after the other.
    """

    def __init__(self, folder: Path, warmup: int, steps: int, profiled: int) -> None:
        self._folder = folder
        self._warmup, self._steps, self._profiled = warmup, steps, profiled
        self._pid = os.getpid()
        self._first: Any = lambda: None  # reference to the optimizer whose steps are counted
        self._count = 0
        self._passes = 0  # backward passes before the last step that counted
        self._times: list[Any] = []
        self._told = 0.0
        self._at_start: dict[str, Any] = {}
        self._record: dict[str, Any] = {}
        self._profiler: Any = None
        self._profiled_since = 0
        self.losses = Losses()

    def stepped(self, optimizer: Any, *_: object) -> None:
        """Take notice that an optimizer has stepped.

        Raises:
            SystemExit: that was the last step; or the process trains alone.
        """
        if os.getpid() != self._pid:
            if self._count:
                return  # a fork of a rank
            self._pid = os.getpid()  # a rank that the program has forked
        if self._first() is None:  # or it is gone: programs may make another
            self._first = weakref.ref(optimizer)
        if self._first() is not optimizer:
            return
        if self._passes and self._passes == self.losses.passes:
            return  # more of the same step
        self._passes = self.losses.passes
        self._count += 1
        self.losses.next_step()
        if self._count == 1:
            self._join()
        first, last = self._warmup, self._warmup + self._steps
        if first <= self._count <= last:
            self._times.append(_mark())
        if self._count == first:
            self._at_start = self._sent()
        if self._count == last:
            self._measured()
            self._profile()
        if self._count >= last + self._profiled:
            self._end()
        self._tell()

    def _join(self) -> None:
        """Find out which rank this is; end a process that trains alone."""
        dist: Any = importlib.import_module("torch.distributed")
        started = dist.is_available() and dist.is_initialized()
        if not started or dist.get_world_size() == 1:
            self._write({"state": ALONE, "rank": rank_here(), "distributed": started})
            raise SystemExit(0)
        self._record = {
            "state": EARLY,
            "rank": dist.get_rank(),
            "size": dist.get_world_size(),
            "host": _host(),
            "hostname": socket.gethostname(),
            "backend": _backend(dist),
        }
        atexit.unregister(self.left)  # it comes before what the program registers, which may take down much
        atexit.register(self.left)
        util = sys.modules.get("multiprocessing.util")
        if util is not None and importlib.import_module("multiprocessing").parent_process() is not None:
            util.Finalize(None, self.left, exitpriority=0)  # a fork runs no functions of atexit

    def _measured(self) -> None:
        """Keep what the measured steps were."""
        ended = self._sent()
        losses = self.losses.read(self._warmup, self._steps)
        lost = [step for step, loss in enumerate(losses) if loss is not None and not math.isfinite(loss)]
        self._record |= {
            "seconds": _between(self._times),
            "loss": [None if step in lost else loss for step, loss in enumerate(losses)],
            "not_finite": lost,  # JSON has no such numbers
            "sent_bytes": _less(ended["interfaces"], self._at_start["interfaces"]),
            "counted_bytes": _less(ended["counted"], self._at_start["counted"]),
            "counted_all_bytes": _less(ended["counted_all"], self._at_start["counted_all"]),
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            **_device(),
        }

    def _sent(self) -> dict[str, Any]:
        """Return what has left the host by its interfaces, and by our statistics, up to now."""
        between, everything = _counted()
        return {"interfaces": _interfaces(), "counted": between, "counted_all": everything}

    def _profile(self) -> None:
        """Start torch's profiler, unless the program uses it itself."""
        import torch  # noqa: PLC0415

        with suppress(Exception):
            if self._profiled and not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
                kinds = [torch.profiler.ProfilerActivity.CPU]
                if not _on_host():
                    kinds.append(torch.profiler.ProfilerActivity.CUDA)
                # A hook's messages go by a thread of its own. Calls of hybridcomp's groups are marked by these
                # themselves, which see no profiler that is all threads'.
                ours = bool(REPLACE.read()) or self._record["backend"] == "hybridcomp"
                every: Any = torch._C._profiler._ExperimentalConfig(profile_all_threads=not ours)
                profiler = torch.profiler.profile(activities=kinds, experimental_config=every)
                profiler.start()
                self._profiler, self._profiled_since = profiler, time.time_ns()
                with torch.profiler.record_function(_HERE):
                    pass

    def _waiting(self) -> float | None:
        """Return the share of the profiled steps in which there was nothing to do but to wait for the network."""
        if self._profiler is None:
            return None
        _mark_end()
        span = self._profiled_since, time.time_ns()
        with suppress(Exception):
            self._profiler.stop()
            return waiting_share(self._profiler.profiler.kineto_results.events(), span)
        return None

    def _end(self) -> None:
        """Write the record, and leave with all other ranks."""
        if self._record["state"] != DONE:
            self._record |= {"state": STEPPED, "count": self._count, "waiting": None}
            write_text(self._folder / f"{MADE}-{self._record['rank']}-{secrets.token_hex(8)}", "")
            self._write(self._record)  # it is kept if the profiler brings down the process
            self._record |= {"state": DONE, "waiting": self._waiting()}
            self._write(self._record)
            with suppress(Exception):  # a store of another kind, or one that is gone: ranks leave one by one
                self._meet()
        raise SystemExit(0)

    def _meet(self) -> None:
        """Wait until all ranks have made their last step, rank 0 until the others have gone on: it keeps the store."""
        from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

        store, size, longest = (
            c10d._get_default_store(),
            self._record["size"],
            timedelta(seconds=_MEET_SECONDS),
        )
        if store.add(f"{_CONNECTION}/arrived", 1) == size:
            store.set(f"{_CONNECTION}/go", "1")
        store.wait([f"{_CONNECTION}/go"], longest)
        if store.add(f"{_CONNECTION}/gone", 1) == size:
            store.set(f"{_CONNECTION}/empty", "1")
        if self._record["rank"] == 0:
            store.wait([f"{_CONNECTION}/empty"], longest)

    def _tell(self) -> None:
        """Write the number of steps, on rank 0, at most once a second."""
        now = time.monotonic()
        if self._record.get("rank") == 0 and (now - self._told > _TOLD_SECONDS or self._count == 1):
            self._told = now
            with suppress(Exception):
                loss = self.losses.read(self._count - 1, 1)[0] if _on_host() else None
                loss = loss if loss is not None and math.isfinite(loss) else None
                write_text(self._folder / PROGRESS, json.dumps({"steps": self._count, "loss": loss}))

    def left(self) -> None:
        """Say at the process's exit how many steps there were, where the last one did not come."""
        if os.getpid() == self._pid and self._count and self._record.get("state") == EARLY:
            self._write(self._record | {"count": self._count})
            if self._profiler is not None:  # one that runs when the process has ended ends it by SIGSEGV
                with suppress(Exception):
                    self._profiler.stop()

    def _write(self, record: dict[str, Any]) -> None:
        write_text(self._folder / f"rank-{record['rank']}.json", json.dumps(record) + "\n")


def _backend(dist: Any) -> str:
    """Return the backend of the default group; of a program that names none, the one that it has got."""
    named = str(dist.get_backend())
    if named != dist.Backend.UNDEFINED:
        return named
    torch = sys.modules["torch"]
    kind = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    )
    return str(dist.Backend.default_device_backend_map.get(kind.type, named))


# -- time and memory, on CPUs and GPUs ---------------------------------------------------------------------


def _on_host() -> bool:
    """Tell whether this process has no GPU in use, so that reading a value waits for nothing."""
    torch = sys.modules["torch"]
    return not (torch.cuda.is_available() and torch.cuda.is_initialized())


def _mark() -> Any:
    """Return the end of a step: an event of the GPU's stream where one is used, else the time."""
    if _on_host():
        return time.perf_counter()
    event = sys.modules["torch"].cuda.Event(enable_timing=True)
    event.record()
    return event


def _mark_end() -> None:
    if not _on_host():
        sys.modules["torch"].cuda.synchronize()


def _between(marks: Sequence[Any]) -> list[float]:
    """Return the seconds from each mark to the next."""
    _mark_end()
    pairs = list(itertools.pairwise(marks))
    if any(isinstance(mark, float) != isinstance(marks[-1], float) for mark in marks):
        return []  # the GPU was first used meanwhile
    if isinstance(marks[-1], float):
        return [after - before for before, after in pairs]
    return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def _device() -> dict[str, Any]:
    if _on_host():
        return {"device": "cpu", "device_memory_bytes": None}
    cuda = sys.modules["torch"].cuda
    return {"device": cuda.get_device_name(), "device_memory_bytes": cuda.max_memory_allocated()}


# -- bytes ---------------------------------------------------------------------------------------------------


def _host() -> str:
    """Return what tells hosts apart: this boot of the machine, and its network as this process sees it."""
    boot = ""
    with suppress(Exception):
        boot = read_text("/proc/sys/kernel/random/boot_id").strip()
    with suppress(OSError):
        boot += ":" + os.readlink("/proc/self/ns/net")
    return boot or socket.gethostname()


def _interfaces() -> dict[str, int] | None:
    """Return the bytes that each interface of this host has sent, but for virtual ones beside real; None if unknown."""
    try:
        lines = read_text("/proc/self/net/dev").splitlines()[2:]
        counts = {
            name.strip(): int(rest.split()[8]) for name, _, rest in (line.partition(":") for line in lines)
        }
    except Exception:  # no program fails by being measured
        return None
    outward = {name: sent for name, sent in counts.items() if name != "lo"}
    real = {name for name in outward if os.path.exists(f"/sys/class/net/{name}/device")}
    return {name: sent for name, sent in outward.items() if name in real} if real else outward


def _counted() -> tuple[int | None, int | None]:
    """Return the bytes that our statistics know of: to other hosts, and in all; None where there are none."""
    registry = sys.modules.get("hybridcomp.torch.registry")
    if registry is None:
        return None, None
    rows = registry.registry.total()
    return sum(row.between_bytes for row in rows), sum(row.wire_bytes for row in rows)


def _less(after: Any, before: Any) -> Any:
    """Return a difference of counts, or of each interface's; None where one is not known."""
    if after is None:
        return None
    if isinstance(after, dict):
        return sum(max(0, sent - (before or {}).get(name, sent)) for name, sent in after.items())
    return after - (before or 0)


# -- waiting -------------------------------------------------------------------------------------------------

_BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:", "hybridcomp:")
_HERE = "hybridcomp compare: this thread makes the steps"
_WAITS = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")
_COMPUTES = (  # no spans that hooks and closures are called in, which may wait: autograd's nodes, an optimizer's step
    "aten::",
    "torch.distributed.ddp.reducer::",
    "Torch-Compiled Region",
)


def waiting_share(events: Iterable[Any], span: Interval) -> float:
    """Return the share of a time in which a collective was under way and nothing was computed.

    Args:
        events: events of torch's profiler: on a GPU its kernels count as computing, elsewhere torch's operations in the
            thread that has the event :data:`_HERE`, or in all threads if none has.
        span: begin and end, in nanoseconds.
    """
    under_way: list[Interval] = []
    waits: list[Interval] = []
    computes: list[Interval] = []
    kernels: list[Interval] = []
    events = list(events)
    here = {event.start_thread_id() for event in events if event.name() == _HERE}
    for event in events:
        name, begin = event.name(), float(event.start_ns())
        where = begin, begin + event.duration_ns()
        if str(event.device_type()).rpartition(".")[2] != "CPU":
            (under_way if name.startswith("nccl") else kernels).append(where)
        elif name.startswith(_BACKENDS):  # from the start of the call to the end of the work
            under_way.append(where)
        elif here and event.start_thread_id() not in here:
            continue
        elif name.startswith(_WAITS):
            waits.append(where)
        elif name.startswith(_COMPUTES):
            computes.append(where)
    busy = union(kernels) if kernels else difference(union(computes), union(waits))
    exposed = intersection(difference(union(under_way), busy), [span])
    return length(exposed) / max(1.0, span[1] - span[0])

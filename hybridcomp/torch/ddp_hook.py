"""A communication hook for ``DistributedDataParallel``, over hybridcomp, gloo, NCCL or any other backend.

``register_comm_hook(HookState(...), comm_hook)``: a policy decides for each parameter. Buckets are taken first in,
first out by one thread, each to its end, so that all ranks run the same collectives in the same order, on a group
that nobody else uses.
"""

# torch reads the hook's annotations as objects: no `from __future__ import annotations` here.

import functools
import threading
import time
import weakref
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from hybridcomp.arrays import DType, as_dtype
from hybridcomp.codecs import Codec, ErrorFeedback, Memory
from hybridcomp.collectives import StatRow
from hybridcomp.errors import CodecMismatchError
from hybridcomp.policy import check_feedback, load_policy
from hybridcomp.torch.channels import open_channel
from hybridcomp.torch.exchange import Encoded, Exact, Exchange, Thing
from hybridcomp.torch.hook_plan import Piece, Plan, last_warmup_step, make_plan
from hybridcomp.torch.linear import Linear
from hybridcomp.torch.memory import pack, unpack
from hybridcomp.torch.options import PolicyLike, default_policy
from hybridcomp.torch.promise import Promise
from hybridcomp.torch.registry import registry
from hybridcomp.torch.worker import Worker

Array = npt.NDArray[Any]


class HookState:
    """What :func:`comm_hook` keeps between steps: one for each DDP module.

    Error-feedback memory and PowerSGD's factors are kept by parameter name, so buckets may be rebuilt, and a run
    may resume, without a false start.
    """

    def __init__(
        self,
        policy: PolicyLike | None = None,
        *,
        module: torch.nn.Module | None = None,
        process_group: Any = None,
        axis: str = "dp",
    ) -> None:
        """Load the policy; the group is made by the first bucket.

        Args:
            policy: as :func:`hybridcomp.load_policy` takes it; None is the default of
                :func:`hybridcomp.torch.set_policy`. The same on all ranks.
            module: gives parameters their names, for a policy's ``exclude``, and if it is the DDP module its
                process group. Without it a parameter is named by its place: ``parameter.0``.
            process_group: that DDP reduces over; None is the module's, or else the default group.
            axis: the policy's section.

        Raises:
            PolicyError: the policy cannot be read.
        """
        self.policy = default_policy() if policy is None else load_policy(policy)
        self.axis = axis
        self.step = 0
        self.feedback = ErrorFeedback(form=None)
        self._factors: dict[str, Array] = {}
        self._module = module
        self._group = process_group or getattr(module, "process_group", None)
        self._names: dict[int, str] = {}
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._warmup = last_warmup_step(self.policy)
        self._rows: dict[tuple[str, str, str, str], StatRow] = {}
        self._rows_lock = threading.Lock()
        self._exchange: Exchange | None = None
        self.label = f"hook:{axis}"
        self._worker = Worker(f"hybridcomp-{self.label}")
        registry.add(self)
        # When this goes, its thread ends, and its statistics stay.
        weakref.finalize(self, _end, self._worker, self._rows).atexit = False

    # -- the hook's side: called by DDP, in the backward pass ----------------------------------------

    def submit(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Queue a bucket; see :func:`comm_hook`."""
        exchange = self._open()
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        plan = self._plan(parameters, buffer, exchange.channel.size)
        step = self.step
        if bucket.is_last():
            self.step += 1
        ready: torch.cuda.Event | None = None
        devices = []
        if buffer.is_cuda:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(buffer.device))
            devices = [buffer.device]
        promise = Promise(devices)
        self._worker.submit(functools.partial(self._work, buffer, plan, step, ready, promise))
        return promise.future

    def _open(self) -> Exchange:
        if self._exchange is None:
            group = dist.group.WORLD if self._group is None else self._group
            self._exchange = Exchange(open_channel(group))
            registry.rank = dist.get_rank()
        return self._exchange

    def _plan(self, parameters: list[torch.Tensor], buffer: torch.Tensor, ranks: int) -> Plan:
        key = (*map(id, parameters), buffer.dtype, min(self.step, self._warmup))
        plan = self._plans.get(key)
        if plan is None:
            dtype = as_dtype(buffer.dtype)
            if not dtype.is_float:
                raise CodecMismatchError(f"the hook averages floating-point gradients, not {buffer.dtype}")
            named = [(self._name(p), tuple(p.shape)) for p in parameters]
            plan = self._plans[key] = make_plan(self.policy, self.axis, dtype, named, self.step, ranks)
        return plan

    def _name(self, parameter: torch.Tensor) -> str:
        if not self._names and self._module is not None:
            for name, known in self._module.named_parameters():
                self._names[id(known)] = name.removeprefix("module.")
        return self._names.setdefault(id(parameter), f"parameter.{len(self._names)}")

    # -- the worker's side ---------------------------------------------------------------------------

    def _work(
        self,
        buffer: torch.Tensor,
        plan: Plan,
        step: int,
        ready: torch.cuda.Event | None,
        promise: Promise,
    ) -> None:
        try:
            if ready is not None:
                ready.synchronize()
            self._average(buffer, plan, step)
            promise.succeed(buffer)
        except Exception as error:
            promise.fail(error)

    def _average(self, buffer: torch.Tensor, plan: Plan, step: int) -> None:
        """Average a bucket over all ranks, in place."""
        exchange = self._exchange
        assert exchange is not None
        began = time.perf_counter()
        rank, size = exchange.channel.rank, exchange.channel.size
        dtype = as_dtype(buffer.dtype)
        host = buffer.detach().cpu()
        wide = host if dtype is dtype.accumulator else host.to(_torch_dtype(dtype.accumulator))
        values = wide.numpy()

        exact = torch.cat([host[p.start : p.stop] for p in plan.exact]) if plan.exact else host[:0]
        codecs = []
        for p in plan.encoded:
            memory, codec = self._memory(p, dtype)
            codecs.append(Encoded(codec, values[p.start : p.stop], memory, rank, size))
        linear = [
            Linear(
                p,
                values[p.start : p.stop],
                self._residual(p, dtype.accumulator),
                self._factors,
                step,
                rank,
                size,
            )
            for p in plan.linear
        ]
        rest = Exact(exact, rank, size, mean=True)
        first = [thing for run in linear for thing in run.next()]
        wire = exchange.sum([rest, *first, *codecs])
        while following := [thing for run in linear for thing in run.next()]:
            wire += exchange.sum(following)

        if plan.exact:
            parts = torch.split(exact, [p.size for p in plan.exact])
            for piece, part in zip(plan.exact, parts, strict=True):
                host[piece.start : piece.stop] = part
        for run in linear:
            run.end()
        if wide is not host:
            for piece in [*plan.encoded, *plan.linear]:
                host[piece.start : piece.stop] = wide[piece.start : piece.stop]
        if buffer.is_cuda:
            buffer.copy_(host)
        parts_of: list[tuple[list[Piece], list[Thing]]] = [(plan.exact, [rest])]
        parts_of += [([p], [thing]) for p, thing in zip(plan.encoded, codecs, strict=True)]
        parts_of += [([p], run.things) for p, run in zip(plan.linear, linear, strict=True)]
        self._count(parts_of, dtype, wire, time.perf_counter() - began)

    def _residual(self, piece: Piece, dtype: DType) -> Array | None:
        if piece.choice.feedback is None:
            return None
        check_feedback("all_reduce", piece.choice.codec, piece.choice.feedback)
        return self.feedback.residual((self.axis, piece.name), piece.size, dtype)

    def _memory(self, piece: Piece, dtype: DType) -> tuple[Memory | None, Codec]:
        """The feedback's memory of a parameter, its step begun, and the codec of that step."""
        codec, form = piece.choice.codec, piece.choice.feedback
        if form is None:
            return None, codec
        memory = self.feedback.memory((self.axis, piece.name), piece.size, dtype, form)
        return memory, codec.at_step(memory.begin())

    def _count(
        self, parts_of: list[tuple[list[Piece], list[Thing]]], dtype: DType, wire: float, total: float
    ) -> None:
        """Add a bucket to the statistics: pieces, and what carried them together.

        Seconds on the wire, and those of the ``total`` that belong to nothing alone, are shared by bytes.
        """
        assert self._exchange is not None
        size = self._exchange.channel.size
        sent = sum(thing.slot for _, things in parts_of for thing in things) or 1
        spent = sum(sum(thing.seconds) for _, things in parts_of for thing in things)
        overhead = max(0.0, total - wire - spent)
        for pieces, things in parts_of:
            slots = sum(thing.slot for thing in things)
            elements = sum(piece.size for piece in pieces)
            for piece in pieces:
                share = piece.size / elements if elements else 0.0
                row = StatRow(self.axis, "all_reduce", piece.choice.codec.spec, piece.choice.reason, calls=1)
                row.raw_bytes = piece.size * dtype.itemsize
                row.plain_bytes = 2 * (size - 1) * row.raw_bytes // size
                row.wire_bytes = round(2 * (size - 1) * slots * share)
                row.wire_seconds = wire * share * slots / sent
                row.encode_seconds = share * (sum(t.seconds[0] for t in things) + overhead * slots / sent)
                row.decode_seconds = share * sum(t.seconds[1] for t in things)
                with self._rows_lock:
                    self._rows.setdefault(row.key, StatRow(*row.key)).add(row)

    # -- memory and statistics (registry.Member) -----------------------------------------------------

    def rows(self) -> list[StatRow]:
        """Statistics up to now."""
        with self._rows_lock:
            return [row for _, row in sorted(self._rows.items())]

    def memory(self) -> dict[str, Array]:
        """What to save: residuals, PowerSGD's factors and the step. Call it between steps."""
        return pack(self.feedback, self._factors, self.step)

    def load_memory(self, arrays: dict[str, Array]) -> None:
        """Take back what :meth:`memory` gave."""
        self.step = unpack(arrays, self.feedback, self._factors)

    def advance(self) -> None:
        """Nothing to do: this counts steps by the last bucket of each."""


def _end(worker: Worker, rows: dict[Any, StatRow]) -> None:
    worker.close()
    registry.keep(list(rows.values()))


def comm_hook(state: HookState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average a bucket of gradients over the group; for ``DistributedDataParallel.register_comm_hook``.

    Args:
        state: of this module.
        bucket: from DDP; its buffer is overwritten by the average.

    Returns:
        A future of the bucket's buffer. All ranks get the same bits. Gradients that are not finite stay so.

    Raises:
        CodecMismatchError: the gradients are not floating-point.
    """
    return state.submit(bucket)


def _torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.label)
    return found

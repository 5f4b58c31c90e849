"""FSDP2's collectives over gloo, NCCL or any other backend: one collective of bytes for all parameters of a module.

All-gather: a rank encodes its segments one after another, one all-gather brings the messages to all, and every rank,
the sender too, decodes the same. Reduce-scatter: a rank encodes its values of every other rank's part, one all-to-all
brings them to their owners, which sum them in rank order. Where nothing is compressed, the backend's own operation
runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

import hybridcomp
from hybridcomp.arrays import as_dtype
from hybridcomp.codecs import ErrorFeedback
from hybridcomp.collectives import StatRow
from hybridcomp.collectives.stats import Call, StatTable
from hybridcomp.policy import Choice
from hybridcomp.torch.backend.reduce_ops import op_kind, reduction
from hybridcomp.torch.fsdp.encoding import Encoder
from hybridcomp.torch.fsdp.pending import PendingWork
from hybridcomp.torch.fsdp.segments import Cut, Segment
from hybridcomp.torch.staging import home

Tensor = torch.Tensor
_ALIGN = 64  # bytes


class TorchTransport:
    """A transport over a process group of torch's.

    Operations start in the program's order, the same on all ranks.

    CUDA tensors are encoded where they are; where the kernels do not run, in host memory.
    """

    def __init__(self, group: Any, axis: str, feedback: ErrorFeedback) -> None:
        self._group = group
        self._axis = axis
        self._feedback = feedback
        self._table = StatTable()
        self.rank, self.size = group.rank(), group.size()
        # The names of versions before 2.13 are the second ones.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def all_gather(
        self, output: Tensor, own: Tensor, cut: Cut, phase: str, then: Callable[[], None] | None = None
    ) -> Work:
        """Start to gather every rank's part: see :meth:`.over_comm.CommTransport.all_gather`."""
        calls = _Calls(self, "all_gather", cut, output.element_size())
        if not cut.encoded:
            work = self._all_gather(output, own, group=self._group, async_op=True)
            return PendingWork(work, [output], lambda: calls.close(self._table, then))
        where = home(own)
        values = own.to(where)
        places, stride = _places(cut, own.dtype, [segment.size for segment, _ in cut.encoded])
        encoded = torch.empty(stride, dtype=torch.uint8, device=where)
        for (segment, choice), place in zip(cut.encoded, places[0], strict=True):
            with calls.of(segment).encoding():
                choice.codec.encode(values[segment.start : segment.stop], out=encoded[place])
        for (segment, _), place in zip(cut.exact, places[1], strict=True):
            encoded[place].view(own.dtype).copy_(values[segment.start : segment.stop])
        mine = encoded.to(own.device)
        everyone = mine.new_empty(self.size * stride)
        work = self._all_gather(everyone, mine, group=self._group, async_op=True)

        def commit() -> None:
            result = output if where == output.device else torch.empty_like(output, device=where)
            parts, messages = result.view(self.size, cut.size), everyone.to(where).view(self.size, stride)
            for part, message in zip(parts, messages, strict=True):
                for (segment, _), place in zip(cut.encoded, places[0], strict=True):
                    with calls.of(segment).decoding():
                        hybridcomp.decode(message[place], out=part[segment.start : segment.stop])
                for (segment, _), place in zip(cut.exact, places[1], strict=True):
                    part[segment.start : segment.stop] = message[place].view(own.dtype)
            if result is not output:
                output.copy_(result)
            calls.sent(cut, places, self.size - 1)
            calls.close(self._table, then)

        return PendingWork(work, [output, everyone, mine], commit)

    def reduce_scatter(self, output: Tensor, given: Tensor, cut: Cut, op: Any) -> None:
        """Reduce all ranks' buffers: see :meth:`.over_comm.CommTransport.reduce_scatter`."""
        calls = _Calls(self, "reduce_scatter", cut, given.element_size())
        if not cut.encoded:
            self._reduce_scatter(output, given, op=op, group=self._group)
            calls.close(self._table)
            return
        how = reduction(op, given.dtype)
        if how.factor is not None:
            given.mul_(how.factor)
        by = self.size if op_kind(op) == dist.ReduceOp.AVG else 1
        where = home(given)
        values = given.to(where)
        result = output if where == output.device else torch.empty_like(output, device=where)
        parts = values.view(self.size, cut.size)
        encoders = [
            Encoder(choice, self._feedback, (self._axis, s.key), s.total, values) for s, choice in cut.encoded
        ]
        kinds = [encoder.dtype for encoder in encoders]
        places, stride = _places(cut, given.dtype, [s.size for s, _ in cut.encoded], kinds)
        send = torch.empty(self.size, stride, dtype=torch.uint8, device=where)
        for q in range(self.size):
            if q != self.rank:
                self._encode(encoders, parts[q], send[q], cut, places, q, calls)
        sent = send.to(given.device)
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=self._group)
        recv = arrived.to(where)
        for (segment, _), encoder, place in zip(cut.encoded, encoders, places[0], strict=True):
            with calls.of(segment).decoding():
                end = segment.start + segment.count(self.rank)
                total = encoder.own(parts[self.rank, segment.start : end], segment.span(self.rank))
                for q in self._others():
                    hybridcomp.decode_add(recv[q, place], total)
                result[segment.start : end] = total / by if by > 1 else total
                result[end : segment.stop].zero_()
        wide = torch.float64 if given.dtype is torch.float64 else torch.float32
        for (segment, _), place in zip(cut.exact, places[1], strict=True):
            total = torch.zeros(segment.size, dtype=wide, device=where)
            for q in range(self.size):
                mine = parts[q, segment.start : segment.stop]
                total += mine if q == self.rank else recv[q, place].view(given.dtype)
            result[segment.start : segment.stop] = total / by if by > 1 else total
        if result is not output:
            output.copy_(result)
        calls.sent(cut, places, self.size - 1)
        calls.close(self._table)

    def _encode(
        self,
        encoders: list[Encoder],
        part: Tensor,
        room: Tensor,
        cut: Cut,
        places: tuple[list[slice], list[slice]],
        q: int,
        calls: _Calls,
    ) -> None:
        """Write the messages for rank ``q``."""
        for (segment, _), encoder, place in zip(cut.encoded, encoders, places[0], strict=True):
            with calls.of(segment).encoding():
                values = part[segment.start : segment.start + segment.count(q)]
                encoder.encode(values, room[place], segment.span(q))
        for (segment, _), place in zip(cut.exact, places[1], strict=True):
            room[place].view(part.dtype).copy_(part[segment.start : segment.stop])

    def _others(self) -> list[int]:
        return [q for q in range(self.size) if q != self.rank]

    def rows(self) -> list[StatRow]:
        """Return the statistics up to now."""
        return self._table.rows()


def _places(
    cut: Cut, dtype: torch.dtype, counts: list[int], kinds: list[torch.dtype] | None = None
) -> tuple[tuple[list[slice], list[slice]], int]:
    """Return the byte ranges of a part's messages (encoded ones, exact ones), and their size together."""
    at = 0

    def place(nbytes: int) -> slice:
        nonlocal at
        found = slice(at, at + nbytes)
        at = -(-found.stop // _ALIGN) * _ALIGN
        return found

    encoded = [
        place(choice.codec.bound(n, as_dtype(kinds[i] if kinds else dtype)))
        for i, ((_, choice), n) in enumerate(zip(cut.encoded, counts, strict=True))
    ]
    exact = [place(segment.size * dtype.itemsize) for segment, _ in cut.exact]
    return (encoded, exact), at


class _Calls:
    """The statistics of one operation, by segment."""

    def __init__(self, transport: TorchTransport, op: str, cut: Cut, itemsize: int) -> None:
        self._began = time.perf_counter()
        self._calls: dict[int, Call] = {}
        others = transport.size - 1
        for segment, choice in [*cut.encoded, *cut.exact]:
            self._calls[segment.start] = self._call(transport, op, segment, choice, others, itemsize)

    @staticmethod
    def _call(
        transport: TorchTransport, op: str, segment: Segment, choice: Choice, others: int, itemsize: int
    ) -> Call:
        plain = segment.size * itemsize * others
        call = Call(
            transport._axis, op, choice.codec.spec, choice.reason, plain + segment.size * itemsize, plain
        )
        call.wire_bytes = plain
        return call

    def of(self, segment: Segment) -> Call:
        """Return the call that counts a segment."""
        return self._calls[segment.start]

    def sent(self, cut: Cut, places: tuple[list[slice], list[slice]], others: int) -> None:
        """Count the bytes of what was encoded."""
        for (segment, _), place in zip(cut.encoded, places[0], strict=True):
            self.of(segment).wire_bytes = (place.stop - place.start) * others

    def close(self, table: StatTable, then: Callable[[], None] | None = None) -> None:
        """Add all to a table; then do what comes next."""
        for call in self._calls.values():
            table.add(call)
        if then is not None:
            then()

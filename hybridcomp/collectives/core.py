"""Operations on flat buffers: ask the policy, pick the algorithm, start it.

:class:`~hybridcomp.collectives.communicator.Communicator` puts mpi4py's face on this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from hybridcomp.arrays import DType, Flat, byte_view
from hybridcomp.codecs import Codec, ErrorFeedback, LinearCodec, Memory, get_codec
from hybridcomp.collectives import p2p
from hybridcomp.collectives.agreement import agree_on_policy
from hybridcomp.collectives.allgather import allgather
from hybridcomp.collectives.allreduce import allreduce
from hybridcomp.collectives.alltoall import Extents, alltoallv
from hybridcomp.collectives.bcast import bcast, binomial_tree
from hybridcomp.collectives.buffers import overlap, same_memory
from hybridcomp.collectives.carry import Array, Carrier
from hybridcomp.collectives.engine import Request, Steps, engine
from hybridcomp.collectives.exact import AVG, native, reduce_native
from hybridcomp.collectives.linear import linear_allreduce
from hybridcomp.collectives.reduce_scatter import reduce_scatter_block
from hybridcomp.collectives.stats import Call, StatRow, StatTable
from hybridcomp.collectives.transport import Transport
from hybridcomp.errors import CodecMismatchError
from hybridcomp.policy import Choice, Message, Policy, check_feedback, load_policy

Op = MPI.Op | str
CodecLike = Codec | str | None

_NONE = get_codec("none")
_MANY = 1 << 40  # elements: more than any min_bytes
_DIRECT_HALF_BYTES = 1 << 16  # uncompressed fp16 and bf16 sums from here on travel as they are, not widened


class Core:
    """A communicator's state and its operations on :class:`~hybridcomp.arrays.Flat` buffers, all non-blocking.

    Attributes:
        policy: what decides on codecs; the same on all ranks.
        axis: the mesh axis that this communicator spans.
        timeout: seconds that any operation may take.
        step: training step, for policies with a warm-up; the caller advances it.
        feedback: error-feedback memory of named messages.
        warm: what linear codecs keep of named messages: PowerSGD's Q.
        mpi: the duplicate that collectives run on.
    """

    def __init__(self, comm: MPI.Comm, policy: Any, axis: str, timeout: float) -> None:
        self.policy: Policy = load_policy(policy)
        self.axis = axis
        self.timeout = timeout
        self.step = 0
        self.feedback = ErrorFeedback(form=None)
        self.warm: dict[str, Array] = {}
        self.mpi = comm.Dup()
        self._p2p = comm.Dup()
        self.rank, self.size = self.mpi.Get_rank(), self.mpi.Get_size()
        self._transport = Transport(self.mpi)
        self._table = StatTable()
        self._choices: dict[tuple[Any, ...], Choice] = {}
        agree_on_policy(self.mpi, self.policy)

    def stats(self) -> list[StatRow]:
        """Totals per operation and codec since the communicator was made, on this rank."""
        return self._table.rows()

    # -- collectives ---------------------------------------------------------------------------------

    def allreduce(
        self, send: Flat, recv: Flat, op: Op, name: str | None, phase: str | None, codec: CodecLike
    ) -> Request:
        """Start an all-reduce of ``send`` into ``recv``."""
        p = self.size
        if overlap(send, recv) and not same_memory(send.data, recv.data):
            send = _copied(send)
        choice = self._choose_sum("all_reduce", recv, op, name, phase, codec)
        call = self._call("all_reduce", choice, recv.nbytes, 2 * (p - 1) * recv.nbytes // p)
        mean = op == AVG
        if not self._direct(choice, recv, op):
            steps = reduce_native(
                lambda s, r: self.mpi.Iallreduce(s, r, _mpi_op(op)), send, recv, p if mean else 1
            )
            return self._start(steps, call, exact=True)
        tag = self._transport.tag
        if isinstance(choice.codec, LinearCodec):
            carrier = Carrier(self._transport, choice.codec, recv.dtype, call)
            linear = linear_allreduce(
                carrier,
                send,
                recv,
                [(tag(), tag()) for _ in range(choice.codec.rounds)],
                mean=mean,
                residual=self._residual(choice, name, recv.size, recv.dtype),
                step=self.step,
                warm=self.warm,
                name=name,
            )
            return self._start(linear, call)
        memory, stepped = self._memory("all_reduce", choice, name, recv.size, recv.dtype)
        carrier = Carrier(self._transport, stepped, recv.dtype, call)
        return self._start(allreduce(carrier, send, recv, (tag(), tag()), mean=mean, memory=memory), call)

    def reduce_scatter_block(
        self, send: Flat, recv: Flat, op: Op, name: str | None, phase: str | None, codec: CodecLike
    ) -> Request:
        """Start a reduce-scatter of equal blocks: ``recv`` gets block ``rank`` of the sum of ``send``."""
        p = self.size
        if send.size != p * recv.size:
            raise ValueError(
                f"reduce_scatter of {send.size} elements on {p} ranks needs {send.size / p:g}, not {recv.size}"
            )
        own = send.data[self.rank * recv.size : (self.rank + 1) * recv.size]
        if overlap(send, recv) and not same_memory(own, recv.data):
            send = _copied(send)
        choice = self._choose_sum("reduce_scatter", send, op, name, phase, codec)
        call = self._call("reduce_scatter", choice, send.nbytes, (p - 1) * recv.nbytes)
        mean = op == AVG
        if choice.codec.linear or not self._direct(choice, send, op):
            if overlap(send, recv):
                send = _copied(send)
            steps = reduce_native(
                lambda s, r: self.mpi.Ireduce_scatter_block(s, r, _mpi_op(op)), send, recv, p if mean else 1
            )
            return self._start(steps, call, exact=True)
        memory, stepped = self._memory("reduce_scatter", choice, name, send.size, send.dtype)
        carrier = Carrier(self._transport, stepped, send.dtype, call)
        steps = reduce_scatter_block(carrier, send, recv, self._transport.tag(), mean=mean, memory=memory)
        return self._start(steps, call)

    def allgather(
        self, send: Flat, recv: Flat, name: str | None, phase: str | None, codec: CodecLike
    ) -> Request:
        """Start an all-gather of every rank's ``send`` into ``recv``."""
        p, n = self.size, send.size
        if recv.size != p * n:
            raise ValueError(
                f"all_gather of {n} elements from {p} ranks needs room for {p * n}, not {recv.size}"
            )
        own = recv.data[self.rank * n : (self.rank + 1) * n]
        in_place = same_memory(send.data, own)
        if overlap(send, recv) and not in_place:
            send = _copied(send)
        choice = self._choose("all_gather", send, name, phase, codec)
        call = self._call("all_gather", choice, recv.nbytes, (p - 1) * send.nbytes)
        if not choice.compresses or p == 1:
            given = MPI.IN_PLACE if in_place else [byte_view(send.data), MPI.BYTE]
            steps = native(lambda: self.mpi.Iallgather(given, [byte_view(recv.data), MPI.BYTE]))
            return self._start(steps, call, exact=True)
        carrier = Carrier(self._transport, choice.codec, send.dtype, call)
        return self._start(allgather(carrier, send, recv, self._transport.tag()), call)

    def alltoallv(
        self,
        send: Flat,
        outgoing: Extents,
        recv: Flat,
        incoming: Extents,
        largest: int | None,
        name: str | None,
        phase: str | None,
        codec: CodecLike,
    ) -> Request:
        """Start an all-to-all; ``outgoing`` and ``incoming`` are (first element, count) per rank.

        The policy is asked about ``self.size`` times the largest part, ``largest`` elements, which all ranks
        must know alike; None is taken for large.
        """
        if overlap(send, recv):
            send = _copied(send)
        away = sum(n for q, (_, n) in enumerate(outgoing) if q != self.rank) * send.dtype.itemsize
        total = _MANY if largest is None else largest * self.size
        choice = self._choose("all_to_all", send, name, phase, codec, elements=total)
        call = self._call("all_to_all", choice, send.nbytes, away)
        if not choice.compresses or self.size == 1:
            item = send.dtype.itemsize
            steps = native(
                lambda: self.mpi.Ialltoallv(
                    [byte_view(send.data), *_byte_extents(outgoing, item), MPI.BYTE],
                    [byte_view(recv.data), *_byte_extents(incoming, item), MPI.BYTE],
                )
            )
            return self._start(steps, call, exact=True)
        carrier = Carrier(self._transport, choice.codec, send.dtype, call)
        return self._start(alltoallv(carrier, send, outgoing, recv, incoming, self._transport.tag()), call)

    def bcast(self, buf: Flat, root: int, name: str | None, phase: str | None, codec: CodecLike) -> Request:
        """Start a broadcast of ``buf`` from ``root``."""
        self._check_rank(root, "root")
        choice = self._choose("broadcast", buf, name, phase, codec)
        down = len(binomial_tree((self.rank - root) % self.size, self.size)[1])
        call = self._call("broadcast", choice, buf.nbytes, down * buf.nbytes)
        if not choice.compresses or self.size == 1:
            steps = native(lambda: self.mpi.Ibcast([byte_view(buf.data), MPI.BYTE], root))
            return self._start(steps, call, exact=True)
        carrier = Carrier(self._transport, choice.codec, buf.dtype, call)
        return self._start(bcast(carrier, buf, root, self._transport.tag()), call)

    def reduce(self, send: Flat, recv: Flat | None, op: Op, root: int) -> Request:
        """Start a reduction to ``root``, by MPI's own."""
        self._check_rank(root, "root")
        if recv is not None and overlap(send, recv) and not same_memory(send.data, recv.data):
            send = _copied(send)
        call = self._plain_call("reduce", send.nbytes, 0 if self.rank == root else send.nbytes)
        by = self.size if op == AVG else 1
        if self.rank != root:
            recv = None
        steps = reduce_native(lambda s, r: self.mpi.Ireduce(s, r, _mpi_op(op), root), send, recv, by)
        return self._start(steps, call, exact=True)

    def gather(self, send: Flat, recv: Flat | None, root: int) -> Request:
        """Start to gather equal blocks at ``root``, by MPI's own."""
        self._check_rank(root, "root")
        call = self._plain_call("gather", send.nbytes, 0 if self.rank == root else send.nbytes)
        if recv is not None and overlap(send, recv):
            send = _copied(send)
        target = None if recv is None else [byte_view(recv.data), MPI.BYTE]
        steps = native(lambda: self.mpi.Igather([byte_view(send.data), MPI.BYTE], target, root))
        return self._start(steps, call, exact=True)

    def scatter(self, send: Flat | None, recv: Flat, root: int) -> Request:
        """Start to scatter equal blocks from ``root``, by MPI's own."""
        self._check_rank(root, "root")
        sent = (self.size - 1) * recv.nbytes if self.rank == root else 0
        call = self._plain_call("scatter", recv.nbytes, sent)
        if send is not None and overlap(send, recv):
            send = _copied(send)
        source = None if send is None else [byte_view(send.data), MPI.BYTE]
        steps = native(lambda: self.mpi.Iscatter(source, [byte_view(recv.data), MPI.BYTE], root))
        return self._start(steps, call, exact=True)

    def barrier(self) -> Request:
        """Start a barrier."""
        return self._start(native(self.mpi.Ibarrier), self._plain_call("barrier", 0, 0), exact=True)

    # -- point to point ------------------------------------------------------------------------------

    def send(
        self, data: Flat, dest: int, tag: int, name: str | None, phase: str | None, codec: CodecLike
    ) -> Request:
        """Start a send."""
        self._check_rank(dest, "dest")
        choice = self._choose("send", data, name, phase, codec)
        framed = self._framed(data.dtype, codec)
        if not framed and choice.compresses:
            choice = Choice(_NONE, None, f"sends of {data.dtype.label} are not compressed")
        call = self._call("send", choice, data.nbytes, data.nbytes)
        if not framed:
            return self._start(p2p.send_bytes(self._p2p, data, dest, tag), call, exact=True)
        carrier = Carrier(self._transport, choice.codec, data.dtype, call)
        return self._start(p2p.send_message(carrier, self._p2p, data, dest, tag), call)

    def recv(self, out: Flat, source: int, tag: int, codec: CodecLike) -> Request:
        """Start a receive; the request's ``status`` says from whom."""
        if source != MPI.ANY_SOURCE:
            self._check_rank(source, "source")
        status = MPI.Status()
        call = self._plain_call("recv", out.nbytes, 0)
        if not self._framed(out.dtype, codec):
            return self._start(p2p.receive_bytes(self._p2p, out, source, tag, status), call, status=status)
        codecs = (get_codec(codec),) if codec is not None else self.policy.codecs(self.axis, "send")
        capacity = max(c.bound(out.size, out.dtype) for c in (_NONE, *codecs))
        carrier = Carrier(self._transport, _NONE, out.dtype, call)
        steps = p2p.receive_message(carrier, self._p2p, out, capacity, source, tag, status)
        return self._start(steps, call, status=status)

    def _framed(self, dtype: DType, codec: CodecLike) -> bool:
        """Whether sends of a dtype carry headers here: the same answer at both ends, whatever the size."""
        if not dtype.is_float:
            return False
        if codec is not None:
            return get_codec(codec).name != "none"
        return bool(self.policy.codecs(self.axis, "send"))

    # -- the policy ----------------------------------------------------------------------------------

    def _choose(
        self,
        op: str,
        data: Flat,
        name: str | None,
        phase: str | None,
        codec: CodecLike,
        elements: int | None = None,
    ) -> Choice:
        if self.size == 1:
            return Choice(_NONE, None, "one rank")
        if codec is not None:
            fixed = get_codec(codec)
            reason = fixed.can_carry(data.dtype, data.shape)
            if reason is not None:
                raise CodecMismatchError(f"{op}: codec {fixed.spec!r} cannot carry this buffer: {reason}")
            return Choice(fixed, None, "asked for in the call")
        shape = data.shape if elements is None else (elements,)
        key = (op, data.dtype, shape, name, phase, self.axis, self.step)
        choice = self._choices.get(key)
        if choice is None:
            if len(self._choices) > 4096:
                self._choices.clear()
            nbytes = math.prod(shape) * data.dtype.itemsize
            message = Message(self.axis, op, phase, data.dtype, nbytes, name, self.step, shape)
            choice = self._choices[key] = self.policy.choose(message)
        return choice

    def _choose_sum(
        self, op_name: str, data: Flat, op: Op, name: str | None, phase: str | None, codec: CodecLike
    ) -> Choice:
        if op not in (MPI.SUM, AVG):
            return Choice(_NONE, None, "neither sum nor average")
        choice = self._choose(op_name, data, name, phase, codec)
        if choice.codec.linear and op_name != "all_reduce":
            return Choice(_NONE, None, f"{choice.codec.name} only all-reduces")
        if choice.compresses and not data.dtype.is_float:
            return Choice(_NONE, None, f"sums of {data.dtype.label} are MPI's own")
        return choice

    @staticmethod
    def _direct(choice: Choice, data: Flat, op: Op) -> bool:
        """Whether our own algorithm runs, and not MPI's."""
        half = data.dtype in (DType.FLOAT16, DType.BFLOAT16)
        big_half = half and op in (MPI.SUM, AVG) and data.nbytes >= _DIRECT_HALF_BYTES
        return choice.compresses or (big_half and choice.reason != "one rank")

    def _residual(self, choice: Choice, name: str | None, n: int, dtype: DType) -> Array | None:
        if choice.feedback is None or name is None:
            return None
        check_feedback("all_reduce", choice.codec, choice.feedback)
        return self.feedback.residual((self.axis, name), n, dtype.accumulator)

    def _memory(
        self, op: str, choice: Choice, name: str | None, n: int, dtype: DType
    ) -> tuple[Memory | None, Codec]:
        """The feedback's memory of a message, its step begun, and the codec of that step."""
        if choice.feedback is None or name is None:
            return None, choice.codec
        check_feedback(op, choice.codec, choice.feedback)
        memory = self.feedback.memory((self.axis, name), n, dtype, choice.feedback)
        return memory, choice.codec.at_step(memory.begin())

    # -- starting ------------------------------------------------------------------------------------

    def _call(self, op: str, choice: Choice, raw: int, plain: int) -> Call:
        return Call(self.axis, op, choice.codec.spec, choice.reason, raw, plain)

    def _plain_call(self, op: str, raw: int, plain: int) -> Call:
        return Call(self.axis, op, _NONE.spec, "never compressed" if op != "recv" else "as sent", raw, plain)

    def _start(
        self, steps: Steps, call: Call, *, exact: bool = False, status: MPI.Status | None = None
    ) -> Request:
        if exact:
            call.wire_bytes = call.plain_bytes
        what = f"{call.op} number {self._transport.sequence} on axis {self.axis!r}, rank {self.rank} of {self.size}"
        return engine().start(self._counted(steps, call), what, self.timeout, status)

    def _counted(self, steps: Steps, call: Call) -> Steps:
        yield from steps
        self._table.add(call)

    def _check_rank(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{what} is {rank}; this communicator has ranks 0 to {self.size - 1}")


def _copied(data: Flat) -> Flat:
    return data._replace(data=data.data.copy(), shares=False)


def _mpi_op(op: Op) -> MPI.Op:
    if op == AVG:
        return MPI.SUM
    assert isinstance(op, MPI.Op)
    return op


def _byte_extents(extents: Sequence[tuple[int, int]], itemsize: int) -> tuple[list[int], list[int]]:
    return [n * itemsize for _, n in extents], [start * itemsize for start, _ in extents]

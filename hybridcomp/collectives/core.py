"""Operations on flat buffers: ask the policy, pick the algorithm, start it.

:class:`~hybridcomp.collectives.communicator.Communicator` puts mpi4py's face on this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from hybridcomp.arrays import Flat
from hybridcomp.codecs import LinearCodec
from hybridcomp.collectives.base import CodecLike, Op
from hybridcomp.collectives.bcast import binomial_tree
from hybridcomp.collectives.buffers import copied, overlap, raw, same_memory, together
from hybridcomp.collectives.engine import Request
from hybridcomp.collectives.exact import AVG, native, reduce_native, reduces_directly
from hybridcomp.collectives.execution.programs import running
from hybridcomp.collectives.linear import linear_allreduce
from hybridcomp.collectives.moves import Moves
from hybridcomp.collectives.reduce_scatterv import reduce_scatterv
from hybridcomp.collectives.stats import Call
from hybridcomp.device import DeviceArray


class Core(Moves):
    """A communicator's operations on :class:`~hybridcomp.arrays.Flat` buffers, all non-blocking.

    Buffers of one call are all in host memory or all on one device; ranks may differ in that.

    Attributes:
        policy: what decides on codecs; the same on all ranks.
        axis: the mesh axis that this communicator spans.
        timeout: seconds that any operation may take.
        step: training step, for policies with a warm-up; the caller advances it.
        feedback: error-feedback memory of named messages.
        warm: what linear codecs keep of named messages: PowerSGD's Q.
        mpi: the duplicate that collectives run on.
        cuda_aware: whether every rank's MPI takes device pointers.
        spoilt: messages that nobody will take may be on their way: it is never freed.
        on_start: called with each operation's statistics, in the thread that starts it, before it moves anything;
            not for blocking operations on plain arrays that MPI does in one call.
    """

    # -- collectives ---------------------------------------------------------------------------------

    def allreduce(
        self,
        send: Flat,
        recv: Flat,
        op: Op,
        name: str | None,
        phase: str | None,
        codec: CodecLike,
        algorithm: str | None = None,
    ) -> Request:
        """Start an all-reduce of ``send`` into ``recv``."""
        p = self.size
        device = together(send, recv)
        if overlap(send, recv) and not same_memory(send.data, recv.data):
            send = copied(send)
        choice = self._choose_sum("all_reduce", recv, op, name, phase, codec)
        about = {"count": recv.size, "dtype": recv.dtype, "reduction": op, "name": name}
        call = self._call("all_reduce", choice, recv.nbytes, 2 * (p - 1) * recv.nbytes // p, **about)
        mean = op == AVG
        feedback = None
        if not choice.codec.linear:
            feedback = self._remembering("all_reduce", choice, name, recv.size)
        form = choice.feedback if feedback else None
        program = None
        if self._programs is not None:
            program = self._programs.all_reduce(choice, recv, op, form, algorithm)
        if program is not None:
            return self._carried(
                lambda carrier, s, r, memory: running(program, s, r, carrier, memory),
                choice.codec,
                call,
                send,
                recv,
                device,
                on_host=True,
                feedback=feedback,
            )
        if not self._direct(choice, recv, op):
            return self._reduced(self.mpi.Iallreduce, op, (), call, send, recv, device)
        tag = self._transport.tag
        if isinstance(choice.codec, LinearCodec):
            pairs = [(tag(), tag()) for _ in range(choice.codec.rounds)]
            residual = self._residual(choice, name, recv.size, recv.dtype)
            step = self.step
            return self._carried(
                lambda carrier, s, r, _: linear_allreduce(
                    carrier,
                    s,
                    r,
                    pairs,
                    mean=mean,
                    residual=residual,
                    step=step,
                    warm=self.warm,
                    name=name,
                ),
                choice.codec,
                call,
                send,
                recv,
                device,
                on_host=residual is not None,
            )
        way, tags = self._way("all_reduce", recv, choice.codec, algorithm, form)
        return self._carried(
            lambda carrier, s, r, memory: way.run(carrier, s, r, tags, mean=mean, memory=memory),
            choice.codec,
            call,
            send,
            recv,
            device,
            way=way,
            feedback=feedback,
        )

    def reduce_scatter_block(
        self,
        send: Flat,
        recv: Flat,
        op: Op,
        name: str | None,
        phase: str | None,
        codec: CodecLike,
        algorithm: str | None = None,
    ) -> Request:
        """Start a reduce-scatter of equal blocks: ``recv`` gets block ``rank`` of the sum of ``send``."""
        p = self.size
        device = together(send, recv)
        if send.size != p * recv.size:
            raise ValueError(
                f"reduce_scatter of {send.size} elements on {p} ranks needs {send.size / p:g}, not {recv.size}"
            )
        own = send.data[self.rank * recv.size : (self.rank + 1) * recv.size]
        if overlap(send, recv) and not same_memory(own, recv.data):
            send = copied(send)
        choice = self._choose_sum("reduce_scatter", send, op, name, phase, codec)
        about = {"count": send.size, "dtype": send.dtype, "reduction": op, "name": name}
        call = self._call("reduce_scatter", choice, send.nbytes, (p - 1) * recv.nbytes, **about)
        mean = op == AVG
        if choice.codec.linear or not self._direct(choice, send, op):
            if overlap(send, recv):
                send = copied(send)
            return self._reduced(self.mpi.Ireduce_scatter_block, op, (), call, send, recv, device)
        feedback = self._remembering("reduce_scatter", choice, name, send.size)
        way, tags = self._way(
            "reduce_scatter", send, choice.codec, algorithm, choice.feedback if feedback else None
        )
        return self._carried(
            lambda carrier, s, r, memory: way.run(carrier, s, r, tags, mean=mean, memory=memory),
            choice.codec,
            call,
            send,
            recv,
            device,
            way=way,
            feedback=feedback,
        )

    def reduce_scatter(
        self,
        send: Flat,
        recv: Flat,
        counts: Sequence[int],
        op: Op,
        name: str | None,
        phase: str | None,
        codec: CodecLike,
    ) -> Request:
        """Start a reduce-scatter of parts of any size: ``recv`` gets part ``rank`` of the sum of ``send``."""
        if len(counts) != self.size or send.size != sum(counts) or recv.size != counts[self.rank]:
            raise ValueError(
                f"reduce_scatter of {send.size} elements into {recv.size} on rank {self.rank} of {self.size} does not "
                f"fit the counts {', '.join(map(str, counts))}"
            )
        if len(set(counts)) == 1:
            return self.reduce_scatter_block(send, recv, op, name, phase, codec)
        device = together(send, recv)
        if overlap(send, recv) or not recv.size:  # MPI minds the address of an empty one, too
            send = copied(send)
        choice = self._choose_sum("reduce_scatter", send, op, name, phase, codec)
        about = {"counts": counts, "dtype": send.dtype, "reduction": op, "name": name}
        call = self._call("reduce_scatter", choice, send.nbytes, send.nbytes - recv.nbytes, **about)
        mean = op == AVG
        if choice.codec.linear or not self._direct(choice, send, op):

            def post(a: Any, b: Any, mpi_op: MPI.Op) -> MPI.Request:
                return self.mpi.Ireduce_scatter(a, b, counts, mpi_op)

            return self._reduced(post, op, (), call, send, recv, device)
        tags = [self._transport.tag()]
        return self._carried(
            lambda carrier, s, r, memory: reduce_scatterv(
                carrier, s, r, counts, tags, mean=mean, memory=memory
            ),
            choice.codec,
            call,
            send,
            recv,
            device,
            feedback=self._remembering("reduce_scatter", choice, name, send.size),
        )

    def allgather(
        self,
        send: Flat,
        recv: Flat,
        name: str | None,
        phase: str | None,
        codec: CodecLike,
        algorithm: str | None = None,
    ) -> Request:
        """Start an all-gather of every rank's ``send`` into ``recv``."""
        p, n = self.size, send.size
        device = together(send, recv)
        if recv.size != p * n:
            raise ValueError(
                f"all_gather of {n} elements from {p} ranks needs room for {p * n}, not {recv.size}"
            )
        own = slice(self.rank * n, (self.rank + 1) * n)
        if overlap(send, recv) and not same_memory(send.data, recv.data[own]):
            send = copied(send)
        choice = self._choose("all_gather", send, name, phase, codec)
        about = {"count": n, "dtype": send.dtype, "name": name}
        call = self._call("all_gather", choice, recv.nbytes, (p - 1) * send.nbytes, **about)
        if not choice.compresses:
            return self._native(
                lambda s, r, turn, events: native(
                    lambda: self.mpi.Iallgather(
                        MPI.IN_PLACE if same_memory(s.data, r.data[own]) else raw(s), raw(r)
                    ),
                    turn,
                    events,
                ),
                call,
                send,
                recv,
                device,
            )
        way, tags = self._way("all_gather", recv, choice.codec, algorithm)
        return self._carried(
            lambda carrier, s, r, _: way.run(carrier, s, r, tags),
            choice.codec,
            call,
            send,
            recv,
            device,
            way=way,
        )

    def bcast(
        self,
        buf: Flat,
        root: int,
        name: str | None,
        phase: str | None,
        codec: CodecLike,
        algorithm: str | None = None,
    ) -> Request:
        """Start a broadcast of ``buf`` from ``root``."""
        self._check_rank(root, "root")
        device = together(buf)
        choice = self._choose("broadcast", buf, name, phase, codec)
        down = len(binomial_tree((self.rank - root) % self.size, self.size)[1])
        about = {"count": buf.size, "dtype": buf.dtype, "root": root, "name": name}
        call = self._call("broadcast", choice, buf.nbytes, down * buf.nbytes, **about)
        loads = self.rank == root
        if not choice.compresses:
            return self._native(
                lambda _, r, turn, events: native(lambda: self.mpi.Ibcast(raw(r), root), turn, events),
                call,
                None,
                buf,
                device,
                loads=loads,
            )
        way, tags = self._way("broadcast", buf, choice.codec, algorithm)
        return self._carried(
            lambda carrier, _s, r, _m: way.run(carrier, r, root, tags),
            choice.codec,
            call,
            None,
            buf,
            device,
            way=way,
            loads=loads,
        )

    def reduce(
        self,
        send: Flat,
        recv: Flat | None,
        op: Op,
        root: int,
        name: str | None = None,
        phase: str | None = None,
        codec: CodecLike = None,
        algorithm: str | None = None,
    ) -> Request:
        """Start a reduction to ``root``; elsewhere ``recv`` is not used."""
        self._check_rank(root, "root")
        recv = recv if self.rank == root else None
        device = together(send, recv)
        if recv is not None and overlap(send, recv) and not same_memory(send.data, recv.data):
            send = copied(send)
        about = {"count": send.size, "dtype": send.dtype, "reduction": op, "root": root}
        choice = self._choose_sum("reduce", send, op, name, phase, codec)
        call = self._call("reduce", choice, send.nbytes, 0 if self.rank == root else send.nbytes, **about)
        if not choice.compresses:
            return self._reduced(self.mpi.Ireduce, op, (root,), call, send, recv, device)
        if self.rank == root and (recv is None or (recv.size, recv.dtype) != (send.size, send.dtype)):
            what = "none" if recv is None else f"{recv.size} {recv.dtype.label}"
            raise ValueError(
                f"reduce of {send.size} {send.dtype.label} needs as much room at the root, not {what}"
            )
        mean = op == AVG
        way, tags = self._way("reduce", send, choice.codec, algorithm)
        return self._carried(
            lambda carrier, s, r, _: way.run(carrier, s, r, root, tags, mean=mean),
            choice.codec,
            call,
            send,
            recv,
            device,
            way=way,
        )

    def barrier(self) -> Request:
        """Start a barrier."""
        return self._native(
            lambda _s, _r, turn, events: native(self.mpi.Ibarrier, turn, events),
            self._plain_call("barrier", 0, 0),
            None,
            None,
            [],
        )

    def _reduced(
        self,
        post: Any,
        op: Op,
        extra: tuple[int, ...],
        call: Call,
        send: Flat,
        recv: Flat | None,
        device: list[DeviceArray],
    ) -> Request:
        """Start one of MPI's reductions."""
        by = self.size if op == AVG else 1
        mpi_op = MPI.SUM if op == AVG else op
        plain = reduces_directly(send.dtype, by)
        return self._native(
            lambda s, r, turn, events: reduce_native(
                lambda a, b: post(a, b, mpi_op, *extra), s, r, by, turn, events
            ),
            call,
            send,
            recv,
            device,
            direct=None if plain else False,
        )

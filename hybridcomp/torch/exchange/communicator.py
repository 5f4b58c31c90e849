"""Start operations over a process group of torch's that is none of hybridcomp's: gloo, NCCL or any other backend."""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp import native
from hybridcomp.arrays import Flat, flatten
from hybridcomp.codecs import Codec, ErrorFeedback
from hybridcomp.collectives.algorithms.schedules import OperationKey, Schedules
from hybridcomp.collectives.choices import OperationOptions
from hybridcomp.collectives.data_path.carrier import STREAM_BYTES, Carrier
from hybridcomp.collectives.data_path.coding import Array
from hybridcomp.collectives.engine.programs import Programs, running
from hybridcomp.collectives.execution.steps import Pending, Steps
from hybridcomp.collectives.figures import Figures
from hybridcomp.collectives.memory import on_device
from hybridcomp.collectives.operations.flat_parts import remembering
from hybridcomp.collectives.starting import Operands, OperationStarter
from hybridcomp.collectives.stats import Call, StatRow, StatTable
from hybridcomp.collectives.transport.pools import HeapPool, Pool
from hybridcomp.policy import Choice, Policy
from hybridcomp.top.publish import Activity, show
from hybridcomp.top.snapshot import InFlight
from hybridcomp.torch.exchange.automatic import Automatic
from hybridcomp.torch.exchange.batch import Batch, BatchPlan, Known, exchanges_of
from hybridcomp.torch.exchange.group import ExchangeGroup
from hybridcomp.torch.exchange.operation import ExchangeOperation
from hybridcomp.torch.exchange.pipeline import Pipeline
from hybridcomp.torch.exchange.transport import BatchTransport
from hybridcomp.torch.exchange.worker import Worker

Tensor = torch.Tensor
_MOST_BYTES = 1 << 30  # of an array whose operation is compiled
_DEVICE_SECONDS = 300.0  # longest time of a device's work between two exchanges


class TorchCommunicator(OperationStarter[ExchangeOperation]):
    """The ranks of a process group, for operations whose messages are encoded.

    Making one is collective over its members. Operations are started within :meth:`coalescing`, in the same order on
    all ranks; a thread of its own runs them. The methods that start an operation on tensors take what FSDP gives
    :class:`~hybridcomp.collectives.communicator.Communicator`'s of the same names.

    Attributes:
        topology: hosts of the ranks; where hosts have several, operations have two levels, and bytes leave a host once.
        policy: policy of all ranks.
        decider: decider of the choices that the policy leaves to ``auto``; None where it leaves none.
        feedback: error-feedback memory of named messages.
        warm: arrays that linear codecs keep of named messages.
        apart: why ranks of this host share no memory, to follow the reason of a choice in the statistics; "" where
            they do, or need not.
        on_start: function called with each operation's statistics, in the thread that starts it.
    """

    coalesced_below = 1 << 62  # a round of a linear codec is one exchange to, and one fro

    def __init__(
        self, group: ExchangeGroup, policy: Policy, axis: str, feedback: ErrorFeedback, name: str
    ) -> None:
        """Start operations on a group.

        Args:
            group: group that nobody else uses.
            policy: policy, the same on all ranks.
            axis: mesh axis, part of the memory's keys.
            feedback: memory of named messages.
            name: name of the thread.

        Raises:
            MismatchError: the ranks' versions or policies differ.
        """
        self._group = group
        self.policy = group.check_alike(policy)
        self._axis = axis
        self.step = 0
        self.feedback = feedback
        self.warm: dict[str, Array] = {}
        self.on_start: Callable[[Call], None] | None = None
        self.topology = group.topology()
        self._schedules = Schedules(self.topology, self.rank, None)
        # Nothing is sent through it: programs are compiled for a group.
        handle = native.kernels().engine_group(0, self.rank, self.size, True)
        self._programs = Programs(handle, self._schedules)
        self._sizes: dict[Hashable, Known] = {}
        why = group.join_host(self.topology)
        self.apart = f"; {why}" if why else ""
        self._pool: Pool = HeapPool() if group.lanes is None else group.lanes.pool
        self._blocks = heap_blocks(os.getpid()) if group.lanes is None else group.lanes.pool.blocks
        self._near = [group.lanes is not None and rank in group.lanes.ranks for rank in range(self.size)]
        self._pipeline = Pipeline(group.keep)
        self._worker = Worker(name)
        self._table = StatTable()
        self._started = 0
        self._batch: Batch | None = None
        self._batches: weakref.WeakSet[Batch] = weakref.WeakSet()
        self._automatic = Automatic(self._table, self._worker, self._pipeline, group, self.topology)
        self.decider = self._automatic.begin(self.policy)
        # The thread ends with this object.
        weakref.finalize(self, self._worker.close).atexit = False
        place = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (group.rank, group.size)
        )
        show(self, self._table.rows, *place)

    @property
    def rank(self) -> int:
        """Return the number of this rank in the group."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Return the number of ranks of the group."""
        return self._group.size

    @property
    def hosts(self) -> int:
        """Return the number of hosts that the ranks are on."""
        return self.topology.count

    @property
    def host_memory(self) -> bool:
        """Tell whether the backend carries messages from host memory."""
        return self._group.host_memory

    @property
    def axis(self) -> str:
        """Return the mesh axis that the ranks span."""
        return self._axis

    def review(self) -> None:
        """Review the decisions of ``auto``, if that is due; called before an operation whose choice is asked for."""
        if self.decider is not None:
            self._automatic.review(self._started)

    def gather_figures(self, values: Figures) -> Callable[[], Figures]:
        """See :meth:`OperationStarter.gather_figures`."""
        return self._automatic.gather(values)

    def decide_together(self, larger: ExchangeGroup) -> None:
        """Decide by the figures of all ranks of a larger group: see :meth:`.Communicator.decide_together`.

        Args:
            larger: group of all these ranks, that nobody else uses.
        """
        self._automatic.join(larger, self.policy)
        self.decider = self._automatic.begin(self.policy)

    @property
    def deciding(self) -> int:
        """Return the number of ranks that decide together."""
        return self._automatic.deciding

    @contextmanager
    def coalescing(self, plan: BatchPlan, *, on_host: bool) -> Iterator[None]:
        """Let the operations that are started inside travel together.

        Args:
            plan: plan of the operations; the same on all ranks.
            on_host: whether the callers' arrays are in host memory, on all ranks.
        """
        compiled = None
        if on_host and self._group.host_memory:
            compiled = native.kernels().CarriedOperations(
                self.rank, self._near, self.topology.away(self.rank), self._blocks
            )
        batch = self._batch = Batch(
            plan, self._group, self.topology, self._sizes, self._pool, _DEVICE_SECONDS, compiled
        )
        self._batches.add(batch)
        self.transport = batch.transport
        # A batch is long out of the caches when its results are read.
        self._stream_from = 0 if plan.nbytes >= STREAM_BYTES else STREAM_BYTES
        try:
            yield
        except BaseException as error:
            batch.fail(error)
            raise
        finally:
            self._batch = None
            pipeline = self._pipeline
            self._worker.submit(lambda: pipeline.start(batch))

    def flush(self) -> None:
        """Let all started operations go on to their end; to be called where nothing else starts for a while."""
        self._worker.submit(self._pipeline.flush)

    def stats(self) -> list[StatRow]:
        """Return totals per operation and codec, on this rank."""
        return self._table.rows()

    def activity(self) -> Activity:
        """Return the activity that ``hybridcomp top`` shows; may be called by any thread."""
        now, key = time.time() - time.monotonic(), self._group.key
        flying = [
            InFlight(op, axis, f"{key:x}", number, now + operation.began, ())
            for batch in list(self._batches)
            for operation in batch.in_flight
            for op, number, axis, *_ in [operation.name or ("", 0, "")]
        ]
        return Activity(key, self._axis, self.size, self._started, self._table.rows(), flying)

    # -- operations on tensors -----------------------------------------------------------------------

    def start_allgather(self, send: Tensor, recv: Tensor, options: OperationOptions) -> ExchangeOperation:
        """Start an all-gather of every rank's ``send``, all of one size, into ``recv``."""
        n = send.numel()
        extents = ([n] * self.size, [rank * n for rank in range(self.size)])
        return self.start_allgatherv(send, [recv, extents], options)

    def start_allgatherv(
        self, send: Tensor, recv: Sequence[Any], options: OperationOptions
    ) -> ExchangeOperation:
        """Start an all-gather of every rank's ``send`` into its part of a tensor.

        Args:
            send: 1-D contiguous tensor.
            recv: the tensor, and the number of elements and the first element of each rank's part.
            options: name of the sent tensor, for traces, and choice that carries it.
        """
        (data, (counts, starts)), choice = recv, _chosen(options)
        given, room = flatten(send, device=True), flatten(data, writable=True, device=True)
        raw = sum(counts) * room.dtype.itemsize
        call = self.new_call("all_gather", choice, raw, (self.size - 1) * given.nbytes, name=options.name)
        receives = tuple(zip(starts, counts, strict=True))
        key = OperationKey.of("all_gather", choice, room.dtype, tuple(counts), receives=receives)
        return self.start_scheduled(key, call, Operands(given, room, on_device(given, room)))

    def start_reduce_scatter_block(
        self, send: Tensor, recv: Tensor, op: Any, options: OperationOptions
    ) -> ExchangeOperation:
        """Start a reduce-scatter of parts of one size."""
        return self.start_reduce_scatter(send, recv, [recv.numel()] * self.size, op, options)

    def start_reduce_scatter(
        self, send: Tensor, recv: Tensor, counts: Sequence[int], op: Any, options: OperationOptions
    ) -> ExchangeOperation:
        """Start a reduce-scatter: ``recv`` gets this rank's part of the sum of ``send``.

        Args:
            send: 1-D contiguous tensor of all parts.
            recv: this rank's part.
            counts: number of elements of each rank's part.
            op: ``"avg"``; everything else is a sum.
            options: name of the memory of error feedback, and choice that carries it.
        """
        choice, name = _chosen(options), options.name
        given, room = flatten(send, device=True), flatten(recv, writable=True, device=True)
        plain = given.nbytes - room.nbytes
        call = self.new_call("reduce_scatter", choice, given.nbytes, plain, name=name)
        feedback, form = remembering(self, "reduce_scatter", choice, name, given.size)
        reduction = "avg" if op == "avg" else "sum"
        key = OperationKey.of("reduce_scatter", choice, given.dtype, tuple(counts), reduction, feedback=form)
        operands = Operands(given, room, on_device(given, room))
        return self.start_scheduled(key, call, operands, feedback=feedback)

    # -- the sums of linear codecs -------------------------------------------------------------------

    def reserve(self) -> Any:
        """Reserve the tags or numbers for the messages of one sum, in program order."""
        compiled = self.transport.compiled
        return super().reserve() if compiled is None else compiled.reserve()

    def sum_array(
        self, carrier: Carrier, flat: Flat, key: OperationKey, algorithm: str | None, reserved: Any
    ) -> Steps:
        """Sum an array over the ranks; ends after as many exchanges on all of them.

        A rank that waits for less than others would send messages of its next sum before these wait for them.
        """
        batch = carrier.transport
        assert isinstance(batch, BatchTransport)
        end = batch.turn(batch.exchanges + exchanges_of("all_reduce", self.topology))
        if batch.compiled is None:
            yield from super().sum_array(carrier, flat, key, algorithm, reserved)
        elif flat.size:
            program = self._programs.find(key._replace(compresses=False))
            yield from running(program, reserved, carrier, flat, flat)
        yield Pending([end], [])

    # -- starting ------------------------------------------------------------------------------------

    def new_call(self, op: str, choice: Choice, raw: int, plain: int, **about: Any) -> Call:
        """Make the statistics of an operation: see :meth:`.OperationStarter.new_call`."""
        return Call(self._axis, op, choice.counted_as, choice.reason + self.apart, raw, plain, about)

    def find_compiled(
        self, key: OperationKey, algorithm: str | None
    ) -> Callable[..., ExchangeOperation] | None:
        """Find an operation's program: see :meth:`.OperationStarter.find_compiled`."""
        if self.transport.compiled is None or _long(key):
            return None
        program = self._programs.find(key, algorithm, alone=True)
        return None if program is None else self._executing(program, self._programs.codec(key, algorithm))

    def find_joined(
        self, key: OperationKey, extents: Sequence[tuple[int, int]]
    ) -> Callable[..., ExchangeOperation] | None:
        """Find the program of an operation on parts of an array: see :meth:`.OperationStarter.find_joined`."""
        if self.transport.compiled is None or _long(key):
            return None
        program = self._programs.find_joined(key, tuple(extents))
        if program is None:
            return None
        return self._executing(program, self._programs.codec(key._replace(counts=key.counts[:1])))

    def _executing(self, program: Any, codec: Codec) -> Callable[..., ExchangeOperation]:
        """Return a function that starts a compiled program, in whichever batch is being made then."""

        def start(
            call: Call, operands: Operands, *, feedback: Callable[[Carrier], Any] | None = None
        ) -> ExchangeOperation:
            call.memory = "host"
            run = functools.partial(running, program, self.transport.compiled.reserve(), codec=codec)
            return self.start_carried(run, codec, call, operands, on_host=True, feedback=feedback)

        return start

    def start_steps(self, steps: Steps, call: Call) -> ExchangeOperation:
        """Start an operation in the batch that is being made: see :meth:`.OperationStarter.start_steps`."""
        batch = self._batch
        assert batch is not None, "operations are started within coalescing()"
        self._started += 1
        what = (call.op, self._started, self._axis, self.rank, self.size)
        pipeline, worker = self._pipeline, self._worker
        operation = ExchangeOperation(
            _counted(steps, call, self._table),
            what,
            lambda: worker.submit(lambda: pipeline.flush(batch)),
        )
        batch.add(operation)
        if self.on_start is not None:
            self.on_start(call)
        return operation


def _chosen(options: OperationOptions) -> Choice:
    """Return the choice that carries an operation, which its caller has made by the policy."""
    assert isinstance(options.codec, Choice)
    return options.codec


def _long(key: OperationKey) -> bool:
    """Tell whether messages may be longer than compiled programs take, which the whole array bounds."""
    return sum(key.counts) * key.dtype.accumulator.itemsize > _MOST_BYTES


@functools.cache
def heap_blocks(pid: int) -> Any:
    """Make the blocks of a process for the messages of compiled programs: a fork needs some of its own."""
    return native.kernels().SharedBlocks()


def _counted(steps: Steps, call: Call, table: StatTable) -> Steps:
    yield from steps
    table.add(call)

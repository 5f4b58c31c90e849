"""Average flat buffers of named parameters over a process group: for the DDP hook, and for rare synchronisation.

A buffer becomes operations of a communicator (:mod:`.operations`): of MPI's on a hybridcomp group, on every other
backend of a process group that nobody else uses (:mod:`.over_torch`). A buffer on a CUDA device is encoded and decoded
there, where the kernels run. On one rank there is nothing to do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hybridcomp.arrays import as_dtype
from hybridcomp.codecs import ErrorFeedback, parse_form
from hybridcomp.codecs.device.driver import driver_of, has_driver
from hybridcomp.codecs.feedback.memories import PlainMemory
from hybridcomp.collectives import StatRow
from hybridcomp.collectives.answers import Answers
from hybridcomp.collectives.starting import OperationStarter
from hybridcomp.device import DeviceArray
from hybridcomp.errors import CodecMismatchError
from hybridcomp.policy import Choice, Policy
from hybridcomp.torch.adapting import Adapting
from hybridcomp.torch.exchange.communicator import TorchCommunicator
from hybridcomp.torch.exchange.group import ExchangeGroup
from hybridcomp.torch.hook.counts import Counts
from hybridcomp.torch.hook.operations import Averaging, MpiOperations, Operations, memory_of
from hybridcomp.torch.hook.over_torch import TorchOperations
from hybridcomp.torch.hook.plan import Split, check_covers, make_split
from hybridcomp.torch.memory import Arrays, pack, unpack
from hybridcomp.torch.registry import registry
from hybridcomp.torch.staging import usable
from hybridcomp.torch.together import decides_together, join

Named = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of parameters, in the order in which a buffer holds them; shapes of real numbers."""
_KEPT_AS_THEY_ARE = (torch.float32, torch.float64)  # dtypes whose residuals are of the same dtype
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile's and activation checkpointing's


class Blend(NamedTuple):
    """A momentum of which a gradient is a part: ``beta * momentum + (1 - beta) * gradient`` is averaged.

    Attributes:
        momentum: [n], on the buffer's device, of its dtype; not changed before the average has ended.
        beta: share of the momentum, from 0 to below 1.
    """

    momentum: torch.Tensor
    beta: float


Blends = Callable[[Collection[str]], Mapping[str, Blend]]
"""Function that is called before a buffer is read, with the names of parameters whose gradients error feedback can turn
into momenta as it corrects them. It returns the momenta of those that are to be; all others it has turned itself."""


def plain_name(name: str) -> str:
    """Return a parameter's or module's name as it was before torch wrapped modules inside the model."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameter_names(module: torch.nn.Module) -> dict[int, str]:
    """Return the names of a module's parameters by ``id``, without those of torch's wrappers, DDP among them."""
    inner: torch.nn.Module = dict(module.named_children()).get("_orig_mod", module)  # torch.compile of DDP
    if isinstance(inner, DistributedDataParallel):
        inner = inner.module
    return {id(parameter): plain_name(name) for name, parameter in inner.named_parameters()}


class Averager:
    """An averager of buffers over one group, with the state that compression keeps from one step to the next.

    Error-feedback memory and PowerSGD's factors are kept by parameter name: parameters may come in other buffers.
    It is a :class:`~hybridcomp.torch.registry.Member` of the process's registry.

    Attributes:
        policy: the same on all ranks.
        axis: the policy's section.
        label: its prefix in a saved state.
        step: step of training, as far as its user counts.
        feedback: error-feedback memory.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        kind: str,
        axis: str,
        group: Any = None,
        stage: int | None = None,
        remembers: bool = True,
        listed: bool = True,
    ) -> None:
        """Register the averager; the first buffer makes its communicator.

        Args:
            policy: the same on all ranks.
            kind: kind of its user, for its label.
            axis: the policy's section.
            group: the ranks; None is the default group.
            stage: pipeline stage that the parameters belong to; for a policy's ``stages``.
            remembers: whether error feedback, where the policy says so, keeps a codec's error for the next buffer;
                False where the next one is in other coordinates.
            listed: whether to register it now; :meth:`register` does it later.
        """
        self.policy = policy
        self.axis = axis
        self.label = f"{kind}:{axis}"
        self.step = 0
        self.feedback = ErrorFeedback(form=None)
        self._stage = stage
        self._remembers = remembers
        self._group = group
        self._factors: dict[str, npt.NDArray[Any]] = {}
        self._plans: Answers[Split] = Answers()
        self._counts = Counts(axis)
        self._operations: Operations | None = None
        self._adapting: Adapting | None = None
        self._decided: Arrays = {}  # loaded before anything was sent
        self._listed = False
        if listed:
            self.register()
        # The statistics stay when this object goes.
        weakref.finalize(self, _keep, self._counts).atexit = False

    def register(self) -> None:
        """Register the averager with the process's registry, once."""
        if not self._listed:
            self._listed = True
            registry.add(self)

    def average(
        self,
        buffer: torch.Tensor,
        parameters: Callable[[], Named],
        key: Hashable,
        step: int,
        blends: Blends | None = None,
    ) -> Averaging | None:
        """Start to average a buffer over the ranks, in place. All start the same buffers in the same order.

        Args:
            buffer: 1-D floating-point tensor: parameters one after another.
            parameters: function that returns their names and shapes (:func:`~hybridcomp.torch.flat.real_shape`);
                called where ``key`` is new.
            key: key that buffers of the same parameters share.
            step: step of training, for warm-up and for codecs that draw random numbers.
            blends: function that returns the momenta of which parameters' gradients are parts; None: of none.

        Returns:
            The average on its way; None on the only rank, whose buffer is the average.

        Raises:
            CodecMismatchError: the buffer is not floating-point, or the parameters are not all of it.
        """
        group = self._joined()
        if group.size() == 1:
            if blends is not None:
                blends(())
            if self._operations is None and decides_together(group):
                self._with_operations(
                    group
                )  # others of the larger group may have more ranks, and wait for this one
            self._counts.add_alone(buffer.nbytes)
            return None
        operations, adapting = self._with_operations(group), self._adapting
        assert adapting is not None
        observed = adapting.begin(step)
        split = self._planned(parameters, key, buffer, step, operations)
        if blends is not None:
            self._blend(buffer, split, blends, operations.comm, observed=observed)
        for piece in [*split.alone, *split.small] if observed else []:
            adapting.observe(piece.name, buffer[piece.start : piece.stop], self.feedback)
        return operations.average(buffer, split, step)

    def _blend(
        self,
        buffer: torch.Tensor,
        split: Split,
        blends: Blends,
        comm: OperationStarter[Any],
        *,
        observed: bool,
    ) -> None:
        """Have error feedback turn gradients into momenta, where it corrects them in the kernels.

        It does not where hosts have several ranks, whose sums may be what it corrects; nor on a device whose buckets,
        or messages of the codec, are made on the host.
        """
        own = comm.hosts in (1, comm.size) and buffer.dtype in _KEPT_AS_THEY_ARE and usable(buffer)
        on_device = own and isinstance(memory_of(buffer.detach()).data, DeviceArray)
        able = [piece for piece in split.alone if own and _blends(piece.choice, on_device=on_device)]
        given = blends(() if observed else [piece.name for piece in able])
        for piece in split.alone:
            found = given.get(piece.name)
            if found is None:
                self.feedback.blend((self.axis, piece.name), None)
            else:
                momentum = memory_of(found.momentum.detach()).data
                self.feedback.blend((self.axis, piece.name), momentum, found.beta)

    def let_through(self, buffer: torch.Tensor, why: str) -> Future[torch.Tensor]:
        """Average a buffer of entries by the group's own all-reduce, as DDP does it without a hook.

        Args:
            buffer: sparse COO tensor.
            why: reason, for the statistics.

        Returns:
            A future of the buffer.
        """
        group = self._joined()
        ranks = group.size()
        nbytes = buffer._indices().nbytes + buffer._values().nbytes
        sent = (ranks - 1) * nbytes
        ours = getattr(group, "comm", None) is not None  # which counts what it sends
        self._counts.add_let_through(nbytes, 0 if ours else sent, why)
        if ranks == 1:
            return done(buffer)
        buffer.div_(ranks)
        work: Any = dist.all_reduce(buffer, group=group, async_op=True)
        future: Future[torch.Tensor] = work.get_future().then(lambda _: buffer)
        return future

    def flush(self) -> None:
        """Let started averages go on to their end; to be called where no other buffer follows for a while."""
        if self._operations is not None:
            self._operations.flush()

    def _joined(self) -> Any:
        """Return the group; the default one is looked up at the first buffer, when it exists."""
        if not self._plans:
            registry.rank = dist.get_rank()
        return dist.group.WORLD if self._group is None else self._group

    def _with_operations(self, group: Any) -> Operations:
        if self._operations is None:
            comm = getattr(group, "comm", None)  # a HybridProcessGroup has one, whatever the backend's name
            if comm is None:
                exchanges, name = self._exchange_group(group), f"hybridcomp-{self.label}"
                own = TorchCommunicator(exchanges, self.policy, self.axis, self.feedback, name)
                join(own, group)
                self.policy = own.policy
                own.warm = self._factors
                self._counts.apart = own.apart
                self._operations = TorchOperations(own, self._counts)
                own.on_start = self._operations.note
            else:
                from hybridcomp.collectives import Communicator  # noqa: PLC0415  (initialises MPI)

                beside = Communicator(comm.mpi, self.policy, self.axis, timeout=comm.timeout)
                join(beside, group)
                self.policy = beside.policy
                session = beside.session
                session.feedback, session.warm = self.feedback, self._factors
                group.beside.append(beside)  # it ends with the group
                self._operations = MpiOperations(session, self._counts)
                session.on_start = self._operations.note
                # The communicator stays with the group, since to free it takes all ranks; its memory need not.
                weakref.finalize(self, _forget, session).atexit = False
            self._adapting = Adapting(self.policy, self.axis, "all_reduce", self._operations.comm)
            self._adapting.load_memory(self._decided)
        return self._operations

    def _exchange_group(self, group: Any) -> ExchangeGroup:
        """Return a group of the same ranks that nobody else uses. Collective."""
        return ExchangeGroup(group)

    def regroup(self, feedback: Arrays) -> None:
        """Forget the ranks: the next buffer is averaged over the group that there is then.

        What ranks have agreed on goes: decisions of ``auto``, and the factors of PowerSGD. Operations that are still
        under way keep the memory that they have; the next ones have another.

        Args:
            feedback: residuals that remain, as :meth:`.ErrorFeedback.state_dict` gave them.
        """
        self._operations, self._adapting, self._plans = None, None, Answers()
        self._factors, self._decided = {}, {}
        self.feedback = ErrorFeedback(form=None)
        self.feedback.load_state_dict(feedback)

    def _planned(
        self,
        parameters: Callable[[], Named],
        key: Hashable,
        buffer: torch.Tensor,
        step: int,
        operations: Operations,
    ) -> Split:
        comm, adapting = operations.comm, self._adapting
        assert adapting is not None

        def made() -> Split:
            dtype = as_dtype(buffer.dtype)
            if not dtype.is_float:
                raise CodecMismatchError(f"{self.label} averages floating-point values, not {buffer.dtype}")
            about = (self.axis, dtype, parameters(), step, self._stage, comm.hosts)
            split = make_split(adapting.asked, *about, remembers=self._remembers)
            check_covers(split, buffer.numel(), self.label)
            return split

        alike = (key, buffer.dtype, buffer.numel(), self.policy.same_as_step(step))
        return self._plans.get(comm, alike, made, adapted=adapting.version)

    # -- memory and statistics (registry.Member) -----------------------------------------------------

    def rows(self) -> list[StatRow]:
        """Return the statistics up to now."""
        return self._counts.rows()

    def memory(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to save: residuals, PowerSGD's factors, the step and decisions. Call it between steps."""
        decided = self._decided if self._adapting is None else self._adapting.memory()
        return pack(self.feedback, self._factors, self.step, decided)

    def load_memory(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Load the arrays that :meth:`memory` returned."""
        self.step, self._decided = unpack(arrays, self.feedback, self._factors)
        if self._adapting is not None:
            self._adapting.load_memory(self._decided)

    def advance(self) -> None:
        """Do nothing: the averager's user counts its steps."""


def done(buffer: torch.Tensor) -> Future[torch.Tensor]:
    """Return a future that has its value."""
    future: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
    future.set_result(buffer)
    return future


def _blends(choice: Choice, *, on_device: bool) -> bool:
    """Tell whether messages are corrected by a plain residual, where the data are."""
    form, codec = choice.feedback, choice.codec
    if not choice.compresses or form is None or parse_form(form).name != PlainMemory.name:
        return False
    if not on_device:
        return True
    return not codec.linear and has_driver(codec) and driver_of(codec.wire_id).head(codec) is not None


def _keep(counts: Counts) -> None:
    registry.keep(counts.rows())


def _forget(session: Any) -> None:
    """Drop the memory of a communicator whose averager is gone."""
    session.feedback, session.warm, session.on_start = ErrorFeedback(form=None), {}, None

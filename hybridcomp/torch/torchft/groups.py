"""Make torchft's process groups compress: others beside a quorum's group exchange encoded messages."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Work
from torch.futures import Future
from torchft import process_group as theirs  # type: ignore[import-untyped]

from hybridcomp.errors import MismatchError, printable
from hybridcomp.policy import Policy, load_policy
from hybridcomp.torch.backend.options import PolicyLike, default_policy
from hybridcomp.torch.exchange.group import ExchangeGroup
from hybridcomp.torch.hook.averager import Averager
from hybridcomp.torch.memory import Arrays
from hybridcomp.version import __version__

_SECONDS = timedelta(seconds=60)
_HANDLE = "hybridcomp"  # key in a handle of torchft's
_POLICY = "policy"


class ReplicaAverager(Averager):
    """An averager over the replicas of a quorum; what it remembers by parameter outlives the quorum."""

    def __init__(self, replicas: Replicas, policy: Policy, *, axis: str, remembers: bool) -> None:
        """Average over ``replicas``; the other arguments are those of :class:`.Averager`."""
        super().__init__(policy, kind="torchft", axis=axis, remembers=remembers)
        self._replicas = replicas
        self._quorum = 0

    def follow_quorum(self, kept: Arrays | None = None) -> bool:
        """Average over the replicas of the newest quorum from now on; return whether it is another one.

        Args:
            kept: residuals to go on with; None for those there are.
        """
        if self._quorum == self._replicas.quorum:
            return False
        self._quorum = self._replicas.quorum
        self.regroup(self.feedback.state_dict() if kept is None else kept)
        gc.collect()  # what the last quorum had refers to itself, and holds connections, threads and shared memory
        return True

    def _joined(self) -> Any:
        return self._replicas.parent

    def _exchange_group(self, group: Any) -> ExchangeGroup:
        return self._replicas.exchange_group()


class Replicas(theirs.ProcessGroupWrapper):  # type: ignore[misc]
    """A process group of torchft's whose all-reduces a policy compresses, for its ``Manager``.

    Sums and averages of floating-point tensors are compressed as the policy says for messages without a name, of step
    0: the group knows no steps, and a policy's warm-up does not end here. All else is torchft's.
    :class:`~hybridcomp.torch.torchft.DistributedDataParallel` sends gradients by their names, with error feedback.
    Replicas whose policies or versions differ are refused: a newcomer among replicas that train, or all of them where
    none has trained.

    Attributes:
        policy: policy of all replicas.
        quorum: number of the groups that this one has been; 0 before the first.
        refused: why this replica may not take part; None if it may.
    """

    _devices: tuple[str, ...] = ("cpu",)

    def __init__(
        self,
        policy: PolicyLike | None = None,
        timeout: timedelta = _SECONDS,
        *,
        axis: str = "dp",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Load the policy; the first quorum makes the group.

        Args:
            policy: policy as :func:`hybridcomp.load_policy` takes it; None is the default of
                :func:`hybridcomp.torch.set_policy`. The same on all replicas.
            timeout: of each operation, and of making a group.
            axis: the policy's section.
            settings: what else all replicas must have alike, by name: short texts.

        Raises:
            PolicyError: the policy cannot be read.
        """
        super().__init__(timeout)
        self.policy = default_policy() if policy is None else load_policy(policy)
        self.axis = axis
        self.quorum = 0
        self.refused: MismatchError | None = None
        self._alike = {
            "version of hybridcomp": __version__,
            _POLICY: self.policy.digest[:16],
            **(settings or {}),
        }
        self._trained = False
        self._own: list[ExchangeGroup] = []
        self._make: Callable[[str], dist.ProcessGroup] | None = None
        self._made = 0
        self._averager: ReplicaAverager | None = None

    def get_reconfigure_handle(self) -> str:
        """Return what the other replicas of a quorum learn of this one: torchft's handle, and what must be alike."""
        handle = json.loads(super().get_reconfigure_handle())
        told = {"alike": self._alike, "policy": self.policy.name, "replica": self._replica_id}
        return json.dumps(handle | {_HANDLE: told})

    def reconfigure(self, opts: Any) -> Work:
        """Make the group of a quorum; refuse replicas that would not understand each other's messages.

        Raises:
            MismatchError: a replica has another version, policy or setting; names both.
        """
        try:
            check_alike(opts.handles, self._handle_id())
        except MismatchError as error:
            if not self._trained:
                self.refused = error
            self.abort(errored=False)
            raise
        work: Work = super().reconfigure(opts)
        self._trained = True
        return work

    def _create_pg(self, store: Any, rank: int, world_size: int) -> dist.ProcessGroup:
        make = super()._create_pg
        self._made = 0
        self._own = []
        self._make = lambda name: make(PrefixStore(name, store), rank, world_size)
        self.quorum += 1
        made: dist.ProcessGroup = make(store, rank, world_size)
        return made

    def exchange_group(self) -> ExchangeGroup:
        """Make another group of the quorum's replicas, for exchanges. Collective, in one order on all of them."""
        assert self._make is not None, "the first quorum makes the group"
        self._made += 1
        made = self._make(f"hybridcomp/{self._made}")
        self._own.append(ExchangeGroup.holding(made, self._devices, self._timeout))
        return self._own[-1]

    def abort(self, errored: bool = True) -> None:
        """End the group's operations, and those of exchanges."""
        for group in self._own:
            group.abort()
        super().abort(errored)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Sum or average a tensor over the replicas, compressed as the policy says; see torch's ``all_reduce``."""
        reduction = getattr(opts, "reduceOp", opts)
        (tensor, *more) = tensors
        if (
            more
            or not (reduction == dist.ReduceOp.SUM or reduction == dist.ReduceOp.AVG)  # noqa: PLR1714  (`in` asks the other)
            or not tensor.is_floating_point()
            or not tensor.is_contiguous()
            or tensor.layout is not torch.strided
            or self.size() == 1
        ):
            return super().allreduce(tensors, opts)  # type: ignore[no-any-return]
        if self._averager is None:
            self._averager = ReplicaAverager(self, self.policy, axis=self.axis, remembers=False)
        self._averager.follow_quorum()
        flat = tensor.detach().view(-1)
        shape = tuple(tensor.shape)
        averaging = self._averager.average(flat, lambda: [("", shape)], shape, 0)
        self._averager.flush()
        assert averaging is not None  # there are others
        scale = self.size() if reduction == dist.ReduceOp.SUM else 1
        return AveragingWork(averaging.future, tensor, scale)


def check_alike(handles: Sequence[str], own: str) -> None:
    """Compare what the replicas of a quorum must have alike.

    Args:
        handles: handle of each replica, as :meth:`Replicas.get_reconfigure_handle` returns it.
        own: id of this replica's.

    Raises:
        MismatchError: one has something else than this replica, or is not of hybridcomp; names it.
    """
    peers = [json.loads(handle) for handle in handles]  # torchft has read them, too
    here = next(rank for rank, peer in enumerate(peers) if peer["id"] == own)
    everyone = [_Identity.of(rank, peer.get(_HANDLE)) for rank, peer in enumerate(peers)]
    mine = everyone[here]
    for peer in everyone:
        for key in [*mine.alike, *peer.alike]:
            if peer.alike.get(key) != mine.alike.get(key):
                raise MismatchError(
                    f"the {key} of {peer.name} differs from that of {mine.name}: {peer.shown(key)}, not "
                    f"{mine.shown(key)}"
                )


@dataclass(frozen=True)
class _Identity:
    """Identity of a replica, as the others of a quorum learn it.

    Attributes:
        name: its rank, and its name.
        alike: what must be alike, by name.
        policy: name of its policy, which may be another for the same rules.
    """

    name: str
    alike: Mapping[str, str]
    policy: str

    @classmethod
    def of(cls, rank: int, told: object) -> _Identity:
        """Read the identity that a replica's handle tells.

        Raises:
            MismatchError: it tells nothing, and so is not of hybridcomp.
        """
        if not isinstance(told, dict) or not isinstance(told.get("alike"), dict):
            raise MismatchError(f"the process group of rank {rank} is not one of hybridcomp.torch.torchft")
        replica = told.get("replica")
        name = f"rank {rank}" if replica is None else f"rank {rank} ({printable(str(replica))})"
        return cls(name, told["alike"], str(told.get("policy")))

    def shown(self, key: str) -> str:
        """Return a value for people."""
        value = printable(str(self.alike.get(key, "the default")))
        return f"{printable(self.policy)} [{value}]" if key == _POLICY else value


class AveragingWork(Work):
    """The work of an average that may have to become a sum.

    Args:
        future: future of the average.
        tensor: tensor that holds the result.
        scale: number that it is multiplied by, once.
    """

    def __init__(self, future: Future[torch.Tensor], tensor: torch.Tensor, scale: int) -> None:
        super().__init__()

        def scaled(done: Future[torch.Tensor]) -> list[torch.Tensor]:
            done.value()
            if scale != 1:
                tensor.detach().mul_(scale)
            return [tensor]

        self._future = future.then(scaled)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the result is in its tensor; raises the operation's error."""
        self._future.wait()
        return True

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Return the future of the tensor, in a list."""
        return self._future


class ProcessGroupGloo(Replicas, theirs.ProcessGroupGloo):  # type: ignore[misc]
    """torchft's group on gloo, compressed: see :class:`Replicas`."""


class ProcessGroupNCCL(Replicas, theirs.ProcessGroupNCCL):  # type: ignore[misc]
    """torchft's group on NCCL, compressed on the GPU: see :class:`Replicas`."""

    _devices = ("cuda",)

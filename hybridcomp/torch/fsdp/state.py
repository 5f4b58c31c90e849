"""Make the compression of one model's FSDP2: collectives, error feedback, references and statistics."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from hybridcomp.codecs import ErrorFeedback
from hybridcomp.collectives import StatRow, merge
from hybridcomp.policy import Policy, load_policy
from hybridcomp.torch.adapting import Adapting
from hybridcomp.torch.backend.options import PolicyLike, default_policy
from hybridcomp.torch.exchange.communicator import TorchCommunicator
from hybridcomp.torch.exchange.group import ExchangeGroup
from hybridcomp.torch.fsdp.collectives import Collectives
from hybridcomp.torch.fsdp.comms import CompressedAllGather, CompressedReduceScatter, install
from hybridcomp.torch.fsdp.leftovers import Leftovers
from hybridcomp.torch.fsdp.native import NativeCollectives
from hybridcomp.torch.fsdp.unit import Unit
from hybridcomp.torch.hook.averager import Averager, parameter_names, plain_name
from hybridcomp.torch.memory import Arrays
from hybridcomp.torch.registry import registry
from hybridcomp.torch.together import join

RESIDUAL, REFERENCE, RANKS, STEP, DECIDED = "residual", "reference", "ranks", "step", "decided"


class FSDPCompression:
    """The compression of one model's parameters and gradients between the ranks that share them.

    The model keeps it alive. Error feedback is kept by parameter, references of differences by module.

    Attributes:
        policy: policy that decides on codecs.
        axis: the policy's section.
        replica_axis: the section of what replicas of the shards reduce.
        difference: whether differences of parameters are sent.
        feedback: error feedback of gradients.
        label: prefix of its keys in a saved state.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        policy: PolicyLike | None,
        axis: str,
        replica_axis: str,
        difference: bool,
    ) -> None:
        """See :func:`compress_fsdp`."""
        self.policy = default_policy() if policy is None else load_policy(policy)
        self.axis = axis
        self.replica_axis = replica_axis
        self.difference = difference
        self.feedback = ErrorFeedback(form=None)
        self.leftovers = Leftovers()
        self.label = f"fsdp:{axis}"
        self._collectives: dict[int, Collectives] = {}
        self._adapting: dict[int, Adapting] = {}
        self._decided: dict[int, Arrays] = {}  # loaded before a group's collectives were made
        self._groups: list[Any] = []
        self._replicas: dict[int, Averager] = {}
        self._units = self._adopt(model)
        install()
        registry.rank = dist.get_rank()
        registry.add(self)
        weakref.finalize(self, _keep, self._collectives).atexit = False

    def _adopt(self, model: torch.nn.Module) -> dict[str, Unit]:
        """Set the communication of every FSDP2 module."""
        named = parameter_names(model)
        units: dict[str, Unit] = {}
        seen: set[int] = set()
        for path, module in model.named_modules():
            groups = _parameter_groups(module)
            for number, group in enumerate(groups):
                if id(group) in seen or not hasattr(group.mesh_info, "shard_process_group"):
                    continue
                seen.add(id(group))
                name = plain_name(path) + (f"#{number}" if number else "")
                names = {
                    id(p): named.get(id(p.sharded_param), f"{name}.{i}")
                    for i, p in enumerate(group.fsdp_params)
                }
                shared_by = group.mesh_info.shard_process_group
                unit = units[name] = Unit(self, name, group.fsdp_params, names, shared_by)
                self.collectives(shared_by)
                replicas = getattr(group.mesh_info, "replicate_process_group", None)
                if replicas is not None and self.compresses_replicas:
                    self.replicas(replicas)  # its memory may be loaded before the first step
                if len(groups) == 1:
                    module.set_custom_all_gather(CompressedAllGather(unit))
                    module.set_custom_reduce_scatter(CompressedReduceScatter(unit))
                else:  # those methods set the communication of one group
                    group._all_gather_comm = CompressedAllGather(unit)
                    group._reduce_scatter_comm = CompressedReduceScatter(unit)
        if not units:
            raise ValueError(
                f"{type(model).__name__} has no module that fully_shard has sharded: call fully_shard first, "
                "then compress_fsdp"
            )
        return units

    def collectives(self, group: Any) -> Collectives:
        """Return the collectives of a process group; they are made on the first call, which is collective."""
        found = self._collectives.get(id(group))
        if found is None:
            found = open_collectives(group, self.axis, self.policy, self.feedback)
            self.policy = found.comm.policy  # rank 0's, where nobody asked for one
            self._collectives[id(group)] = found
            self._groups.append(group)  # its id is a key: nobody else may get that
            adapting = self._adapting[id(group)] = Adapting(
                self.policy, self.axis, "reduce_scatter", found.starter
            )
            adapting.load_memory(self._decided.pop(len(self._adapting) - 1, {}))
        return found

    @property
    def compresses_replicas(self) -> bool:
        """Tell whether the policy compresses what replicas of the shards reduce."""
        return bool(self.policy.codecs(self.replica_axis, "all_reduce"))

    def replicas(self, group: Any) -> Averager:
        """Return the averager of a process group of replicas, whose memory the registry saves beside this one's."""
        found = self._replicas.get(id(group))
        if found is None:
            found = Averager(self.policy, kind="fsdp-replicas", axis=self.replica_axis, group=group)
            self._replicas[id(group)] = found
            self._groups.append(group)
        return found

    def adapting(self, group: Any) -> Adapting:
        """Return the choices of a process group's reduce-scatters, by which its all-gathers are chosen, too."""
        self.collectives(group)
        return self._adapting[id(group)]

    # -- memory and statistics (registry.Member) -----------------------------------------------------

    def rows(self) -> list[StatRow]:
        """Return the statistics up to now."""
        return merge([t.rows() for t in self._collectives.values()])

    def memory(self) -> Arrays:
        """Return the arrays to save: residuals, this rank's part of references, steps and numbers of ranks.

        Call it between steps.
        """
        residuals = self.leftovers.put_back(self.feedback.state_dict())
        saved: Arrays = {f"{RESIDUAL}/{key}": array for key, array in residuals.items()}
        for name, unit in self._units.items():
            saved[f"{RANKS}/{name}"] = np.array(unit.group.size())
            saved[f"{STEP}/{name}"] = np.array(unit.step)
            if unit.reference is not None:
                part = unit.reference.part(unit.group.rank(), unit.group.size())
                if part is not None:
                    saved[f"{REFERENCE}/{name}"] = part
        for number, adapting in enumerate(self._adapting.values()):
            saved |= {f"{DECIDED}/{number}/{name}": array for name, array in adapting.memory().items()}
        return saved

    def load_memory(self, arrays: Arrays) -> None:
        """Load the arrays that :meth:`memory` returned.

        State that belongs to another number of ranks begins anew, with a warning.
        """
        parts: dict[str, Arrays] = {RESIDUAL: {}, REFERENCE: {}, RANKS: {}, STEP: {}, DECIDED: {}}
        for key, array in arrays.items():
            kind, _, name = key.partition("/")
            parts[kind][name] = array
        foreign = [
            name
            for name, unit in self._units.items()
            if int(parts[RANKS].get(name, np.array(0))) not in (0, unit.group.size())
        ]
        if foreign:
            ranks = int(parts[RANKS][foreign[0]])
            warnings.warn(
                f"hybridcomp: the error feedback of {len(foreign)} modules was saved by {ranks} ranks and begins anew "
                f"on {self._units[foreign[0]].group.size()}; hybridcomp.torch.reshard_state carries it over",
                stacklevel=2,
            )
        decided: dict[int, Arrays] = {}
        for key, array in parts[DECIDED].items():
            of, _, name = key.partition("/")
            decided.setdefault(int(of), {})[name] = array
        for number, adapting in enumerate(self._adapting.values()):
            adapting.load_memory(decided.pop(number, {}))
        self._decided = decided
        self.leftovers.clear()
        residuals = parts[RESIDUAL] if not foreign else {}
        for name, unit in self._units.items():
            segments = unit.segments
            residuals = self.leftovers.take(residuals, self.axis, segments, unit.group.rank())
            unit.step = int(parts[STEP].get(name, np.array(0)))
            if unit.reference is not None:
                unit.reference.load(None if name in foreign else parts[REFERENCE].get(name))
        self.feedback.load_state_dict(residuals)

    def advance(self) -> None:
        """Do nothing: steps are counted by reductions."""


def compress_fsdp(
    model: torch.nn.Module,
    policy: PolicyLike | None = None,
    *,
    axis: str = "fsdp",
    replica_axis: str = "dp",
    difference: bool = False,
) -> FSDPCompression:
    """Compress FSDP2's messages: the all-gather of parameters and the reduce-scatter of gradients.

    Call it after ``fully_shard``, on all ranks alike. The optimizer goes on with full precision: a rank's own shard is
    never rounded. All ranks compute with decoded parameters, the owner too, so they compute with the same bits.
    On a mesh of replicas and shards (HSDP) the replicas' all-reduce is compressed, too, where the policy's section for
    it does so, by parameter and with its error feedback; else it is left to the process group of the replicas.

    Args:
        model: FSDP2 modules, at any depth. On a hybridcomp group, or gloo, NCCL or another backend.
        policy: policy as :func:`hybridcomp.load_policy` takes it; None is the default of
            :func:`hybridcomp.torch.set_policy`. Sizes that it compares with ``min_bytes`` are those of a rank's part
            of a parameter in an all-gather, and of the whole gradient in a reduce-scatter. Error feedback of
            gradients needs memory of their whole size on each rank: 4 bytes an element for ``ef``, one for ``loco``.
        axis: the policy's section.
        replica_axis: the section of the replicas' all-reduce.
        difference: whether to send how parameters differ from those that were sent last. Errors do not add up then,
            but each rank keeps a copy of all parameters as they were decoded; in exchange, nothing is sent in the
            backward pass.

    Returns:
        The state, which the model keeps; :func:`hybridcomp.torch.state_dict` saves it.

    Raises:
        ValueError: nothing in the model is sharded.
        PolicyError: the policy cannot be read.
        MismatchError: the ranks' policies differ.
    """
    return FSDPCompression(model, policy, axis, replica_axis, difference)


def open_collectives(group: Any, axis: str, policy: Policy, feedback: ErrorFeedback) -> Collectives:
    """Make the collectives of a process group, beside the group's own.

    Collective.

    Raises:
        MismatchError: the ranks' policies differ.
    """
    comm = getattr(group, "comm", None)  # only a HybridProcessGroup has one
    if comm is None:
        beside = TorchCommunicator(ExchangeGroup(group), policy, axis, feedback, f"hybridcomp-fsdp:{axis}")
        join(beside, group)
        return Collectives(beside, NativeCollectives(group, axis))
    from hybridcomp.collectives import Communicator  # noqa: PLC0415  (initialises MPI)

    duplicate = Communicator(comm.mpi, policy, axis, timeout=comm.timeout)
    duplicate.session.feedback = feedback
    group.beside.append(duplicate)
    join(duplicate, group)
    return Collectives(duplicate)


def _parameter_groups(module: torch.nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups of a module; earlier versions of torch have at most one."""
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _keep(collectives: dict[int, Collectives]) -> None:
    registry.keep(merge([each.rows() for each in collectives.values()]))

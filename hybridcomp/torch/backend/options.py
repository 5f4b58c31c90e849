"""Hold the settings of a process group: its policy, its axis, its timeout."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from hybridcomp import policy as policies
from hybridcomp import variables
from hybridcomp.codecs import Codec
from hybridcomp.errors import PolicyError
from hybridcomp.policy import Policy, load_policy

PolicyLike = str | os.PathLike[str] | Policy | Codec
_chosen: list[Policy] = []


@dataclass
class Options:
    """``pg_options`` of ``init_process_group("hybridcomp")`` and ``new_group``.

    Attributes:
        policy: policy as :func:`hybridcomp.load_policy` takes it; None is that of :func:`set_policy`, else of
            ``HYBRIDCOMP_POLICY``, else ``auto`` where a profile was calibrated, and ``hybrid`` elsewhere.
        axis: the mesh axis that the group spans; None finds it from the group's description (a device mesh
            describes the groups of its axis ``dp`` as ``mesh_dp``).
        timeout: timeout of the group; None is the ``timeout=`` that torch passes.

    Raises:
        PolicyError: the policy cannot be read.
    """

    policy: PolicyLike | None = None
    axis: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.policy is not None:
            self.policy = read_policy(self.policy)

    @property
    def _timeout(self) -> timedelta | None:
        """Return the timeout, which ``DeviceMesh`` reads from the options of an axis."""
        return self.timeout


class GroupInit(NamedTuple):
    """The arguments that a process group is made from.

    Attributes:
        ranks: the members, of ``MPI.COMM_WORLD``, in the group's order.
        rank: this process's place among them.
        store: the members' own part of torch's store.
        options: the caller's options.
    """

    ranks: list[int]
    rank: int
    store: Store
    options: Options


def set_policy(policy: PolicyLike) -> Policy:
    """Set the policy of process groups made from now on, this process's default.

    Raises:
        PolicyError: it cannot be read.
    """
    loaded = read_policy(policy)
    _chosen[:] = [loaded]
    return loaded


def default_policy() -> Policy:
    """Return the policy of :func:`set_policy`, of ``HYBRIDCOMP_POLICY``, or :func:`hybridcomp.policy.default_policy`'s.

    Raises:
        PolicyError: ``HYBRIDCOMP_POLICY`` names none.
    """
    return chosen_policy() or policies.default_policy()


def chosen_policy() -> Policy | None:
    """Return the policy of :func:`set_policy`, or of ``HYBRIDCOMP_POLICY``; None where nobody has chosen one.

    Raises:
        PolicyError: ``HYBRIDCOMP_POLICY`` names none.
    """
    if _chosen:
        return _chosen[0]
    named = variables.POLICY.read()
    try:
        return read_policy(named) if named else None
    except PolicyError as error:
        raise PolicyError(f"{variables.POLICY} is {named!r}: {error}") from error


def read_policy(policy: PolicyLike) -> Policy:
    """Load a policy as :func:`hybridcomp.load_policy`, but let a bare codec leave operations from or to one rank exact.

    PyTorch broadcasts a module's parameters before the first step: through ``topk`` they would be gone.

    Raises:
        PolicyError: it cannot be read.
    """
    return replace(load_policy(policy), everything=False)


def axis_of(description: str | None) -> str:
    """Return the mesh axis that a group's description names: ``mesh_dp`` is ``dp``; a default group is ``default``."""
    if not description or description in ("default_pg", "undefined", "mesh_default"):
        return "default"
    return description.removeprefix("mesh_")

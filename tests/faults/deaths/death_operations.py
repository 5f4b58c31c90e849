"""Operations for :mod:`.death_ranks` to be in when a signal comes: every algorithm, each family of codecs."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import numpy as np

import hybridcomp as hc
from hybridcomp.collectives.algorithms.selection import refusal
from hybridcomp.policy.toml import parse_policy
from hybridcomp.schedules.registry import ALGORITHMS, SELECTABLE
from hybridcomp.schedules.topology import Topology

#: One codec of each family; the last has error feedback.
CODECS = (
    "none",
    "int8",
    "threshold:rel=2.0",
    "topk:ratio=0.05",
    "powersgd:rank=2",
    "lossless",
    "int4 feedback",
)
_FEEDBACK = "ef"
#: Policy of the communicator: operations that name no codec have error feedback.
POLICY = parse_policy(f'[dp]\nall_reduce = {{ codec = "int4", feedback = "{_FEEDBACK}" }}\n', "tests.faults")
_METHODS = {
    "all_reduce": "allreduce",
    "reduce_scatter": "reduce_scatter_block",
    "all_gather": "allgather",
    "broadcast": "bcast",
    "reduce": "reduce",
    "all_to_all": "alltoall",
    "gather": "gather",
    "scatter": "scatter",
}
_SAME_EVERYWHERE = ("all_reduce", "all_gather", "broadcast")


class Case(NamedTuple):
    """An operation; ``algorithm`` is None where there is no choice."""

    kind: str
    algorithm: str | None
    codec: str
    n: int
    waits: bool
    draw: int

    @property
    def common(self) -> bool:
        """Tell whether all ranks must have the same bits."""
        return self.kind in _SAME_EVERYWHERE


def drawn(random_: random.Random, hosts: list[int], *, waits: bool | None = None) -> Case:
    """Draw an operation, the same on all ranks; ``waits`` says whether it is started first, and waited for then."""
    codec = random_.choice(CODECS)
    kind = random_.choice([*_METHODS, "all_reduce", "send"])
    feedback = codec.endswith("feedback")
    if feedback or codec.startswith("powersgd"):
        kind = "all_reduce"
    algorithm = None
    if kind in SELECTABLE and not codec.startswith("powersgd"):
        topology, plain = Topology(tuple(hosts)), hc.get_codec("int4" if feedback else codec)
        form = _FEEDBACK if feedback else None
        names = [a.name for a in ALGORITHMS[kind].values() if refusal(a, topology, plain, form) is None]
        algorithm = random_.choice(names)
    later = random_.random() < 0.6 if waits is None else waits
    # No handle is left of a blocking message that was interrupted.
    n = random_.choice([7, 999, 20_003, 200_003])
    return Case(kind, algorithm, codec, n, later or kind == "send", random_.getrandbits(48))


def last(draw: int) -> Case:
    """Return an operation that needs every rank."""
    return Case("all_reduce", "direct", "int8", 20_003, True, draw)


class Operation:
    """Operation of a rank, with its buffers."""

    def __init__(self, comm: hc.Communicator, case: Case) -> None:
        """Make the values that this rank sends."""
        self._comm, self._case = comm, case
        p, n = comm.size, case.n
        self._values = np.random.default_rng([case.draw, comm.rank]).standard_normal(n * p).astype(np.float32)
        self._out = np.zeros(n * p if case.kind in ("all_gather", "all_to_all", "gather") else n, np.float32)
        if case.kind == "broadcast":
            self._out[:] = self._values[:n]

    def start(self) -> Any:
        """Start it, and return its request; or do it, and return None."""
        comm, case, root = self._comm, self._case, self._comm.size - 1
        if case.kind == "send":
            return self._message()
        method = _METHODS[case.kind]
        call = getattr(comm, f"I{method}" if case.waits else method.capitalize())
        ours: dict[str, Any] = {"codec": case.codec}
        if case.codec.endswith("feedback"):
            ours = {"name": f"weight {case.n}"}
        if case.algorithm is not None:
            ours["algorithm"] = case.algorithm
        if case.kind == "broadcast":
            return call(self._out, root, **ours)
        shape = (case.n // 7, 7) if case.codec.startswith("powersgd") else (case.n,)
        size = math.prod(shape)
        sent: Any = self._values
        received: Any = self._out
        if case.kind in ("all_reduce", "reduce", "all_gather", "gather"):
            sent = self._values[:size].reshape(shape)
        if case.kind == "all_reduce":
            received = self._out[:size].reshape(shape)
        rooted = {"root": root} if case.kind in ("reduce", "gather", "scatter") else {}
        return call(sent, received, **rooted, **ours)

    def _message(self) -> Any:
        comm, root = self._comm, self._comm.size - 1
        codec = "none" if self._case.codec == "int4 feedback" else self._case.codec
        if comm.rank == 0:
            return comm.Isend(self._values[: self._case.n], root, 5, codec=codec)
        if comm.rank == root:
            return comm.Irecv(self._out, 0, 5, codec=codec)
        return None

    def bits(self) -> bytes:
        """Return this rank's result."""
        return self._out.tobytes()

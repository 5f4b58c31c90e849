"""Describe the time of a model's operations on a rank: fitted to measurements, or from a device's datasheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hybridcomp.errors import ConfigError
from hybridcomp.files import shown

OPERATIONS = (
    "embedding",
    "norm",
    "attention",
    "mlp",
    "head",
    "optimizer",
    "pass",
    "replica",
    "send",
    "sum",
    "coded",
    "step",
)
"""Operations and overheads of a training step.

``attention`` and ``mlp`` are the layers with the residual's addition, ``head`` is the last projection with the loss,
``optimizer`` clips and updates. The overheads are ``pass``, for a forward or backward pass of a stage; ``replica``, in
addition for a pass where DistributedDataParallel has the stage; ``send``, for a message between stages; ``sum``, for a
collective that a pass waits for; ``coded``, for a compressed sum of replicas; ``step``, for the rest of a step.
"""

OVERHEADS: Mapping[str, tuple[float, float, float]] = {
    "replica.forward": (2.8e-4, 0.0, 0.0),
    "send.forward": (5.9e-4, 0.0, 0.0),
    "sum.forward": (3.2e-4, 0.0, 0.0),
    "coded.forward": (3.9e-5, 0.0, 0.0),
    "step.forward": (8.7e-3, 0.0, 0.0),
}
"""Seconds of a processor for a step's overheads: fitted to trainings in the lab, docs/plan.md."""

DIRECTIONS = ("forward", "backward")
FEATURES = ("calls", "flops", "bytes")


@dataclass(frozen=True, slots=True)
class Work:
    """Execution of an operation on a rank.

    Attributes:
        operation: one of :data:`OPERATIONS`.
        direction: ``forward`` or ``backward``; ``forward`` of operations that have no direction.
        flops: multiplications and additions of matrix products.
        bytes: bytes read and written, counted by tensors.
        half: whether it computes in 16 bits.
    """

    operation: str
    direction: str = "forward"
    flops: float = 0.0
    bytes: float = 0.0
    half: bool = False


class ComputeProfile(Protocol):
    """Source of the seconds of operations."""

    def seconds(self, work: Work) -> float:
        """Return the seconds of an execution that has a processor to itself."""


@dataclass(frozen=True)
class Datasheet:
    """Device as its maker describes it, with the share of it that programs get: a roofline.

    Attributes:
        flops: peak operations/s in 16 bits.
        bandwidth: peak bytes/s of its memory.
        flops_fp32: peak operations/s in fp32; None: half of ``flops``.
        utilisation: share of the peak flops that matrix products reach.
        memory_utilisation: share of the peak bandwidth that passes over memory reach.
        overhead: seconds of an operation, however small.
    """

    flops: float
    bandwidth: float
    flops_fp32: float | None = None
    utilisation: float = 0.5
    memory_utilisation: float = 0.8
    overhead: float = 2e-5

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "utilisation", "memory_utilisation"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive and finite, not {value}")
        for name in ("utilisation", "memory_utilisation"):
            if getattr(self, name) > 1:
                raise ConfigError(f"{name} must be at most 1, not {getattr(self, name)}")
        if not 0 <= self.overhead < math.inf:
            raise ConfigError(f"overhead must not be negative, as {self.overhead} is")
        if self.flops_fp32 is not None and not 0 < self.flops_fp32 < math.inf:
            raise ConfigError(f"flops_fp32 must be positive and finite, not {self.flops_fp32}")

    def seconds(self, work: Work) -> float:
        """Return the seconds of an execution: of its flops or its bytes, whichever take longer."""
        single = self.flops / 2 if self.flops_fp32 is None else self.flops_fp32
        peak = self.flops if work.half else single
        return self.overhead + max(
            work.flops / (peak * self.utilisation), work.bytes / (self.bandwidth * self.memory_utilisation)
        )


@dataclass(frozen=True)
class Fitted:
    """Measurements of one kind of device, as seconds for each call, flop and byte of each operation.

    Attributes:
        rows: coefficients for each operation and direction (``"mlp.forward"``), in the order of :data:`FEATURES`.
        half: factor on the coefficients of operations that compute in 16 bits.
    """

    rows: Mapping[str, tuple[float, float, float]]
    half: float = 1.0

    def seconds(self, work: Work) -> float:
        """Return the seconds of an execution."""
        calls, flops, nbytes = self.rows[f"{work.operation}.{work.direction}"]
        seconds = calls + flops * work.flops + nbytes * work.bytes
        return seconds * self.half if work.half else seconds

    def to_toml(self) -> str:
        """Return the text of the section ``[compute]`` of a profile."""
        lines = ["[compute]", f"half = {self.half!r}"]
        lines += [f'"{name}" = [{", ".join(map(repr, row))}]' for name, row in self.rows.items()]
        return "\n".join(lines) + "\n"


def names() -> list[str]:
    """Return the names of the rows in a :class:`Fitted`."""
    both = ("embedding", "norm", "attention", "mlp", "head", "pass")
    return [
        f"{operation}.{direction}"
        for operation in OPERATIONS
        for direction in (DIRECTIONS if operation in both else DIRECTIONS[:1])
    ]


def fit(works: Sequence[Work], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Fit coefficients, none negative, by least squares of relative errors.

    Args:
        works: executions of one operation and direction.
        seconds: measured seconds of each execution.

    Raises:
        ValueError: there are no executions, or a time is not positive.
    """
    import numpy as np  # noqa: PLC0415
    from scipy.optimize import nnls  # type: ignore[import-untyped]  # noqa: PLC0415  (of the extra "plan")

    if not works or min(seconds) <= 0:
        raise ValueError("a fit takes at least one execution, with times above 0")
    table = np.array([[1.0, w.flops, w.bytes] for w in works])
    times = np.array(seconds)
    scale = table.max(axis=0)
    scale[scale == 0] = 1.0
    found, _ = nnls(table / scale / times[:, None], np.ones(len(times)))
    calls, flops, nbytes = (float(f"{x:.5g}") for x in found / scale)
    return calls, flops, nbytes


def read_compute(document: Mapping[str, Any], name: str) -> Fitted | Datasheet | None:
    """Read the section ``[compute]`` of a parsed profile or cluster description.

    Args:
        document: whole parsed file.
        name: name of the file, for errors.

    Returns:
        The measurements or the datasheet; None where there is no such section.

    Raises:
        ConfigError: the section is wrong; names the file, the key and what is allowed.
    """
    section = document.get("compute")
    if section is None:
        return None
    if not isinstance(section, dict):
        raise ConfigError(f"{name}: compute must be a table, not {shown(section)}")
    if "flops" in section:
        return _datasheet(section, name)
    rows: dict[str, tuple[float, float, float]] = {}
    for key in section:
        if key not in (*names(), "half"):
            raise ConfigError(f"{name}: compute.{key!s:.40} is unknown; allowed: half, {', '.join(names())}")
    for key in names():
        row = section.get(key, list(OVERHEADS[key]) if key in OVERHEADS else None)
        if not isinstance(row, list) or len(row) != len(FEATURES) or not all(map(_natural, row)):
            raise ConfigError(
                f"{name}: compute.{key} must be three numbers that are not negative, not {shown(row)}"
            )
        rows[key] = (float(row[0]), float(row[1]), float(row[2]))
    half = section.get("half", 1.0)
    if not _natural(half) or half == 0:
        raise ConfigError(f"{name}: compute.half must be a positive number, not {half!r:.40}")
    return Fitted(rows, float(half))


def _datasheet(section: Mapping[str, Any], name: str) -> Datasheet:
    known = Datasheet.__dataclass_fields__
    for key, value in section.items():
        if key not in known:
            raise ConfigError(f"{name}: compute.{key!s:.40} is unknown; allowed: {', '.join(known)}")
        if not _natural(value):
            raise ConfigError(
                f"{name}: compute.{key} must be a number that is not negative, not {shown(value)}"
            )
    if "bandwidth" not in section:
        raise ConfigError(f"{name}: compute.bandwidth is missing: bytes/s of the device's memory")
    try:
        return Datasheet(**section)
    except ConfigError as error:
        raise ConfigError(f"{name}: compute.{error}") from error


def _natural(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf

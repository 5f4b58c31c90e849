"""Write statistics as TensorBoard scalars, or to any object that has ``add_scalar``."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from hybridcomp import decode
from hybridcomp.collectives import StatRow
from hybridcomp.collectives.stats import since
from hybridcomp.errors import ConfigError
from hybridcomp.torch.registry import registry

_RESIDUAL = "/residual/"
_FORM = "#form"


class ScalarWriter(Protocol):
    """The method of ``torch.utils.tensorboard.SummaryWriter`` that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any:
        """Record a value of a step."""


class StatsWriter:
    """A writer of this rank's statistics of messages, per axis, operation and codec.

    Tags are ``hybridcomp/AXIS/OPERATION/CODEC/WHAT``; counts are per training step since the last time:

    *   ``wire_bytes``, ``uncompressed_bytes``: bytes sent, and bytes that would have been sent uncompressed;
    *   ``ratio``: uncompressed bytes over sent bytes;
    *   ``encode_ms``, ``wire_ms``, ``decode_ms``: milliseconds.

    With ``residuals``, ``hybridcomp/residual_norm/MEMBER/KEY`` is the Euclidean norm of the residual of error feedback
    (under ``ef21``, ``estimate_norm``: of the receivers' estimate of this rank's data).

    .. code-block:: python

        writer = hct.StatsWriter("runs/one") if dist.get_rank() == 0 else None
        for step in range(steps):
            ...
            if writer is not None and step % 10 == 0:
                writer.log(step)
    """

    def __init__(
        self,
        writer: ScalarWriter | str | os.PathLike[str],
        *,
        prefix: str = "hybridcomp",
        start_step: int = 0,
        residuals: bool = False,
    ) -> None:
        """Count from now on.

        Args:
            writer: a ``SummaryWriter`` or anything with its ``add_scalar``; or a folder, for which one is made.
            prefix: prefix of all tags.
            start_step: the step that the first :meth:`log` counts from.
            residuals: whether to write norms of error feedback's memory, which is copied for it.

        Raises:
            ConfigError: TensorBoard is not installed, and ``writer`` is a folder.
            TypeError: ``writer`` has no ``add_scalar``.
        """
        self._owned: Any = None
        if isinstance(writer, str | os.PathLike):
            self._owned = _summary_writer(writer)
            self._writer: ScalarWriter = self._owned
        elif callable(getattr(writer, "add_scalar", None)):
            self._writer = writer
        else:
            raise TypeError(
                f"writer must be a folder or have add_scalar, as torch.utils.tensorboard.SummaryWriter has, "
                f"not {type(writer).__name__}"
            )
        self._prefix = prefix
        self._residuals = residuals
        self._step = start_step
        self._before = registry.total()

    def log(self, step: int) -> None:
        """Write the statistics since the last time: averages over the steps since then.

        Args:
            step: step of training that has ended.

        Raises:
            ValueError: the step is before the last one.
        """
        if step < self._step:
            raise ValueError(f"step {step} is before the last one, {self._step}")
        steps = max(1, step - self._step)
        now = registry.total()
        for kind, row in _by_kind(since(self._before, now)).items():
            for what, value in _scalars(row, steps):
                self._add(f"{kind}/{what}", value, step)
        self._before, self._step = now, step
        if self._residuals:
            for tag, norm in _norms(registry.state()):
                self._add(tag, norm, step)

    def close(self) -> None:
        """Close the writer if a folder was given."""
        if self._owned is not None:
            self._owned.close()

    def _add(self, tag: str, value: float, step: int) -> None:
        # As SummaryWriter cleans tags, so that they are the same with every writer.
        self._writer.add_scalar(re.sub(r"[^-/\w.]", "_", f"{self._prefix}/{tag}"), value, step)


def _summary_writer(folder: str | os.PathLike[str]) -> Any:
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise ConfigError(
            f"StatsWriter({os.fspath(folder)!r}) needs TensorBoard: pip install tensorboard, or give it "
            f"an object with add_scalar"
        ) from error
    return module.SummaryWriter(os.fspath(folder))


def _by_kind(rows: list[StatRow]) -> dict[str, StatRow]:
    """Return rows by axis, operation and codec, whatever their reason; without those that carry no bytes."""
    found: dict[str, StatRow] = {}
    for row in rows:
        if row.raw_bytes:
            total = found.setdefault(
                f"{row.axis}/{row.op}/{row.codec}", StatRow(row.axis, row.op, row.codec, "")
            )
            total.add(row)
    return found


def _scalars(row: StatRow, steps: int) -> Iterator[tuple[str, float]]:
    yield "wire_bytes", row.wire_bytes / steps
    yield "uncompressed_bytes", row.plain_bytes / steps
    if row.wire_bytes:
        yield "ratio", row.plain_bytes / row.wire_bytes
    yield "encode_ms", 1e3 * row.encode_seconds / steps
    yield "wire_ms", 1e3 * row.wire_seconds / steps
    yield "decode_ms", 1e3 * row.decode_seconds / steps


def _norms(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, float]]:
    """Yield tag and norm of each key of error feedback; its main array's key ends with its JSON."""
    for full, array in state.items():
        member, found, key = full.partition(_RESIDUAL)
        if not found or not key.endswith("]"):
            continue
        values = array if array.is_floating_point() else decode(array)  # loco keeps a message
        form = state.get(full + _FORM)
        estimate = form is not None and bytes(form.tolist()).startswith(b"ef21")
        name = ".".join(str(part) for part in json.loads(key))
        yield f"{'estimate' if estimate else 'residual'}_norm/{member}/{name}", float(values.norm())

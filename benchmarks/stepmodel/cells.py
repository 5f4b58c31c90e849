"""Trainings of the comparison: those that are predicted, and others to which overheads are fitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HOSTS = 4
_SHAPE = {"layers": 8, "d_model": 128, "heads": 4, "seq_len": 64, "micro_batch_size": 2}


def profile_name(rate: str, ppn: int) -> str:
    """Return the name of the profile of the lab with ``ppn`` ranks on a host."""
    return f"lab_{rate}_{HOSTS}x{ppn}.toml"


@dataclass(frozen=True)
class Cell:
    """One training in a lab.

    Attributes:
        name: unique name.
        rate: rate of all hosts' links, or one for each host.
        ppn: ranks on each host.
        fields: fields of the trainer's configuration.
        hosts: hosts of the lab.
        cores: cores that each host may use, or a number for each host.
    """

    name: str
    rate: str
    ppn: int
    fields: dict[str, Any]
    hosts: int = HOSTS
    cores: str = "all"


def _cell(
    rate: str, policy: str, micro: int, ppn: int = 2, shape: dict[str, int] = _SHAPE, **layout: Any
) -> Cell:
    fields = {**shape, **layout, "policy": policy, "micro_batches": micro}
    text = " ".join(
        f"{key}{value}" if isinstance(value, int) else str(value) for key, value in layout.items()
    )
    number = HOSTS * ppn
    return Cell(f"{number} ranks, {text}, {micro} micro-batches, {policy}, {rate}", rate, ppn, fields)


CELLS = (
    _cell("1gbit", "none", 2, dp=8),
    _cell("200mbit", "none", 2, dp=8),
    _cell("200mbit", "hybrid", 2, dp=8),
    _cell("200mbit", "exact", 2, dp=8),
    _cell("none", "int8:block=128", 4, dp=8),
    _cell("1gbit", "none", 4, pp=4, dp=2, schedule="1f1b"),
    _cell("200mbit", "hybrid", 4, pp=4, dp=2, schedule="1f1b"),
    _cell("200mbit", "none", 8, pp=4, dp=2, schedule="gpipe"),
    _cell("1gbit", "hybrid", 4, pp=4, dp=2, schedule="gpipe"),
    _cell("1gbit", "none", 4, pp=4, dp=2, schedule="interleaved", virtual_stages=2),
    _cell("200mbit", "hybrid", 8, pp=4, dp=2, schedule="interleaved", virtual_stages=2),
    _cell("200mbit", "none", 4, pp=2, dp=4, schedule="1f1b"),
    _cell("200mbit", "hybrid", 2, pp=2, dp=4, schedule="1f1b"),
    _cell("1gbit", "exact", 4, pp=2, dp=4, schedule="gpipe"),
    _cell("1gbit", "none", 4, pp=2, dp=2, tp=2, schedule="1f1b"),
    _cell("200mbit", "hybrid", 4, pp=2, dp=2, tp=2, schedule="1f1b"),
    _cell("none", "none", 2, pp=2, dp=2, tp=2, schedule="gpipe"),
    _cell("200mbit", "none", 2, dp=4, tp=2),
    _cell("1gbit", "hybrid", 4, dp=4, tp=2),
    _cell("1gbit", "none", 8, pp=8, schedule="1f1b"),
    _cell("200mbit", "hybrid", 8, pp=8, schedule="gpipe"),
    _cell("none", "none", 4, pp=4, tp=2, schedule="1f1b"),
    _cell("1gbit", "none", 4, pp=4, dp=2, schedule="2bw"),
    _cell("200mbit", "none", 4, pp=4, dp=2, schedule="local"),
    _cell("200mbit", "none", 4, 1, dp=4),
    _cell("200mbit", "hybrid", 4, 1, dp=4),
    _cell("1gbit", "none", 8, 1, pp=4, schedule="1f1b"),
    _cell("200mbit", "hybrid", 8, 1, pp=4, schedule="2bw"),
    _cell("200mbit", "none", 4, 1, pp=2, dp=2, schedule="1f1b"),
    _cell("1gbit", "none", 2, 1, dp=2, tp=2),
    _cell("none", "none", 4, 1, pp=2, tp=2, schedule="1f1b", recompute="blocks"),
    _cell("none", "none", 4, 1, pp=4, schedule="interleaved", virtual_stages=2),
)
"""Trainings that are predicted; no fit has seen them."""

_SMALL = {"layers": 8, "d_model": 96, "heads": 2, "seq_len": 48, "micro_batch_size": 1}

_LARGE = {"layers": 8, "d_model": 160, "heads": 4, "seq_len": 96, "micro_batch_size": 2}

FITTED = (
    _cell("none", "none", 1, shape=_SMALL, dp=8),
    _cell("none", "none", 6, shape=_SMALL, dp=8),
    _cell("none", "none", 3, shape=_SMALL, dp=4, tp=2),
    _cell("none", "none", 12, shape=_SMALL, pp=4, dp=2, schedule="1f1b"),
    _cell("none", "none", 10, shape=_SMALL, pp=8, schedule="gpipe"),
    _cell("none", "none", 6, 1, shape=_SMALL, dp=4),
    _cell("none", "none", 3, 1, shape=_SMALL, dp=2, tp=2),
    _cell("none", "none", 12, 1, shape=_SMALL, pp=4, schedule="1f1b"),
    _cell("none", "int8:block=128", 1, shape=_SMALL, dp=8),
    _cell("none", "int8:block=128", 2, shape=_SMALL, dp=4, tp=2),
    _cell("none", "int8:block=128", 8, shape=_SMALL, pp=4, dp=2, schedule="gpipe"),
    _cell("none", "hybrid", 1, 1, shape=_SMALL, dp=4),
    _cell("none", "hybrid", 1, shape=_SMALL, dp=8),
    _cell("none", "hybrid", 8, shape=_SMALL, pp=4, dp=2, schedule="gpipe"),
    _cell("none", "none", 2, 1, shape=_LARGE, dp=4),
    _cell("none", "none", 1, shape=_LARGE, dp=8),
    _cell("none", "none", 6, 1, shape=_LARGE, pp=4, schedule="1f1b"),
    _cell("none", "none", 4, shape=_LARGE, pp=4, dp=2, schedule="gpipe"),
    _cell("none", "none", 2, shape=_LARGE, dp=4, tp=2),
    _cell("none", "none", 8, 1, shape=_SMALL, pp=4, schedule="interleaved", virtual_stages=2),
    _cell("none", "none", 4, 1, shape=_SMALL, pp=2, tp=2, schedule="1f1b", recompute="blocks"),
    _cell("none", "none", 8, 1, shape=_SMALL, pp=4, schedule="2bw"),
    _cell("none", "exact", 1, 1, shape=_LARGE, dp=4),
)
"""Trainings to which overheads are fitted: of other models, without shaped links, some compressed."""

SCALED = tuple(
    Cell(
        f"{hosts * ppn} ranks on {hosts} hosts, {policy}",
        "200mbit",
        ppn,
        {**_SHAPE, "dp": hosts * ppn, "micro_batches": 2, "policy": policy},
        hosts,
    )
    for hosts, ppn in ((2, 1), (4, 1), (8, 1), (8, 2))
    for policy in ("none", "hybrid")
)
"""Trainings to which replicas are added, each with as much work, up to the most that two cores carry."""

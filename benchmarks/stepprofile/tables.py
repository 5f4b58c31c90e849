"""Lay out the measurements as tables, in Markdown that also reads as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Variant = dict[str, Any]
"""Entry of the result's ``variants``."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with columns of one width, all but the first set to the right."""
    every = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = "|".join(f"{'-' * (width + 1)}:" if i else "-" * (width + 2) for i, width in enumerate(widths))
    return "\n".join([line(head), f"|{rule}|", *(line(row) for row in every[1:])])


def steps(variants: Sequence[Variant]) -> str:
    """Return the table of whole steps: their speed, and the time that sampling adds."""
    return table(
        ["variant", "tokens/s", "step ms", "sampled", "all ranks on a core, ms", "sampled"],
        [
            [
                one["name"],
                f"{one['tokens_per_s']:,.0f}",
                *(_number(one[key]) for key in ("plain_step_ms", "step_ms", "plain_core_ms", "core_ms")),
            ]
            for one in variants
        ],
    )


def main_thread(variants: Sequence[Variant]) -> str:
    """Return the table of the main threads: milliseconds a step by part, by the clock and on a core."""
    head = [
        "main thread, ms of a step",
        *(f"{one['name']}{what}" for one in variants for what in ("", ", on a core")),
    ]
    parts = [part for part in variants[0]["main_thread"] if _any(variants, "main_thread", part)]
    rows = [
        [
            part,
            *(_number(one["main_thread"][part][key]) for one in variants for key in ("wall", "core")),
        ]
        for part in parts
    ]

    def total(key: str) -> list[float]:
        return [sum(times[key] for times in one["main_thread"].values()) for one in variants]

    walls, cores, readies = total("wall"), total("core"), total("ready")
    waits = [wall - core - ready for wall, core, ready in zip(walls, cores, readies, strict=True)]
    rows.append(["sum", *(_number(x) for pair in zip(walls, cores, strict=True) for x in pair)])
    rows.append(["of it ready, but without a core", *(text for x in readies for text in (_number(x), ""))])
    rows.append(["of it waiting", *(text for x in waits for text in (_number(x), ""))])
    rows.append(
        [
            "the rank's other threads",
            *(text for one in variants for text in ("", _number(one["other_threads"]))),
        ]
    )
    return table(head, rows)


def processor(variants: Sequence[Variant]) -> str:
    """Return the table of the cores: milliseconds of all of them together in a step, by part."""
    parts = [part for part in variants[0]["processor"] if _any(variants, "processor", part)]
    rows = [[part, *(_number(one["processor"][part]) for one in variants)] for part in parts]
    rows.append(["sum", *(_number(sum(one["processor"].values())) for one in variants)])
    return table(["all cores, ms of a step", *(one["name"] for one in variants)], rows)


def places(one: Variant) -> str:
    """Return the tables of a variant's functions that took most."""
    return "\n\n".join(
        table(
            [f"{one['name']}: {what}", "part", "ms of a step"],
            [[place, part, _number(value)] for part, place, value in one[key]],
        )
        for key, what in (
            ("main_thread_places", "main thread, by the clock"),
            ("processor_places", "all cores"),
        )
    )


def _any(variants: Sequence[Variant], key: str, part: str) -> bool:
    """Tell whether a part has anything to show in one of the variants."""
    values = [one[key][part] for one in variants]
    return any((value["wall"] if isinstance(value, dict) else value) >= 0.05 for value in values)


def _number(value: float) -> str:
    return f"{value:,.1f}"

"""The report of the matrix: wanted and measured figures, all tables, pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridcomp.results.provenance import origins

from . import plots
from .figures import size_text
from .matrix import Cell
from .records import Record, Records

_LINKS = ("200 Mb/s", "1 Gb/s", "unshaped", "shared memory")
_MIB64 = 64 << 20
_THRESHOLD = "threshold:abs=2.5758:values=none"
_INT8, _INT4 = "int8:block=128", "int4:block=128"
Figure = Callable[[Record, dict[str, Any]], float | None]


def _of(key: str) -> Figure:
    return lambda _, row: row[key]


def _over_mpi(record: Record, row: dict[str, Any]) -> float | None:
    """Return how many times as fast as MPI's own operation a row is; None if MPI was not measured."""
    theirs = [
        peer["seconds"] for peer in record["peers"] if (peer["peer"], peer["size"]) == ("mpi", row["size"])
    ]
    return theirs[0] / row["seconds"] if theirs else None


@dataclass(frozen=True)
class Requirement:
    """A figure, measured in float32, that a release has to reach.

    Attributes:
        says: description in words.
        operation, link, hosts, ppn, codec: where it is measured.
        figure: function from the record and the codec's row to the figure.
        wanted: least value; the largest, where ``most`` is set.
        size: size in bytes.
    """

    says: str
    operation: str
    link: str
    hosts: int
    ppn: int
    codec: str
    figure: Figure
    wanted: float
    most: bool = False
    size: int = _MIB64

    def measured(self, records: list[Record]) -> float | None:
        """Return the figure; None if it was not measured."""
        place = (self.operation, self.link, self.hosts, self.ppn)
        for record in records:
            if (
                record["operation"],
                plots.link_text(record),
                record["hosts"],
                record["ranks_per_host"],
            ) != place:
                continue
            for row in record["rows"]:
                if row["size"] == self.size and row.get("codec", row.get("name")) == self.codec:
                    return self.figure(record, row)
        return None


def _requirements() -> list[Requirement]:
    def faster(link: str, hosts: int, ppn: int, codec: str, wanted: float) -> Requirement:
        name = codec.partition(":")[0]
        return Requirement(
            f"{name}, times the best peer", "all_reduce", link, hosts, ppn, codec, _of("speedup"), wanted
        )

    gigabit, one, share = "1 Gb/s", (4, 1), _of("wire_fraction")
    return [
        *(
            Requirement(
                f"{codec[:4]}, share of the wire's limit", "all_reduce", gigabit, *one, codec, share, 0.92
            )
            for codec in (_INT8, _INT4)
        ),
        faster(gigabit, *one, _INT8, 3.8),
        faster(gigabit, *one, _INT4, 7.2),
        faster(gigabit, *one, _THRESHOLD, 15),
        faster("unshaped", *one, _INT8, 3),
        faster("unshaped", *one, _INT4, 4),
        faster("shared memory", 1, 4, _INT8, 2.5),
        Requirement("int8, times MPI's own", "all_reduce", gigabit, 4, 2, _INT8, _over_mpi, 6),
        *(
            Requirement(
                f"int8 of {size_text(size)}, {says}",
                "overlap",
                link,
                hosts,
                1,
                _INT8,
                _of(key),
                wanted,
                most,
                size,
            )
            for link, size in ((gigabit, _MIB64), ("200 Mb/s", 16 << 20))
            for hosts in (2, 4)
            for says, key, wanted, most in (
                ("share hidden behind computation", "hidden", 0.8, False),
                ("slowdown of the computation", "slowdown", 0.1, True),
            )
        ),
    ]


def write(results: Records, path: Path, left_out: list[Cell]) -> None:
    """Write the report and, beside the results, its pictures.

    Raises:
        FileNotFoundError: nothing has been measured.
    """
    records, folder = results.all(), results.folder
    if not records:
        raise FileNotFoundError(f"no results in {folder}: run benchmarks/run_lab.py first")
    machine = records[0]["machine"]
    lines = [
        "# Collectives in the lab",
        "",
        f"Written by `benchmarks/run_lab.py`. {machine['processor']}, {machine['memory']}; {machine['packages']}. "
        "All ranks share these cores. Each figure is a median of interleaved iterations in one run; "
        "[docs/performance.md](../../docs/performance.md) says how to read it.",
        "",
        "## What was wanted",
        "",
        *_wanted(records),
        "",
        _origins(records),
    ]
    operations = dict.fromkeys(record["operation"] for record in records if record["operation"] != "overlap")
    for operation in operations:
        group = [record for record in records if record["operation"] == operation]
        lines += [
            "",
            f"## {operation}",
            "",
            f"![Speed-up over the best peer by size]({folder.name}/{operation}.png)",
        ]
        for link in _LINKS:
            lines += _table([record for record in group if plots.link_text(record) == link], link)
        four = [record for record in group if record["ranks"] == 4] or group
        plots.speedups(
            sorted(four, key=lambda r: _LINKS.index(plots.link_text(r))), folder / f"{operation}.png"
        )
    lines += _overlap([record for record in records if record["operation"] == "overlap"])
    if left_out:
        names = ", ".join(cell.name for cell in left_out)
        lines += ["", "## Left out", "", f"These would take too long on their link: {names}."]
    path.write_text("\n".join(lines) + "\n")


def _wanted(records: list[Record]) -> list[str]:
    lines = [
        "| float32, 64 MiB where no size is said | link | hosts x ranks | wanted | measured | met |",
        "|---|---|---|---|---|---|",
    ]
    for one in _requirements():
        got = one.measured(records)
        met = (
            ""
            if got is None
            else "yes"
            if (got <= one.wanted if one.most else got >= one.wanted)
            else "**no**"
        )
        sign = "<=" if one.most else ">="
        text = "not measured" if got is None else f"{got:.2f}"
        what = f"{one.operation}: {one.says}"
        lines.append(
            f"| {what} | {one.link} | {one.hosts} x {one.ppn} | {sign} {one.wanted:g} | {text} | {met} |"
        )
    return lines


def _table(group: list[Record], link: str) -> list[str]:
    """Return the table of one operation on one link: a line for each layout and size, a column for each codec."""
    if not group:
        return []
    codecs = list(dict.fromkeys(row["codec"] for record in group for row in record["rows"]))
    lines = [
        "",
        f"### {link}",
        "",
        "Milliseconds, times the best peer, share of the wire's limit where the link has one; cores kept busy by all "
        "ranks.",
        "",
        f"| hosts x ranks | size | best peer | {' | '.join(f'`{codec}`' for codec in codecs)} |",
        f"|---|---|---|{'---|' * len(codecs)}",
    ]
    cells: dict[tuple[int, int, int], dict[str, dict[str, Any]]] = {}
    for record in group:
        for row in record["rows"]:
            key = (record["hosts"], record["ranks_per_host"], row["size"])
            cells.setdefault(key, {})[row["codec"]] = row
    for (hosts, ppn, size), rows in sorted(cells.items()):
        any_row = next(iter(rows.values()))
        best = f"{any_row['best_peer']} {any_row['best_peer_seconds'] * 1e3:.2f}"
        figures = " | ".join(_figure(rows[codec]) if codec in rows else "" for codec in codecs)
        lines.append(f"| {hosts} x {ppn} | {size_text(size)} | {best} | {figures} |")
    return [*lines, "", _origins(group)]


def _origins(group: list[Record]) -> str:
    """Say where the figures of a table come from, by layout and smallest size where its cells differ in that."""

    def name(record: Record) -> str:
        least = min(row["size"] for row in record["rows"])
        return f"{record['hosts']} x {record['ranks_per_host']} from {size_text(least)} on"

    return origins({name(record): record for record in group})


def _figure(row: dict[str, Any]) -> str:
    share = "" if row["wire_fraction"] is None else f", {row['wire_fraction']:.2f}"
    return f"{row['seconds'] * 1e3:.2f}, **{row['speedup']:.2f}**{share}; {row['cores']:.1f}"


def _overlap(records: list[Record]) -> list[str]:
    if not records:
        return []
    lines = [
        *("", "## Overlap with computation", ""),
        "| hosts x ranks | link | size | | operation (ms) | computation (ms) | both (ms) | hidden | slowdown |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        for row in record["rows"]:
            times = " | ".join(f"{row[key] * 1e3:.1f}" for key in ("communication", "computation", "both"))
            what = f"{size_text(row['size'])} | `{row['name']}` | {times} | {row['hidden']:.2f} | {row['slowdown']:.1%}"
            where = f"{record['hosts']} x {record['ranks_per_host']} | {plots.link_text(record)}"
            lines.append(f"| {where} | {what} |")
    return [*lines, "", _origins(records)]

"""Draw the committed results as interactive figures of the site, with a plot for each choice of the reader."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridcomp import style

Record = dict[str, Any]
_LINKS = {"200mbit": "200 Mb/s", "1gbit": "1 Gb/s", "none": "unshaped"}
_PEERS = {"mpi": "MPICH", "gloo": "gloo"}
_TIME, _BUSBW, _SPEEDUP = "time", "busbw", "times as fast as the best peer"
_AXES = {_TIME: "time (ms)", _BUSBW: "busbw (GB/s, uncompressed bytes)", _SPEEDUP: _SPEEDUP}
_ISAS = ("avx512", "avx2", "portable")  # the best first
_SIZE = "size (bytes)"
_OF_DENSITY = re.compile(r":(ratio|fpr|density)=[^:]*|:values=none")  # parameters that density implies


@dataclass
class Trace:
    """One line, or one set of points or bars.

    Attributes:
        name: name in the legend.
        x, y: values of each point; x may be names.
        peer: whether others' code is measured.
        text: text of each point, shown beside it or at the pointer.
        spread: least and largest value of each y.
    """

    name: str
    x: list[Any] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    peer: bool = False
    text: list[str] = field(default_factory=list)
    spread: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Plot:
    """Plot of one choice.

    Attributes:
        x, y: titles of the axes.
        traces: traces in the order of the legend.
        kind: lines over sizes, points, or bars.
        log: axes that are logarithmic.
        one: whether y = 1 is marked.
        note: measurement and machine, in one line.
    """

    x: str
    y: str
    traces: list[Trace]
    kind: str = "lines"
    log: str = "xy"
    one: bool = False
    note: str = ""


@dataclass
class Figure:
    """Plots by the options that a reader chooses.

    Attributes:
        choices: options by the name of each choice.
        plots: plots by an option of every choice, in the order of the choices; the first is shown first. Combinations
            that were not measured are not among them.
    """

    choices: dict[str, list[str]]
    plots: dict[tuple[str, ...], Plot]

    def json(self) -> str:
        """Return the figure in the form that figures.js reads; values have four significant digits."""
        plots = {"|".join(chosen): _plain(plot) for chosen, plot in self.plots.items()}
        return style.script_data({"choices": self.choices, "plots": plots})


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Plot | Trace):
        return {key: _plain(one) for key, one in vars(value).items() if one not in ("", [], False)}
    return value


def _made(names: Iterable[str], plots: Mapping[tuple[str, ...], Plot]) -> Figure:
    """Make a figure whose options are those that some plot has, in the order of the plots."""
    choices = {name: list(dict.fromkeys(chosen[i] for chosen in plots)) for i, name in enumerate(names)}
    return Figure(choices, dict(plots))


def link(record: Record) -> str:
    """Return the link of a record, in words."""
    return "shared memory" if record["hosts"] == 1 else _rate(record["link"])


def _rate(rate: str) -> str:
    return _LINKS.get(rate, rate.replace("mbit", " Mb/s"))


def _name(row: Record) -> str:
    """Return the peer or codec that a row measures."""
    return _PEERS.get(row["peer"], str(row["peer"])) if "peer" in row else str(row["codec"])


def _value(row: Record, value: str) -> float:
    if value == _TIME:
        return float(row["seconds"] * 1e3)
    return float(row["busbw"] if value == _BUSBW else row["speedup"])


def by_size(records: list[Record], value: str) -> Plot:
    """Draw the records of one operation, link and layout over size: a line for each codec and peer.

    Args:
        records: records of benchmarks, each with some sizes.
        value: the time, busbw, or times the best peer's speed, which leaves peers out.
    """
    lines: dict[str, Trace] = {}
    for record in records:
        for row in [*record["rows"], *record["peers"]]:
            if "peer" in row and value == _SPEEDUP:
                continue
            line = lines.setdefault(_name(row), Trace(_name(row), peer="peer" in row))
            line.x.append(row["size"])
            line.y.append(_value(row, value))
    for line in lines.values():
        line.x, line.y = map(list, zip(*sorted(zip(line.x, line.y, strict=True)), strict=True))
    ordered = sorted(lines.values(), key=lambda line: line.peer)
    return Plot(_SIZE, _AXES[value], ordered, one=value == _SPEEDUP, note=measured(records[0]))


def measured(record: Record) -> str:
    """Return the dtype, ranks, link and machine of a record, in one line."""
    layout = f"{record['hosts']} x {record['ranks_per_host']}" if record["hosts"] > 1 else record["ranks"]
    ranks = f"{layout} ranks" if record["hosts"] == 1 else f"{layout} hosts x ranks"
    return f"{record['dtype']}, {ranks}, {link(record)}. {machine(record)}"


def machine(record: Record) -> str:
    """Return the processor and the versions of a record."""
    return f"{record['machine']['processor']}; {record['machine']['packages']}."


def _grouped(
    records: Iterable[Record], key: Callable[[Record], tuple[str, ...]]
) -> dict[tuple[str, ...], list[Record]]:
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _by_value(
    groups: Mapping[tuple[str, ...], list[Record]], values: Iterable[str]
) -> dict[tuple[str, ...], Plot]:
    return {(*key, value): by_size(group, value) for key, group in groups.items() for value in values}


def _read(folder: Path, pattern: str) -> list[Record]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(pattern))]


def lab(results: Path) -> Figure:
    """Draw every operation of the lab, by link and number of ranks."""
    cells = [cell for table in _read(results / "lab", "*.json") for cell in table.values()]
    cells = [cell for cell in cells if cell["operation"] != "overlap"]
    cells.sort(
        key=lambda cell: (cell["operation"] != "all_reduce", cell["link"] != "1gbit", cell["ranks"] != 4)
    )
    groups = _grouped(cells, lambda cell: (cell["operation"], link(cell), str(cell["ranks"])))
    figure = _made(("operation", "link", "ranks", "value"), _by_value(groups, (_TIME, _BUSBW, _SPEEDUP)))
    figure.choices["link"].sort(key=lambda one: (one == "shared memory", one == "unshaped", one == "1 Gb/s"))
    figure.choices["ranks"].sort(key=int)
    return figure


def gains(results: Path) -> Figure:
    """Draw the gains of compression in an all-reduce by four ranks, by link."""
    plots = lab(results).plots
    links = [chosen[1] for chosen in plots if chosen[0] == "all_reduce"]
    return _made(
        ("link",), {(where,): plots["all_reduce", where, "4", _SPEEDUP] for where in dict.fromkeys(links)}
    )


def exact(results: Path) -> Figure:
    """Draw exact compression: all-reduces and sends by dtype and link."""
    order = ["1gbit", "200mbit", "none"]
    records = sorted(_read(results / "exact", "*.json"), key=lambda record: order.index(record["link"]))
    groups = _grouped(records, lambda record: (record["operation"], record["dtype"], link(record)))
    return _made(("operation", "dtype", "link", "value"), _by_value(groups, (_SPEEDUP, _TIME)))


def small(results: Path) -> Figure:
    """Draw all-reduces from 4 KiB on."""
    records = _read(results / "sizes", "*.json")
    groups = _grouped(
        records,
        lambda r: (f"{r['hosts']} hosts, {link(r)}" if r["hosts"] > 1 else f"one host, {r['ranks']} ranks",),
    )
    return _made(("where", "value"), _by_value(groups, (_SPEEDUP, _TIME)))


def codecs(results: Path) -> Figure:
    """Draw error and speed of every codec over its bits per value, by data and instruction set."""
    plots: dict[tuple[str, ...], Plot] = {}
    for isa in _ISAS:
        for record in _read(results / "codecs", f"{isa}.json"):
            _draw_codecs(record, isa, plots)
    return _made(("value", "data", "kernels"), plots)


def _draw_codecs(record: Record, isa: str, plots: dict[tuple[str, ...], Plot]) -> None:
    rows = [row for row in record["rows"] if "encode" in row]
    busy = "" if record["machine"]["load"] < 0.5 else " Other programs were busy: do not rely on its speeds."
    note = f"{record['elements'] >> 20} Mi float32 values, {record['threads']} thread. {machine(record)}"
    for data in record["sets"]:
        ours = [row for row in rows if row["ours"]]
        plots["relative L2 error", data, isa] = _scatter(ours, data, "relative L2 error", _error, note)
    for name in ("encode", "decode", "decode_add"):
        title = f"{name}, GB/s of input"
        plots[f"{name}, GB/s", "Gaussian", isa] = _scatter(rows, "Gaussian", title, _speed(name), note + busy)


def _error(row: Record, data: str) -> float:
    return max(float(row["sets"][data]["l2"]), 1e-5)  # an axis of logarithms has no zero


def _speed(operation: str) -> Callable[[Record, str], float]:
    return lambda row, _: float(row[operation]["gb_s"])


def _scatter(
    rows: Iterable[Record], data: str, title: str, value: Callable[[Record, str], float], note: str
) -> Plot:
    traces: dict[str, Trace] = {}
    for row in rows:
        family = row["family"] if row["ours"] else "others' code"
        one = traces.setdefault(family, Trace(family, peer=not row["ours"]))
        one.x.append(row["sets"][data]["bits"])
        one.y.append(value(row, data))
        one.text.append(row["name"])
    exactly = " Exact codecs are at 0.00001." if value is _error else ""
    return Plot(
        "bits per value (32 uncompressed)", title, list(traces.values()), "points", note=note + exactly
    )


def policies(results: Path) -> Figure:
    """Draw the speed that policies gain, by link, and the loss that they cost."""
    plots: dict[tuple[str, ...], Plot] = {}
    (lost,), (fast,) = (_read(results / name, "results.json") for name in ("policies", "policies-speed"))
    for rate, speeds in fast["speed"].items():
        bars = Trace("samples per second", list(speeds))
        bars.y = [one["ratio"] for one in speeds.values()]
        bars.spread = [(min(one["ratios"]), max(one["ratios"])) for one in speeds.values()]
        title = "samples per second, ratio to none"
        plots["speed", _rate(rate)] = Plot("", title, [bars], "bars", "", one=True, note=_study(fast))
    for rate, speeds in fast["speed"].items():
        traces = []
        for name, one in lost["loss"].items():
            gaps = list(one["gaps"].values())
            traces.append(
                Trace(
                    name, [speeds[name]["ratio"]], [one["gap"]], text=[name], spread=[(min(gaps), max(gaps))]
                )
            )
        plots["loss over speed", _rate(rate)] = Plot(
            "samples per second, ratio to none", "validation loss above none (nats)", traces, "points", "",
            note=f"Losses: mean and range of {len(gaps)} seeds. Speeds: a run of their own. {_study(fast)}",
        )  # fmt: skip
    return _made(("value", "link"), plots)


def _study(record: Record) -> str:
    study = record["study"]
    return f"{study['hosts']} hosts of {study['ppn']} ranks, {record['parameters']:,} parameters. {machine(record)}"


def steps(results: Path) -> Figure:
    """Draw the time of a step of DDP by the codec or hook of its gradients."""
    plots: dict[tuple[str, ...], Plot] = {}
    for rate, words in _LINKS.items():
        (record,) = _read(results, f"ddp_{rate}_4hosts.json")
        bars = [Trace("PyTorch's", peer=True), Trace("ours")]
        for row in record["rows"]:
            one = bars[row["kind"] not in ("peer", "local")]
            one.x.append(row["name"])
            one.y.append(row["seconds"] * 1e3)
        plots[(words,)] = Plot("", "time of a step (ms)", bars, "bars", "", note=measured(record))
    return _made(("link",), plots)


def sparse(results: Path) -> Figure:
    """Draw sums of sparse arrays over their density."""
    plots: dict[tuple[str, ...], Plot] = {}
    for record in _read(results / "sparse", "sums_*.json"):
        lines: dict[str, Trace] = {}
        for row in [*record["peers"], *record["rows"]]:
            name = _OF_DENSITY.sub("", _name(row))
            line = lines.setdefault(name, Trace(name, peer="peer" in row))
            line.x.append(row["density"])
            line.y.append(row["seconds"] * 1e3)
        ordered = sorted(lines.values(), key=lambda line: line.peer)
        plots[link(record), str(record["hosts"])] = Plot(
            "density of each rank's array", "time (ms)", ordered, note=measured(record)
        )
    return _made(("link", "hosts"), plots)


FIGURES: dict[str, Callable[[Path], Figure]] = {
    "lab": lab,
    "gains": gains,
    "exact": exact,
    "small": small,
    "codecs": codecs,
    "policies": policies,
    "steps": steps,
    "sparse": sparse,
}
"""Function from the folder of results to each figure, by the name that pages give it."""

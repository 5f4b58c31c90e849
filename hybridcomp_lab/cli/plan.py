"""Run ``hybridcomp plan``: find the fastest split of a job's ranks, and the codec of each axis, without running it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from hybridcomp import style
from hybridcomp.errors import ConfigError
from hybridcomp.perfmodel import wanted_path
from hybridcomp_lab.planner.budget import BUDGETS
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.critical import write_trace
from hybridcomp_lab.planner.hints import find_hints
from hybridcomp_lab.planner.layouts import Wish
from hybridcomp_lab.planner.models import MODELS, model_config
from hybridcomp_lab.planner.plan import Plan, best_of, write_plan
from hybridcomp_lab.planner.scale import Point, rate_name, read_range, scale, sizes, write_scale
from hybridcomp_lab.planner.search import find_plans
from hybridcomp_lab.planner.site import read_site
from hybridcomp_lab.planner.timeline import write_timeline
from hybridcomp_lab.train.config import TrainConfig

EXAMPLES = """examples:
  hybridcomp plan --profile examples/cluster_16x8.toml --model gpt2-xl --batch 512
  hybridcomp plan --profile site.toml --hosts 4 --ppn 8 --model my_model.toml --batch 256 --memory 40G
  hybridcomp plan --profile site.toml --model gpt2-xl --batch 512 --scale 8:4096
  hybridcomp plan --profile site.toml --model llama-7b --batch 1024 --loss-budget aggressive --explain --write run.toml

Nothing is run, and every figure is predicted. docs/plan.md says how, and how well.
"""
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_FILE_WIDTH = 160
_SCALED = 16  # plans, of which --scale takes the best one whose replicas fit the least size
_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("pp x dp x tp", "left"),
    ("schedule", "left"),
    ("layers", "left"),  # layers of each stage, where stages differ
    ("micro-batches", "left"),
    ("recompute", "left"),
    ("codecs", "left"),
    ("samples/s", "right"),
    ("of best", "right"),
    ("step (s)", "right"),
    ("exposed (ms)", "right"),
    ("memory", "right"),
)
_AXES = {"dp": "dp", "pp": "pp", "tp": "tp", "embedding": "emb"}


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hybridcomp plan``."""
    result = argparse.ArgumentParser(
        prog="hybridcomp plan",
        description="Find the fastest split of a training's ranks, and the codec of each axis, without running it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add(
        "--profile",
        metavar="FILE",
        help="what it runs on: a cluster's description (examples/cluster_16x8.toml), or what `hybridcomp doctor "
        "--calibrate` wrote (default: where that writes)",
    )
    add("--hosts", type=int, help="how many (default: as the profile has it)")
    add("--ppn", type=int, help="ranks on each host (default: as the profile has it)")
    known = ", ".join(MODELS)
    add("--model", required=True, help=f"one of {known}, or a .toml file with the trainer's fields")
    add("--batch", type=int, required=True, help="sequences of a step, on all ranks together")
    add(
        "--dtype",
        choices=("fp32", "bf16"),
        help="what passes compute in, and send (default: as the model has it)",
    )
    add(
        "--memory",
        type=_size,
        metavar="BYTES",
        help="that a rank has: 80G, 16G (default: as the profile has it)",
    )
    add(
        "--loss-budget",
        choices=BUDGETS,
        default="safe",
        help="codecs that may be used: exact (none, exponent), safe (8 bits and up; default), aggressive (4 bits, low "
        "rank and top-k with error feedback; schedule 2bw)",
    )
    add("--tp-across-hosts", action="store_true", help="let ranks of tp be on several hosts")
    add("--top", type=int, default=5, metavar="N", help="plans that are printed (default 5)")
    add("--json", action="store_true", help="print them as JSON")
    add(
        "--explain",
        type=int,
        nargs="?",
        const=1,
        metavar="K",
        help="draw the timeline of plan K (default 1) and its critical path: plan.html, and trace.json for Perfetto",
    )
    add(
        "--scale",
        metavar="A:B",
        help="draw how the best exact plan scales from A to B ranks, each replica with as much work: scale.html",
    )
    add(
        "--out",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="where --explain and --scale write (default: here)",
    )
    add(
        "--write",
        type=Path,
        metavar="FILE",
        help="write plan 1, or that of --explain, for hybridcomp train --config",
    )
    return result


def main(argv: Sequence[str]) -> int:
    """Run ``hybridcomp plan ARGV``; return 0.

    Raises:
        ConfigError: wrong arguments or files; or no plan works.
        ModuleNotFoundError: a picture is wanted, and plotly is missing.
    """
    arguments = parser().parse_args(argv)
    if arguments.top < 1:
        raise ConfigError(f"--top must be at least 1, not {arguments.top}")
    wish = _wish(arguments)
    cluster = read_site(_profile(arguments), arguments.hosts, arguments.ppn, arguments.memory)
    if arguments.scale is not None:
        return _scale(arguments, wish, cluster)
    chosen = 1 if arguments.explain is None else arguments.explain
    plans = _search(wish, cluster, max(arguments.top, chosen))
    if not 1 <= chosen <= len(plans):
        raise ConfigError(f"--explain {chosen}: there are plans 1 to {len(plans)}")
    shown = plans[: arguments.top]
    hints = find_hints(shown, plans[chosen - 1], cluster)
    if arguments.json:
        style.say(json.dumps(_record(arguments, cluster, shown) | hints.record(), indent=1))
    else:
        _print(arguments, cluster, shown)
        for line in hints.lines(chosen):
            style.say(line)
    if arguments.explain is not None:
        _explain(arguments, plans, chosen)
    if arguments.write is not None:
        heading = f"Written by hybridcomp plan {' '.join(argv)}"
        for path in write_plan(plans[chosen - 1], arguments.write, heading):
            style.say(f"wrote {path}", sys.stderr)
    return 0


def _profile(arguments: argparse.Namespace) -> str:
    if arguments.profile is None and not os.path.exists(wanted_path()):
        raise ConfigError(
            f"there is no profile at {wanted_path()}: `hybridcomp doctor --calibrate` writes one there; or give "
            "--profile, examples/cluster_16x8.toml say"
        )
    return str(arguments.profile or wanted_path())


def _wish(arguments: argparse.Namespace) -> Wish:
    model = model_config(arguments.model)
    if arguments.dtype is not None:
        model = dataclasses.replace(model, dtype=arguments.dtype)
    return Wish(model, arguments.batch, arguments.loss_budget, arguments.tp_across_hosts)


def _search(wish: Wish, cluster: Cluster, count: int) -> list[Plan]:
    with _progress() as bar:
        task = bar.add_task("predicting plans", total=None)

        def told(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return find_plans(wish, cluster, count, told)


def _progress() -> Progress:
    console = style.console(sys.stderr)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _scale(arguments: argparse.Namespace, wish: Wish, cluster: Cluster) -> int:
    """Draw how the best exact plan that fits the smallest size scales."""
    least, most = read_range(arguments.scale)
    exact = dataclasses.replace(wish, budget="exact")
    plans = [plan.config for plan in _search(exact, cluster, _SCALED)]
    config = next((config for config in plans if least % (config.pp * config.tp) == 0), plans[0])
    counts = sizes(least, most, config, cluster.ranks_per_host)
    with _progress() as bar:
        task = bar.add_task("predicting sizes", total=None)
        points = scale(
            config, cluster, counts, lambda done, total: bar.update(task, completed=done, total=total)
        )
    facts = (
        f"{arguments.model} with pp {config.pp} and tp {config.tp}, schedule {config.schedule}, {config.micro_batches} "
        f"micro-batches of {config.micro_batch_size} on each of dp replicas; {cluster.ranks_per_host} ranks on a host. "
        f"Links, codecs and devices are those of {cluster.profile.name}."
    )
    page = arguments.out / "scale.html"
    write_scale(page, f"{arguments.model} on {counts[0]} to {counts[-1]} ranks", facts, points)
    if arguments.json:
        style.say(
            json.dumps({"simulated": True, "about": facts, "points": [dataclasses.asdict(p) for p in points]})
        )
    else:
        _print_scale(facts, points)
    style.say(f"wrote {page}", sys.stderr)
    return 0


def _print_scale(facts: str, points: Sequence[Point]) -> None:
    console = style.console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    console.print(f"{facts} Simulated, not measured. Seconds of a step (efficiency):", markup=False)
    policies = list(dict.fromkeys(point.policy for point in points))
    table = Table(box=SIMPLE_HEAD)
    for heading in ("link", "ranks", *policies):
        table.add_column(heading, justify="right")
    for rate, ranks in dict.fromkeys((point.rate, point.ranks) for point in points):
        own = {point.policy: point for point in points if (point.rate, point.ranks) == (rate, ranks)}
        cells = (f"{own[policy].step:.3g} ({own[policy].efficiency:.0%})" for policy in policies)
        table.add_row(rate_name(rate), f"{ranks:,}", *cells)
    console.print(table)


def _record(arguments: argparse.Namespace, cluster: Cluster, plans: Sequence[Plan]) -> dict[str, object]:
    best = best_of(plans)
    return {
        "predicted": True,
        "model": arguments.model,
        "batch": arguments.batch,
        "loss_budget": arguments.loss_budget,
        "profile": cluster.profile.name,
        "hosts": cluster.hosts,
        "ranks_per_host": cluster.ranks_per_host,
        "memory_limit": cluster.memory,
        "plans": [plan.record(best) for plan in plans],
    }


def _print(arguments: argparse.Namespace, cluster: Cluster, plans: Sequence[Plan]) -> None:
    console = style.console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    limit = "" if cluster.memory is None else f", {_gib(cluster.memory)} a rank"
    console.print(
        f"{arguments.model}, batch {arguments.batch}, loss budget {arguments.loss_budget}, on {cluster.hosts} hosts x "
        f"{cluster.ranks_per_host} ranks{limit}. Predicted from {cluster.profile.name}, not measured.",
        markup=False,
    )
    table = Table(box=SIMPLE_HEAD)
    table.add_column("", justify="right")
    best = best_of(plans)
    rows = [_cells(plan, best) for plan in plans]
    used = [at for at in range(len(_COLUMNS)) if any(row[at] for row in rows)]
    for at in used:
        heading, justify = _COLUMNS[at]
        table.add_column(heading, justify=justify)
    for number, row in enumerate(rows, 1):
        table.add_row(str(number), *(row[at] for at in used))
    console.print(table)


def _cells(plan: Plan, best: float) -> list[str]:
    config, found = plan.config, plan.prediction
    schedule = config.schedule if config.virtual_stages == 1 else f"{config.schedule}:{config.virtual_stages}"
    used = plan.used
    codecs = ", ".join(f"{_AXES.get(axis, axis)} {name}" for axis, name in plan.codec_names.items())
    exposed = ", ".join(
        f"{_AXES.get(axis, axis)} {seconds * 1e3:.1f}"
        for axis, seconds in found.exposed.items()
        if axis in used
    )
    return [
        f"{config.pp} x {config.dp} x {config.tp}",
        schedule if config.pp > 1 else "loop",
        " ".join(map(str, config.stage_layers or ())),
        f"{config.micro_batches} of {config.micro_batch_size}",
        _recomputed(config),
        codecs or "none",
        f"{found.samples_per_second:,.1f}",
        f"{found.samples_per_second / best:.1%}",
        f"{found.seconds:.3g}",
        exposed or "0",
        _gib(found.memory.total),
    ]


def _recomputed(config: TrainConfig) -> str:
    if config.recompute == "none":
        return "none"
    return "all" if config.recompute_blocks is None else f"{config.recompute_blocks} of {max(config.cut)}"


def _explain(arguments: argparse.Namespace, plans: Sequence[Plan], chosen: int) -> None:
    plan = plans[chosen - 1]
    cells = _cells(plan, best_of(plans))
    names = (
        *("pp x dp x tp", "schedule", "layers of stages", "micro-batches", "recomputed", "codecs"),
        *(
            "samples/s",
            "of the best",
            "step, seconds",
            "exposed communication, ms",
            "memory of the fullest rank",
        ),
    )
    heading = f"{arguments.model}, batch {arguments.batch}: plan {chosen}"
    page, trace = arguments.out / "plan.html", arguments.out / "trace.json"
    facts = {name: cell for name, cell in zip(names, cells, strict=True) if cell}
    write_timeline(page, heading, plan.prediction.spans, facts)
    write_trace(plan.prediction.spans, trace, {"predicted": True, "plan": plan.record(best_of(plans))})
    for path in (page, trace):
        style.say(f"wrote {path}", sys.stderr)


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.3g} GiB"


def _size(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: a number and K, M, G or T, such as 80G")
    return float(found[1]) * 1024.0 ** _UNITS[found[2].upper()]

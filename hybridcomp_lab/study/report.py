"""Write a study's report: results.json, tables in Markdown, pictures, and one HTML page that needs no other file."""

from __future__ import annotations

import dataclasses
import datetime
import html
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridcomp import style
from hybridcomp.files import write_bytes, write_text
from hybridcomp.results.provenance import NOT_RECORDED, provenance
from hybridcomp.style import table
from hybridcomp_lab.study.pictures import bits_per_value, pictures
from hybridcomp_lab.study.results import Results
from hybridcomp_lab.study.tables import tables

_ALTERNATIVES = {
    "loss": "Validation loss over the steps, by variant.",
    "bits": "Validation loss above the baseline's against bits per value, by what is compressed.",
    "speed": "Samples per second over the baseline's, by variant and link.",
    "tradeoff": "Validation loss above the baseline's against speed, by link.",
}


def write_report(results: Results, folder: Path) -> Path:
    """Write the report's files.

    Args:
        results: results of the runs.
        folder: folder to write to; made if it does not exist.

    Returns:
        The path of the page.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    origin = provenance(results.kind)
    if results.commits:  # of runs that an earlier call has kept, too
        origin["commit"] = ", ".join(one or NOT_RECORDED for one in results.commits)
    values = as_json(results) | origin
    write_text(folder / "results.json", json.dumps(values, indent=1) + "\n")
    write_text(folder / "report.md", markdown(results))
    drawn = pictures(results)
    for name, picture in drawn.items():
        write_bytes(folder / f"{name}.png", picture)
    page = folder / "report.html"
    made = {"commit": origin["commit"] or NOT_RECORDED, **origin["machine"]}
    write_text(page, _page(results, drawn, pictures(results, style.DARK), made))
    return page


def as_json(results: Results) -> dict[str, Any]:
    """Return the results in the form of JSON; numbers that are not finite are null."""
    study = results.study
    plain = {
        "study": {
            "name": study.name,
            "title": study.title,
            "hosts": study.hosts,
            "ppn": study.ppn,
            "baseline": study.baseline,
            "train": dict(study.fields),
            "loss": None if study.loss is None else dataclasses.asdict(study.loss),
            "speed": None if study.speed is None else dataclasses.asdict(study.speed),
            "variants": [dataclasses.asdict(variant) for variant in study.variants],
            "policies": dict(study.policies),
        },
        "lab": results.kind,
        "parameters": results.parameters,
        "loss": {
            name: {
                "mean": losses.mean,
                "spread": losses.spread,
                "gap": losses.gap,
                "by_seed": dict(losses.by_seed),
                "gaps": dict(losses.gaps),
                "curve": dict(losses.curve),
                "wire_bytes": dict(losses.wire_bytes),
                "plain_bytes": dict(losses.plain_bytes),
                "suppressed": losses.suppressed,
            }
            for name, losses in results.losses.items()
        },
        "bits_per_value": {v.codec: bits_per_value(v.codec) for v in study.variants if v.codec is not None},
        "speed": {
            rate: {name: dataclasses.asdict(speeds) for name, speeds in rows.items()}
            for rate, rows in results.speeds.items()
        },
        "shown": [{"held": verdict.held, "sentence": verdict.sentence} for verdict in results.verdicts],
        "commands": dict(results.commands),
    }
    return _finite(plain)  # type: ignore[no-any-return]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def markdown(results: Results) -> str:
    """Return verdicts and tables in Markdown, for inclusion in documentation."""
    parts = [one.markdown() for one in tables(results)]
    if results.verdicts:
        parts.append(
            "\n".join(f"- {_word(verdict.held)} {verdict.sentence}" for verdict in results.verdicts) + "\n"
        )
    return "\n".join(parts)


def _word(held: bool) -> str:
    return "Shown:" if held else "**Not shown:**"


def _page(
    results: Results, drawn: Mapping[str, bytes], on_dark: Mapping[str, bytes], machine: Mapping[str, str]
) -> str:
    study = results.study
    when = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    words = "".join(
        f"<li>{'shown' if verdict.held else '<strong>not shown</strong>'}: {html.escape(verdict.sentence)}</li>"
        for verdict in results.verdicts
    )
    images = "".join(
        style.image(picture, on_dark[name], f"{_ALTERNATIVES[name]} The tables hold the same figures.")
        for name, picture in drawn.items()
    )
    figures = "".join(
        f"<h2>{html.escape(one.title)}</h2>{table(one.headings, one.rows)}<p>{html.escape(one.note)}</p>"
        for one in tables(results)
    )
    policies = "".join(
        f"<h3>{html.escape(name)}</h3><pre>{html.escape(text)}</pre>" for name, text in study.policies.items()
    )
    commands = "\n".join(results.commands.values())
    return style.page(
        study.title,
        f"""<h1>{html.escape(study.title)}</h1>
<p class="when">{when}; {results.parameters:,} parameters on {study.hosts} hosts of {study.ppn} ranks</p>
<p>{html.escape(study.about.strip())}</p>
<ul>{words}</ul>
{images}
{figures}
<h2>Machine</h2>
{table(("what", "which"), list(machine.items()), kind="words")}
<details><summary>The study's own policies</summary>{policies or "<p>none</p>"}</details>
<details><summary>The command of each run</summary><pre>{html.escape(commands)}</pre></details>
""",
    )

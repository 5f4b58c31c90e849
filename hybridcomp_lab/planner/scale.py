"""Predict how a layout scales: the same work for each replica, on ever more ranks, at several rates of the links."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridcomp import style
from hybridcomp.errors import ConfigError
from hybridcomp.files import write_text
from hybridcomp.policy import load_policy
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.step.prediction import predict_step
from hybridcomp_lab.planner.timeline import figure_html
from hybridcomp_lab.train.config import TrainConfig

_POLICIES = ("none", "exact", "hybrid")
_FACTORS = (0.1, 0.4, 1.0, 4.0)  # factors on the cluster's rate
_MOST_RANKS = 65536
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up")
_AXES = ("dp", "pp", "tp", "embedding")


@dataclass(frozen=True)
class Point:
    """Prediction for one size.

    Attributes:
        ranks: number of ranks.
        rate: bytes/s of each host's link.
        policy: name of a preset.
        step: seconds of a step.
        efficiency: share of the step for which the busiest rank computes.
        samples_per_second: sequences per second of all ranks.
        wire_bytes: bytes that the busiest rank sends in a step, by axis.
    """

    ranks: int
    rate: float
    policy: str
    step: float
    efficiency: float
    samples_per_second: float
    wire_bytes: Mapping[str, float]


def read_range(text: str) -> tuple[int, int]:
    """Read ``8:4096``.

    Raises:
        ConfigError: the text is no such range.
    """
    found = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]) <= _MOST_RANKS:
        raise ConfigError(
            f"--scale {text}: it must be the least and the most ranks, from 1 to {_MOST_RANKS}: 8:4096"
        )
    return int(found[1]), int(found[2])


def sizes(least: int, most: int, config: TrainConfig, ranks_per_host: int) -> list[int]:
    """Return the numbers of ranks from ``least``, doubling, that have whole replicas on whole hosts.

    Raises:
        ConfigError: there is no such number.
    """
    replica = config.pp * config.tp
    found, ranks = [], least
    while ranks <= most:
        if ranks % replica == 0 and (ranks < ranks_per_host or ranks % ranks_per_host == 0):
            found.append(ranks)
        ranks *= 2
    if not found:
        raise ConfigError(
            f"--scale {least}:{most}: none of {least}, {2 * least}, ... has whole replicas of {replica} ranks on whole "
            f"hosts of {ranks_per_host}; {max(replica, ranks_per_host)}:{max(most, 8 * replica)} works"
        )
    return found


def scale(
    config: TrainConfig,
    cluster: Cluster,
    counts: Sequence[int],
    told: Callable[[int, int], None] = lambda done, total: None,
) -> list[Point]:
    """Predict every size, rate and policy.

    Args:
        config: layout; dp follows the size.
        cluster: cluster that it runs on; the number of hosts follows the size.
        counts: numbers of ranks.
        told: called with the number of predictions made so far, and in all.
    """
    cases = list(_cases(cluster, counts))
    points = []
    for done, (ranks, rate, policy) in enumerate(cases, 1):
        here = min(ranks, cluster.ranks_per_host)
        network = dataclasses.replace(cluster.profile.network, bandwidth=rate)
        profile = dataclasses.replace(cluster.profile, network=network)
        size = dataclasses.replace(
            cluster, hosts=ranks // here, ranks_per_host=here, profile=profile, speeds=(), rates=()
        )
        layout = dataclasses.replace(config, dp=ranks // config.pp // config.tp)
        found = predict_step(layout, size, load_policy(policy))
        points.append(
            Point(
                ranks,
                rate,
                policy,
                found.seconds,
                found.compute / found.seconds,
                found.samples_per_second,
                dict(found.wire_bytes),
            )
        )
        told(done, len(cases))
    return points


def _cases(cluster: Cluster, counts: Sequence[int]) -> Iterator[tuple[int, float, str]]:
    for factor in _FACTORS:
        for policy in _POLICIES:
            for ranks in counts:
                yield ranks, factor * cluster.profile.network.bandwidth, policy


def write_scale(path: Path, heading: str, facts: str, points: Sequence[Point]) -> None:
    """Write the page of curves, with a button for each rate.

    Args:
        path: path of the page.
        heading: heading of the page.
        facts: description of the predicted job, in a sentence or two.
        points: all predictions.

    Raises:
        ConfigError: the page cannot be written.
        ModuleNotFoundError: plotly is missing.
    """
    body = f"""<h1>{html.escape(heading)}</h1>
<p class="when">Simulated, not measured.</p>
<p>{html.escape(facts)} Efficiency is the share of a step for which the busiest rank computes. Bytes are those of a step
that the busiest rank sends. The buttons choose the rate of each host's link.</p>
{figure_html(_figure(points))}
"""
    write_text(path, style.page(heading, body))


def rate_name(rate: float) -> str:
    """Return a link's rate as text for people."""
    return f"{8 * rate / 1e9:.3g} Gb/s"


def _figure(points: Sequence[Point]) -> Any:
    from plotly.subplots import make_subplots  # noqa: PLC0415  (of the extra "plan")

    axes = [axis for axis in _AXES if any(point.wire_bytes.get(axis) for point in points)]
    panels = ["seconds of a step", "efficiency", *(f"MB of {axis}" for axis in axes)]
    figure = make_subplots(
        rows=len(panels), cols=1, shared_xaxes=True, subplot_titles=panels, vertical_spacing=0.07
    )
    rates = list(dict.fromkeys(point.rate for point in points))
    shown_first = len(rates) // 2
    owners: list[float] = []
    for rate in rates:
        for number, policy in enumerate(dict.fromkeys(point.policy for point in points)):
            own = [point for point in points if (point.rate, point.policy) == (rate, policy)]
            values = [[p.step for p in own], [p.efficiency for p in own]]
            values += [[p.wire_bytes.get(axis, 0.0) / 1e6 for p in own] for axis in axes]
            for row, y in enumerate(values, 1):
                figure.add_scatter(
                    x=[point.ranks for point in own],
                    y=y,
                    name=policy,
                    legendgroup=policy,
                    showlegend=row == 1,
                    visible=rate == rates[shown_first],
                    line={"color": style.SERIES[number], "dash": _DASHES[number]},
                    marker={"symbol": _SYMBOLS[number], "size": 7},
                    mode="lines+markers",
                    hovertemplate="%{x} ranks: %{y:.4g}<extra>" + policy + "</extra>",
                    row=row,
                    col=1,
                )
                owners.append(rate)
    buttons = [
        {
            "label": rate_name(rate),
            "method": "restyle",
            "args": ["visible", [owner == rate for owner in owners]],
        }
        for rate in rates
    ]
    place = {
        "type": "buttons",
        "direction": "right",
        "x": 0,
        "xanchor": "left",
        "y": 1.1,
        "yanchor": "bottom",
    }
    figure.update_layout(updatemenus=[{**place, "buttons": buttons, "active": shown_first}])
    figure.update_layout(height=260 * len(panels) + 120)
    figure.update_xaxes(type="log", tickvals=sorted({p.ranks for p in points}), minor_showgrid=False)
    figure.update_xaxes(title="ranks", row=len(panels), col=1)
    figure.update_yaxes(rangemode="tozero")
    return figure

"""``hybridcomp schedule``, and the simulated time that it draws."""

from __future__ import annotations

import importlib.util
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from hybridcomp.cli.main import main
from hybridcomp.schedules import cuts
from hybridcomp.schedules.faults import ScheduleError
from hybridcomp.schedules.proofs.order import Order
from hybridcomp.schedules.registry import ALGORITHMS, build
from hybridcomp.schedules.schedule import Kind, Operation, Slot
from hybridcomp.schedules.simulate import Link, Machine, by_rate, columns, run, simulate
from hybridcomp.schedules.topology import Topology
from tests.schedules.cases import PAIRS, built, check, operation

MATPLOTLIB = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["schedule", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        code = main(["schedule", *arguments])
    except SystemExit as stop:  # argparse's
        code = stop.code
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_every_algorithm_is_told(kind: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, kind, "--algorithm", name, "--size", "64K", "--ranks-per-host", "2", "--rank", "1")
    ranks = 2 if kind == "send" else 4
    assert f"{kind} by {name}, {ranks} ranks, 64K of float32 by int8" in text
    assert "verified: no deadlock, no race" in text
    assert "Rank 1" in text
    assert "Rank 0" not in text


def test_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(
        capsys, "all_reduce", "--size", "64K", "--codec", "none", "--algorithm", "direct", "--rank", "all"
    )
    assert re.findall(r"^Rank (\d)$", text, re.MULTILINE) == ["0", "1", "2", "3"]
    assert "each rank, at most: 19 steps, 6 messages sent of 96K" in text  # 3 parts and 3 results of 16K
    assert "longest chain of dependent steps, over all ranks: 7" in text
    steps = [line.split() for line in text.splitlines() if re.match(r" +\d+ ", line)]
    assert len(steps) == 4 * 19
    assert steps[0] == ["0", "receive", "slot", "0", "from", "rank", "1", "4096", "0"]


def test_a_rank_alone_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "0 messages sent of 0 bytes" in said(capsys, "all_reduce", "--ranks", "1", "--algorithm", "ring")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduces",), "invalid choice: 'all_reduces'"),
        (("all_reduce", "--size", "much"), "'much' is no size; write 4096, 64K, 1M or 1G"),
        (("all_reduce", "--latency", "50"), "'50' is no time; write 50us, 0.5ms or 1s"),
        (
            ("all_reduce", "--algorithm", "rings"),
            "no algorithm 'rings'; allowed: direct, one_shot, hierarchical, ring",
        ),
        (("all_reduce", "--algorithm", "hierarchical"), "each rank has a host of its own"),
        (
            ("all_reduce", "--algorithm", "halving", "--feedback"),
            "it takes no error feedback; allowed: direct",
        ),
        (("all_reduce", "--rank", "4"), "--rank 4: write 0 to 3, or all"),
        (("all_reduce", "--ranks", "0"), "at least 1 is needed"),
        (("broadcast", "--root", "4"), "roots are 0 to 3, not 4"),
        (("all_reduce", "--rate", "fast"), "rate 'fast' is not understood"),
        (("all_reduce", "--codec", "int9"), "int9"),
        (("all_reduce", "--picture", "a.gif"), "its suffix must be .png or .svg"),
    ],
)
def test_wrong_input(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *arguments)


def test_a_wrong_schedule_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> None:
        raise ScheduleError("rank 0, step 1 (check slot 2): it is spoiled")

    monkeypatch.setattr("hybridcomp.cli.schedule.verify", wrong)
    assert main(["schedule", "all_reduce", "--size", "1K"]) == 1
    assert "Wrong: rank 0, step 1 (check slot 2): it is spoiled" in capsys.readouterr().out


@MATPLOTLIB
@pytest.mark.filterwarnings("default")
def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png, svg = tmp_path / "ring.png", tmp_path / "tree.svg"
    said(capsys, "all_reduce", "--algorithm", "ring", "--chunk", "64K", "--picture", str(png))
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000
    assert height > 500
    said(capsys, "broadcast", "--ranks", "6", "--picture", str(svg))
    assert "</svg>" in svg.read_text()
    said(capsys, "broadcast", "--picture", str(tmp_path / "new" / "a.png"))  # in a folder that it makes
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "Not a directory" in refused(capsys, "broadcast", "--picture", str(png / "a.png"))


def test_a_picture_without_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = refused(capsys, "all_reduce", "--picture", "a.png")
    assert (
        "matplotlib is missing: in a clone of hybridcomp, pip install '.[train]' --extra-index-url https"
        in text
    )


# -- simulated time ---------------------------------------------------------------------------------------


def own_bytes(slot: Slot, count: int) -> int:
    return count * 4


def test_a_message_takes_latency_and_bytes_over_rate() -> None:
    schedules = check("send", "direct", Topology.even(2, 1), 1000)
    timeline = simulate(schedules, Machine(Link(1e-3, 1e6)), own_bytes, by_rate(4e6, 0.5e-3))
    encoded = 0.5e-3 + 4000 / 4e6
    assert timeline.ends[0] == pytest.approx((encoded, encoded + 4e-3))
    assert timeline.begins[1] == pytest.approx((encoded + 1e-3, encoded + 5e-3))
    assert timeline.seconds == pytest.approx(encoded + 5e-3 + encoded)
    assert timeline.busy == pytest.approx((encoded, encoded))


def test_messages_share_a_port() -> None:
    """Send from three ranks to the root: all of it arrives at one time, after as long as all of it takes."""
    schedules = check("gather", "direct", Topology.even(4, 1), 60)
    nothing = by_rate(1e30, 0.0)
    timeline = simulate(schedules, Machine(Link(1e-3, 1e6)), own_bytes, nothing)
    arrivals = [
        end for step, end in zip(schedules[0].steps, timeline.ends[0], strict=True) if step.kind is Kind.RECV
    ]
    sent = sum(step.count * 4 for step in schedules[0].steps if step.kind is Kind.RECV)
    assert arrivals == pytest.approx([1e-3 + sent / 1e6] * 3, rel=0.1)


def test_ranks_that_share_a_core_take_turns() -> None:
    schedules = check("all_gather", "direct", Topology.even(4, 1), 6400)
    apart, together, both = (
        simulate(schedules, Machine(Link(0), cores=cores), own_bytes, by_rate(1e6)).seconds
        for cores in (None, 1, 2)
    )
    assert together == pytest.approx(4 * apart, rel=1e-3)
    assert both == pytest.approx(2 * apart, rel=1e-3)


def test_a_rested_link_passes_its_burst_at_once() -> None:
    schedules = check("send", "direct", Topology.even(2, 1), 1000)
    nothing = by_rate(1e30, 0.0)
    machine = Machine(Link(0, 1e6, burst=3000))
    steps = columns(schedules, own_bytes)
    assert run(steps, machine, nothing).seconds == pytest.approx(4e-3)
    rested = run(steps, machine, nothing, [3000] * 4)
    assert rested.seconds == pytest.approx(1e-3)
    assert rested.credits == pytest.approx((0, 3000, 3000, 0), abs=1e-6)


def test_who_waits_needs_time_to_notice_a_message() -> None:
    schedules = check("send", "direct", Topology.even(2, 1), 1000)
    at_once, late = (
        simulate(schedules, Machine(Link(0, 1e6), wake=wake), own_bytes).seconds for wake in (0, 1e-3)
    )
    assert late - at_once == pytest.approx(1e-3)


TURNED = [
    *(
        (kind, name)
        for kind in ("all_reduce", "reduce_scatter")
        for name in ("direct", "ring", "hierarchical")
    ),
    ("all_reduce", "one_shot"),
    *(("all_gather", name) for name in ("direct", "ring", "doubling", "hierarchical")),
]


@pytest.mark.parametrize(("kind", "name"), TURNED)
def test_hosts_that_are_alike_are_simulated_by_one(kind: str, name: str) -> None:
    topology = Topology.even(8, 2)
    counts = (64 * 64,) if kind == "all_reduce" else (64 * 8,) * 8
    schedules = built(ALGORITHMS[kind][name], Operation(kind, counts, 4, chunk_bytes=1024), topology)
    machine = Machine(Link(20e-6, 125e6))
    every = simulate(schedules, machine, own_bytes).seconds
    one = run(columns(schedules[:2], own_bytes, alike=True), machine, by_rate()).seconds
    assert one == pytest.approx(every, rel=0.02)


def test_messages_that_do_not_meet_are_refused() -> None:
    schedules = check("send", "direct", Topology.even(2, 1), 10)
    with pytest.raises(ScheduleError, match="rank 0 sends 1 messages to rank 1"):
        columns([schedules[0], replace(schedules[1], steps=schedules[1].steps[1:])], own_bytes)


def test_ranks_of_a_host_share_its_link() -> None:
    apart = simulate(
        check("all_to_all", "direct", Topology.even(4, 1), 6400), Machine(Link(0, 1e6)), own_bytes
    )
    pairs = simulate(
        check("all_to_all", "direct", Topology.even(4, 2), 6400), Machine(Link(0, 1e6)), own_bytes
    )
    # 3 messages leave each host, or 4; the rest stays inside.
    assert pairs.seconds / apart.seconds == pytest.approx(4 / 3, rel=0.1)


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_time_respects_dependencies(kind: str, name: str) -> None:
    topology = Topology((0, 1, 1, 0, 2)) if kind != "send" else Topology.even(2, 1)
    schedules = cuts.even(check(kind, name, topology, 64 * 20))
    timeline = simulate(schedules, Machine(Link(20e-6, 125e6)), own_bytes)
    for schedule, begins, ends in zip(schedules, timeline.begins, timeline.ends, strict=True):
        for index, step in enumerate(schedule.steps):
            assert begins[index] >= max((ends[one] for one in step.after), default=0.0)
            assert ends[index] >= begins[index] >= 0
    order = Order(schedules)
    for recv, send in order.sender.items():
        first = [0]
        for schedule in schedules:
            first.append(first[-1] + len(schedule.steps))
        at = [(order.rank[g], g - first[order.rank[g]]) for g in (send, recv)]
        assert timeline.begins[at[1][0]][at[1][1]] > timeline.begins[at[0][0]][at[0][1]]


def test_bulk_reaches_the_wire() -> None:
    """An all-reduce of much data by a ring takes little more than what each link has to carry."""
    schedules = check("all_reduce", "ring", Topology.even(4, 1), 64 * 4 * 64)
    n = schedules[0].operation.counts[0]
    timeline = simulate(schedules, Machine(Link(1e-6, 1e6)), own_bytes)
    assert 1.0 <= timeline.seconds / (2 * 3 / 4 * 4 * n / 1e6) < 1.1


# -- the registry -----------------------------------------------------------------------------------------


def test_schedules_are_kept() -> None:
    of = operation("all_reduce", 3, 100)
    first = build(of, Topology.even(3, 1), 1, "ring")
    assert build(operation("all_reduce", 3, 100), Topology.even(3, 1), 1, "ring") is first
    assert build(of, Topology.even(3, 1), 2, "ring") is not first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_gather", 0, "direct", {"mean": True}), "only all_reduce, reduce_scatter, reduce may divide"),
        (("all_reduce", 3, "direct", {}), "ranks are 0 to 2, not 3"),
        (
            ("all_reduce", 0, "direct", {"feedback": True, "plain": True}),
            "error feedback is for lossy codecs",
        ),
        (
            ("all_reduce", 0, "one", {}),
            "all_reduce has no algorithm 'one'; allowed: direct, one_shot, hierarchical, ring",
        ),
        (("send", 0, "direct", {}), "there are 3 ranks, not 2"),
    ],
)
def test_what_cannot_be_built(arguments: tuple[str, int, str, dict[str, bool]], message: str) -> None:
    kind, rank, name, how = arguments
    with pytest.raises(ValueError, match=message):
        build(operation(kind, 3, 8, **how), Topology.even(3, 1), rank, name)


def test_names_and_promises_agree() -> None:
    for algorithms in ALGORITHMS.values():
        for name, algorithm in algorithms.items():
            assert algorithm.name == name
            assert algorithm.reencodes == (algorithm.promise.parts > 1)


def test_the_number_of_steps_of_an_exchange() -> None:
    schedules = check("all_reduce", "direct", Topology.even(16, 1), 64 * 16)
    # For each other rank: two receives, encode and send a part, send a sum, decode. And the sum.
    assert sum(len(s.steps) for s in schedules) == 16 * (15 * 6 + 1)

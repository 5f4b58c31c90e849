"""The benchmarks' arithmetic: sizes, expected results, limits, the matrix, the report."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.collbench import limits, matrix, report
from benchmarks.collbench.elements import TYPES, Elements
from benchmarks.collbench.figures import Piece, Values, hidden, link_seconds, parse_sizes, size_text
from benchmarks.collbench.link import Payload, between, read
from benchmarks.collbench.records import Records

ROOT = Path(__file__).parents[2]
NET_DEV = """Inter-|   Receive                                              |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:       0    0    0    0    0     0          0         0        0    0    0    0    0     0       0          0
  eth0:   10066    1    0    0    0     0          0         0     2132    2    0    0    0     0       0          0
"""


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("64M", [64 << 20]),
        ("1000,4k", [1000, 4096]),
        ("4K:1MiB:16", [4096, 65536, 1 << 20]),
        ("3:12", [3, 6, 12]),
    ],
)
def test_sizes(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["64X", "", "4K:1M:1", "-4"])
def test_wrong_sizes(text):
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        parse_sizes(text)


@pytest.mark.parametrize("size", [1, 1000, 1 << 10, 96 << 10, 64 << 20, 3 << 30])
def test_size_text_is_read_back(size):
    assert parse_sizes(size_text(size)) == [size]


def test_expected_results_are_what_the_ranks_send():
    values = Values(Elements("float32"))
    n, p = 2_500_000, 3  # more elements than are compared at once
    sent = [values.of(rank, n) for rank in range(p)]
    assert not np.array_equal(sent[0], sent[1])
    total = sum(x.astype(np.float64) for x in sent)
    everything = [Piece(n, tuple((q, 0) for q in range(p)))]
    assert values.error(total.astype(np.float32), everything) < 1e-7
    second = [Piece(1000, ((q, 1000),)) for q in range(p)]  # an all-to-all's rank 1
    got = np.concatenate([x[1000:2000] for x in sent])
    assert values.error(got, second) == 0
    got[5] += 100
    assert values.error(got, second) > 0.5
    got[5] = np.nan
    assert np.isnan(values.error(got, second))
    with pytest.raises(ValueError, match="3000 elements"):
        values.error(got[:-1], second)


@pytest.mark.parametrize("name", TYPES)
def test_elements_are_read_as_they_were_stored(name):
    elements = Elements(name)
    values = np.array([0, 1, -2.5, 3.140625], np.float32)
    array = elements.of(values)
    assert np.array_equal(elements.wide(array), values)
    array[1] = elements.nan
    assert np.isnan(elements.wide(array)[1])
    assert str(elements.tensor(array).dtype) == f"torch.{name}"
    elements.tensor(array)[2] = 7  # the same memory
    assert elements.wide(array)[2] == 7


def test_codec_error_is_the_codecs():
    assert Values(Elements("bfloat16")).codec_error("exponent") == 0
    values = Values(Elements("float32"))
    assert values.codec_error("none") == 0
    assert 0.005 < values.codec_error("int8") < 0.008


def test_link_counts_payload():
    assert read(NET_DEV, "eth0") == Payload(received=10_000, sent=2_000)
    with pytest.raises(ValueError, match="eth1"):
        read(NET_DEV, "eth1")
    assert between(Payload(0, 500), Payload(10_000, 2_000)) == 10_000
    assert between(Payload(9_000, 0), Payload(10_000, 2_000)) == 2_000
    assert between(None, Payload(1, 1)) == 0


def test_link_seconds():
    assert link_seconds(125_000_000, "1gbit") == pytest.approx(1)
    assert link_seconds(25_000_000, "200mbit") == pytest.approx(1)
    assert link_seconds(125_000_000, "none") is None
    assert link_seconds(1_000_000, "1gbit") is None  # two buckets


@pytest.mark.parametrize(
    ("operation", "computation", "both", "share"),
    [
        (1.0, 1.0, 1.0, 1),
        (1.0, 1.0, 2.0, 0),
        (1.0, 3.0, 3.2, 0.8),
        (2.0, 1.0, 2.5, 0.5),
        (1.0, 1.0, 2.5, -0.5),
    ],
)
def test_hidden(operation, computation, both, share):
    assert hidden(operation, computation, both) == pytest.approx(share)


def test_limits_are_those_of_the_guide():
    assert limits.seconds(1.5, 32) == pytest.approx(0.805, abs=1e-3)
    guide = (ROOT / "docs" / "performance.md").read_text()
    for line in limits.table():
        assert line in guide


def test_what_codecs_cost_a_rank_is_that_of_the_speeds_measured():
    guide = (ROOT / "docs" / "performance.md").read_text()
    said = []
    for isa, name in (("avx512", "AVX-512"), ("avx2", "AVX2")):
        rows = json.loads((ROOT / "benchmarks" / "results" / "codecs" / f"{isa}.json").read_text())["rows"]
        (int8,) = (row for row in rows if row.get("spec") == "int8:block=128")
        speeds = [int8[one]["gb_s"] * 1e9 for one in ("encode", "decode", "decode_add")]
        said.append(f"{limits.codec_seconds(64 << 20, 4, *speeds) * 1e3:.0f} ms with {name}")
    assert f"64 MiB of `int8` cost one of four ranks {' and '.join(said)}" in guide
    assert limits.codec_seconds(8e9, 4, 1e9, 2e9, 4e9) == 8 + 1.5 + 2 + 4


# -- the papers' claims ----------------------------------------------------------------------------------


def test_every_claim_is_met_or_not():
    text = (ROOT / "docs" / "study.md").read_text().partition("## Claims, and what came out")[2]
    rows = [
        re.split(r"(?<!\\)\|", line)[1:-1]
        for line in text.partition("The studies are")[0].splitlines()
        if "|" in line
    ]
    claims = rows[2:]
    assert len(claims) > 25
    for row in claims:
        assert len(row) == 4
        assert all(cell.strip() for cell in row)
        assert row[3].strip() in ("met", "**not met**"), row[0]


def test_the_speed_beside_a_loss_is_of_the_steps_that_the_loss_is_of(monkeypatch):
    """Of presets that begin in 4 bits: over all 1,000 steps, by the ratios of the rounds."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "pages")
    choosing = importlib.import_module("choosing_doc")
    rounds = {"ratios": [4.0, 2.0], "wire_bytes": {"dp": 10.0}, "plain_bytes": {"dp": 100.0}}
    later = {"ratios": [9.0, 9.0], "wire_bytes": {"dp": 1.0}, "plain_bytes": {"dp": 100.0}}
    speed, fewer = choosing.over_steps({"hybrid": rounds, "later": later}, "x", "later")
    assert speed == pytest.approx((8 + 1 / 0.15) / 2)
    assert fewer == pytest.approx(100 / 1.9)
    text = (ROOT / "docs" / "study.md").read_text()
    speeds = choosing.result("aggressive-speed/results.json")["speed"]["100mbit"]
    lowrank, sparse = (
        choosing.over_steps(speeds, name, f"{name}, later")[0] for name in ("lowrank", "sparse")
    )
    assert f"`lowrank` is {lowrank:.1f} times and `sparse` {sparse:.1f}" in text
    assert f"{lowrank:.1f} times gloo at 100 Mb/s over these steps" in text


def test_matrix():
    cells = list(matrix.every())
    assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.ranks for cell in cells} == {2, 3, 4, 8}
    assert {size for cell in cells for size in cell.sizes} >= {4096, 64 << 20, 256 << 20}
    for cell in cells:
        if cell.benchmark != "overlap":
            assert cell.iters == 0 or (cell.iters + 1) * matrix.round_seconds(cell) <= 3 * matrix.CELL_SECONDS
        assert (ROOT / "benchmarks" / f"{cell.benchmark}.py").exists()
    quick = [cell for cell in cells if matrix.is_quick(cell)]
    assert 10 < len(quick) < 25
    assert all(cell.iters for cell in quick)
    assert {cell.benchmark for cell in quick} == {cell.benchmark for cell in cells}


def record(**changes):
    """Return a record of one run: 64 MiB of int8, with gloo as the best peer."""
    row = {
        "size": 64 << 20,
        "codec": "int8:block=128",
        "seconds": 0.2,
        "wire_fraction": 0.95,
        "cores": 1.5,
        "best_peer": "gloo",
        "best_peer_seconds": 0.8,
        "speedup": 4.0,
    }
    peers = [
        {"peer": "mpi", "size": 64 << 20, "seconds": 1.3},
        {"peer": "gloo", "size": 64 << 20, "seconds": 0.8},
    ]
    place = {"operation": "all_reduce", "link": "1gbit", "hosts": 4, "ranks": 4, "ranks_per_host": 1}
    machine = {"processor": "a processor", "memory": "16 GiB", "packages": "numpy"}
    return {**place, "machine": machine, "rows": [row], "peers": peers, **changes}


def test_report(tmp_path):
    records = Records(tmp_path / "lab")
    with pytest.raises(FileNotFoundError, match="run_lab"):
        report.write(records, tmp_path / "lab.md", [])
    records.add("allreduce_1gbit_4x2_64M", record(ranks=8, ranks_per_host=2))
    records.add("allreduce_1gbit_4x1_64M", record())
    assert "allreduce_1gbit_4x1_64M" in records
    assert "allreduce_1gbit_4x1_4K-4M" not in records
    assert "reduce_scatter_1gbit_4x1_64M" not in records
    assert [path.name for path in records.folder.iterdir()] == ["allreduce.json"]
    cell = matrix.Cell("bcast", "200mbit", 4, 1, (256 << 20,), 0)
    report.write(records, tmp_path / "lab.md", [cell])
    text = (tmp_path / "lab.md").read_text()
    assert "| all_reduce: int8, share of the wire's limit | 1 Gb/s | 4 x 1 | >= 0.92 | 0.95 | yes |" in text
    assert "| all_reduce: int8, times the best peer | 1 Gb/s | 4 x 1 | >= 3.8 | 4.00 | yes |" in text
    assert "| all_reduce: int8, times MPI's own | 1 Gb/s | 4 x 2 | >= 6 | 6.50 | yes |" in text
    assert "| all_reduce: int4, times the best peer | 1 Gb/s | 4 x 1 | >= 7.2 | not measured |  |" in text
    assert "| 4 x 1 | 64M | gloo 800.00 | 200.00, **4.00**, 0.95; 1.5 |" in text
    assert "bcast_200mbit_4x1_256M" in text
    assert (records.folder / "all_reduce.png").stat().st_size > 1000


def test_report_says_what_was_not_met(tmp_path):
    slow = record()
    slow["rows"][0]["speedup"] = 3.0
    records = Records(tmp_path / "lab")
    records.add("allreduce_1gbit_4x1_64M", slow)
    report.write(records, tmp_path / "lab.md", [])
    wanted = "| all_reduce: int8, times the best peer | 1 Gb/s | 4 x 1 | >= 3.8 | 3.00 | **no** |"
    assert wanted in (tmp_path / "lab.md").read_text()

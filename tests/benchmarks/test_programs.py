"""The benchmarks run, check their results, and write what they say they write."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridcomp.launcher import find_mpiexec

ROOT = Path(__file__).parents[2]


def run(*args: str, ranks: int = 3, script: str = "allreduce") -> subprocess.CompletedProcess[str]:
    command = [
        find_mpiexec(),
        "-n",
        str(ranks),
        sys.executable,
        str(ROOT / "benchmarks" / f"{script}.py"),
        *args,
    ]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)


def test_a_bucket_on_a_device(tmp_path, monkeypatch):
    """The bucket of `make gpu`, on the emulation: the parts of its time add up, and its table takes them."""
    out = tmp_path / "gpu_bucket_2.json"
    small = ("--device", "emulation", "--widths", "32", "--elements", "5000", "--iters", "1")
    done = run(*small, "--json", str(out), ranks=2, script="gpu_bucket")
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert [row["codec"] for row in record["buckets"]] == ["none", "int8", "int4", "topk:ratio=0.01"]
    for row in record["buckets"]:
        assert row["identical"]
        parts = [row[part] for part in ("waiting", "messages", "starting", "host_copies", "python")]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(row["total"])
        assert min(row["alone"], row["copies"]) > 0
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "pages")
    lines = importlib.import_module("gpu_table").bucket_table([record])
    assert any(line.startswith("| bucket of 0 MiB, `int4`, `ef` | 2 |") for line in lines)
    assert any(line.startswith("| all-reduce of 0 MiB, `int8` | 2 |") for line in lines)


def test_a_pass_of_momenta(tmp_path):
    out = tmp_path / "rows.json"
    args = ("--codec", "sign:block=65536;int8", "--elements", "1300000", "--times", "1", "--json", str(out))
    done = run(*args, ranks=1, script="momentum_pass")
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {row["codec"] for row in rows} == {"sign:block=65536", "int8"}
    assert all(row["ratio"] == row["memcpy_s"] / row["pass_s"] > 0 for row in rows)


@pytest.mark.long
def test_allreduce(tmp_path):
    out = tmp_path / "rows.json"
    more = ["--algorithm", "direct"]  # short arrays go in one exchange otherwise, in which more is sent
    done = run("--codec", "int8,none", "--size", "4K:64K:16", "--iters", "3", "--json", str(out), *more)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["ranks"] == 3
    assert [(r["size"], r["codec"]) for r in record["rows"]] == [
        (4096, "int8:block=128"),
        (4096, "none"),
        (65536, "int8:block=128"),
        (65536, "none"),
    ]
    for row in record["rows"]:
        assert row["identical"]
        assert row["relative_error"] < (0.012 if row["codec"] != "none" else 1e-6)
        assert row["seconds"] > 0
        assert row["busbw"] == pytest.approx(row["algbw"] * 4 / 3)
    assert 3.5 < record["rows"][2]["ratio"] < 4
    assert "int8:block=128" in done.stdout


@pytest.mark.parametrize(
    ("script", "peers", "factor", "same"),
    [
        ("allreduce", "mpi,gloo", 1.0, True),
        ("reduce_scatter", "mpi,gloo", 0.5, None),
        ("allgather", "mpi,gloo", 0.5, True),
        ("alltoall", "mpi", 0.5, None),
        ("bcast", "mpi", 1.0, True),
        ("sendrecv", "mpi", 1.0, None),
    ],
)
def test_each_operation(tmp_path, script, peers, factor, same):
    out = tmp_path / "rows.json"
    flags = ("--peer", peers, "--size", "96K", "--iters", "2", "--warmup", "1", "--json", str(out))
    done = run("--codec", "int8", *flags, ranks=2, script=script)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert [row["peer"] for row in record["peers"]] == peers.split(",")
    (row,) = record["rows"]
    assert row["identical"] is same
    assert row["busbw"] == pytest.approx(row["algbw"] * factor)
    assert row["algbw"] == pytest.approx(row["size"] / row["seconds"] / 1e9)
    assert 3.5 < row["ratio"] < 4
    assert 1e-3 < row["relative_error"] < 0.012
    assert row["speedup"] == pytest.approx(row["best_peer_seconds"] / row["seconds"])
    assert row["best_peer_seconds"] == min(peer["seconds"] for peer in record["peers"])
    assert row["wire_fraction"] is None
    assert row["link_bytes"] == 0


def test_overlap(tmp_path):
    out = tmp_path / "rows.json"
    flags = ("--size", "256K", "--iters", "2", "--warmup", "1", "--json", str(out))
    done = run("--codec", "int8", "--peer", "mpi", *flags, ranks=2, script="overlap")
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == ["int8:block=128", "mpi"]
    for row in rows:
        times = [row[key] for key in ("communication", "computation", "both")]
        assert row["hidden"] == pytest.approx((times[0] + times[1] - times[2]) / min(times[:2]))
        assert row["relative_error"] < 0.012
        assert row["slowdown"] > -1


def test_sparse_sums(tmp_path):
    out = tmp_path / "rows.json"
    flags = ("--size", "256K", "--peer", "mpi", "--iters", "1", "--warmup", "1", "--json", str(out))
    done = run("--density", "0.002,0.01", *flags, ranks=2, script="sparse_sums")
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["density"] for row in rows] == [0.002] * 6 + [0.01] * 6
    for row in rows:
        assert row["identical"]
        assert row["relative_error"] < 1e-5 or row["codec"].startswith("topk")
    sent = {row["codec"].partition(":fpr")[0]: row["wire_bytes"] for row in rows[:6]}
    assert sent["sketch:load=0.6:index=bloom"] < sent["sketch:load=0.6"] < sent["none"] / 4


def test_watched(tmp_path):
    out = tmp_path / "rows.json"
    done = run("--rounds", "3", "--seconds", "0.3", "--json", str(out), ranks=2, script="watched")
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["bytes"], row["ranks"], row["correct"]) for row in rows] == [
        (4096, 2, True),
        (262144, 2, True),
    ]
    for row in rows:
        assert row["off"]["call_microseconds"] > 0
        for kind, rate in ("looks", 1), ("files", 2):
            found = row[kind]
            assert found["a_part"] > 0
            assert found["processor_microseconds"] > 0
            assert found["share"] == pytest.approx(found["microseconds"] * 1e-6 * rate, abs=1e-6)


@pytest.mark.parametrize(
    ("flag", "value", "match"),
    [
        ("--dtype", "bfloat16", "sums no bfloat16"),
        ("--size", "64X", "no size"),
        ("--codec", "int9", "int9"),
        ("--peer", "nccl", "nccl"),
        ("--algorithm", "best", "best"),
    ],
)
def test_wrong_arguments(flag, value, match):
    done = run(flag, value, ranks=1)
    assert done.returncode != 0
    assert match in done.stderr

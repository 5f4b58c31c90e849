"""The codec benchmark runs, checks what codecs promise, and measures errors as it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import hybridcomp as hc
from benchmarks.codecbench import data, measure, specs
from benchmarks.codecbench.gradients import collect
from benchmarks.codecbench.peers import PEERS
from hybridcomp import native
from hybridcomp.codecs import own_names

ROOT = Path(__file__).parents[2]


def run(*args: str, script: str = "codecs.py", code: int = 0) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_comparison_and_pictures(tmp_path):
    isas = native.kernels().available_isas()
    out = tmp_path / "codecs" / f"{isas[0]}.json"
    done = run(
        *("--quick", "--no-peers", "--isa", "all"),
        *("--codec", "none;int8;topk:ratio=0.01;powersgd:rank=4", "--json", str(out)),
    )
    record = json.loads(out.read_text())
    assert done.stdout.startswith(f"# {', '.join(isas)}; 1 thread(s), ")
    assert [row["name"] for row in record["rows"]] == ["none", "int8", "topk:ratio=0.01", "powersgd:rank=4"]
    assert list(record["sets"]) == ["Gaussian", "Laplace", "Student-t(3)", "activations", "gradients"]
    for row in record["rows"]:
        assert row["keeps_nan"]
        assert row["sets"].keys() == record["sets"].keys()
        for operation in measure.OPERATIONS:
            speed = row[operation]
            assert speed["repetitions"] >= 3
            assert list(row["by_isa"]) == isas
            assert row["by_isa"][isas[0]][operation] == speed
            assert speed["ratio"] == pytest.approx(speed["gb_s"] / speed["memcpy_gb_s"])
        assert f"{row['name']} " in done.stdout
    none, int8, _, powersgd = (row["sets"] for row in record["rows"])
    assert none["gradients"]["l2"] == none["gradients"]["peak"] == 0
    assert int8["Gaussian"]["bits"] == pytest.approx(8.25, abs=0.02)
    assert 0.004 < int8["Gaussian"]["l2"] < 0.0075
    assert powersgd["gradients"]["l2"] < 0.8 < powersgd["Gaussian"]["l2"]  # matrices, not a flat array
    asked = {(row["spec"], row["operation"], row["than"]): row for row in record["asked"][::-1]}
    assert {row["isa"] for row in record["asked"]} == set(isas) - {"portable"}
    own = asked["int8", "encode", "memcpy"]
    assert own["measured"] == record["rows"][1]["encode"]["ratio"]
    assert own["met"] == (own["measured"] >= 1.3)
    assert asked["topk:ratio=0.01", "encode", "torch topk 1 %"]["met"] is None  # no peers in this run
    run(str(tmp_path), script="pages/plot_codecs.py")
    for picture in ("codecs_error.png", "codecs_speed.png"):
        content = (tmp_path / picture).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert 10_000 < len(content) < 200_000


@pytest.mark.long
def test_sizes_and_types(tmp_path):
    out = tmp_path / "sizes.json"
    run("--quick", "--sizes", "--codec", "int8;bf16", "--json", str(out))
    record = json.loads(out.read_text())
    cases = {(row["name"], row["size"], row["dtype"]) for row in record["rows"]}
    assert len(cases) == len(record["rows"]) == 8
    assert {dtype for _, _, dtype in cases} == {"float32", "float16", "bfloat16"}
    for fall in record["fallen"]:
        assert 0 < fall["part"] < 0.75


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["--codec", "int9"], "int9"),
        (["--elements", "0"], "positive"),
        (["--isa", "mmx"], "this machine runs {isas}, not mmx"),
    ],
)
def test_wrong_arguments(args, match):
    isas = ", ".join(native.kernels().available_isas())
    assert match.format(isas=isas) in run(*args, code=2).stderr


def test_every_codec_is_measured():
    assert set(own_names()) == {entry.codec().name for entry in specs.ENTRIES}
    assert len({entry.codec().spec for entry in specs.ENTRIES}) == len(specs.ENTRIES)
    listed = {entry.spec for entry in specs.ENTRIES} | {peer.name for peer in PEERS} | {specs.MEMCPY}
    assert {asked.than for asked in specs.ASKED} <= listed | set(native.ISAS)
    assert {asked.spec for asked in specs.ASKED} <= listed


# -- the measures --------------------------------------------------------------------------------------------


def test_errors():
    x = np.array([3, -4, 0, 0], np.float32)
    found = measure.errors(x, np.array([3, -4.5, 0, 0.5], np.float32))
    assert found == measure.Errors(l2=pytest.approx(0.5**0.5 / 5), peak=0.125, absolute=0.5)
    assert measure.errors(x, x) == measure.Errors(0, 0, 0)
    assert measure.errors(0 * x, 0 * x) == measure.Errors(0, 0, 0)
    assert measure.errors(0 * x, x).l2 == np.inf
    assert np.isnan(measure.errors(x, np.array([np.nan, -4, 0, 0], np.float32)).absolute)


def test_errors_over_many_pieces():
    x = np.zeros((1 << 18) * 2 + 3, np.float32)
    x[5] = 2
    y = x.copy()
    y[-1] = 1
    assert measure.errors(x, y) == measure.Errors(l2=0.5, peak=0.5, absolute=1)
    y[0] = np.nan
    assert np.isnan(measure.errors(x, y).peak)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_errors_of_halves(dtype):
    x = torch.tensor([1.0, -2.0, 0.5]).to(dtype)
    y = torch.tensor([1.0, -1.5, 0.5]).to(dtype)
    assert measure.errors(x, y).peak == 0.25


class Fake(measure.Subject):
    """Codec that decodes to given values."""

    def __init__(self, x, y, bias=0.0):
        super().__init__(x)
        self.y = y
        self.bias = bias

    def encode(self):
        pass

    decode = encode

    def decode_add(self):
        self.acc += self.y + np.float32(self.bias)

    def floats(self):
        return self.y

    values = property(floats)
    nbytes = 1


@pytest.mark.parametrize(
    ("expect", "y"),
    [
        (specs.Expect(exact=True), [1, 2, -0.0, 4]),  # another zero
        (specs.Expect(l2=0.1), [1, 2, 0, 5]),
        (specs.Expect(peak=0.1), [1, 2, 0.5, 4]),
        (specs.Expect(absolute=0.1), [1, 2, 0, 4.125]),
        (specs.Expect(span=0.1), [1.5, 2, 0, 4]),
        (specs.Expect(kept=True), [1, 2, 0, 4.5]),
        (specs.Expect(), [1, 2, 0, np.inf]),
    ],
)
def test_a_broken_promise_is_found(expect, y):
    x = np.array([1, 2, 0, 4], np.float32)
    entry = specs.Entry("none", "exact", expect)
    ours = data.DataSet("Gaussian", "", x)
    measure.check_promise(entry, ours, Fake(x, x))
    with pytest.raises(measure.CheckFailed):
        measure.check_promise(entry, ours, Fake(x, np.array(y, np.float32)))


def test_a_wrong_sum_is_found():
    x = np.ones(100, np.float32)
    measure.check_sum("fake", Fake(x, x))
    with pytest.raises(measure.CheckFailed, match="decode_add"):
        measure.check_sum("fake", Fake(x, x, bias=1e-3))


def test_lost_nan_is_found():
    assert measure.keeps_non_finite(lambda x: Fake(x, x))
    assert not measure.keeps_non_finite(lambda x: Fake(x, np.nan_to_num(x)))
    assert not measure.keeps_non_finite(lambda x: Fake(x, np.where(np.isinf(x), 0, x)))


# -- data and peers ------------------------------------------------------------------------------------------


def test_data():
    for one in data.every(10_000, small=True):
        assert one.values.shape == (10_000,)
        assert one.values.dtype == np.float32
        assert np.isfinite(one.values).all()
    rows = data.activations(20 * data.CHANNELS).values.reshape(20, -1)
    assert (np.abs(rows).mean(0) > 10).sum() == data.OUTLIERS


def test_gradients_are_whole_tensors_of_several_steps():
    says, values, tensors = collect(300_000, small=True)
    assert "at step 0, 5, 10, before" in says
    ends = [start + int(np.prod(shape)) for start, shape in tensors]
    assert [start for start, _ in tensors] == [0, *ends[:-1]]
    assert ends[-1] == values.size
    embeddings = [
        values[start:end] for (start, shape), end in zip(tensors, ends, strict=True) if shape == (256, 64)
    ]
    assert len(embeddings) >= 3  # byte embeddings: the first tensor of each step, and the head's
    assert len({piece.tobytes() for piece in embeddings}) == len(embeddings), "nothing is repeated"


@pytest.mark.parametrize("kind", [peer for peer in PEERS if peer.needs == "torch"])
def test_peers_give_the_values_back(kind):
    x = np.random.default_rng(0).standard_normal(1003, dtype=np.float32)
    peer = kind()
    coded = peer.encode(x)
    y = peer.decode(coded, x.size)
    assert y.shape == x.shape
    assert y.dtype == np.float32
    limit = {"cast": 3e-3, "sparse": 0.97, "integer": 0.01}[kind.family]
    found = measure.errors(x, y).l2
    assert found < (0.65 if "sign" in kind.name else limit)
    assert peer.nbytes(coded) < x.nbytes


def test_promises_hold_here():
    x = data.gaussian(100_000)
    for entry in specs.ENTRIES:
        subject = measure.Ours(entry.codec(), x.values)
        measure.quality(subject)
        measure.check_promise(entry, x, subject)
        assert hc.get_codec(entry.spec) == entry.codec()


def test_on_a_device(tmp_path):
    """The GPU's benchmark and its table, on the emulation: every check it makes, and no speed worth a look."""
    out = tmp_path / "gpu.json"
    codecs = "bf16;int8;topk:ratio=0.01;powersgd:rank=4"
    run("--device", "emulation", "--quick", "--codec", codecs, "--json", str(out))
    record = json.loads(out.read_text())
    assert [row["name"] for row in record["rows"]] == codecs.split(";")
    for row in record["rows"]:
        for operation in measure.OPERATIONS:
            found = row[operation]
            assert found["of_floor"] == pytest.approx(found["floor_seconds"] / found["seconds"])
    asked = {(row["name"], row["operation"]) for row in record["asked"]}
    assert asked == {("int8", "encode"), ("int8", "decode_add"), ("topk:ratio=0.01", "encode")}
    run(str(tmp_path), script="pages/gpu_table.py")
    page = (tmp_path / "gpu.md").read_text()
    assert "A bucket of the DDP hook" not in page
    assert all(f"| `{name}` |" in page for name in codecs.split(";"))

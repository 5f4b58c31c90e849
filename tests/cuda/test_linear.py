"""``lattice``, ``randomblock``, ``sketch`` and ``powersgd`` on a device: messages, reductions, error feedback."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp import wire
from hybridcomp.arrays import DType, Flat, as_dtype, flatten
from hybridcomp.codecs import LinearCodec
from hybridcomp.codecs.device.linear import base
from hybridcomp.codecs.linear.base import Reduced, Round, reduce_all
from hybridcomp.codecs.linear.powersgd_start import initial_q
from hybridcomp.device import DeviceArray, Queue
from tests.codecs.common import FLOATS, relative_error
from tests.cuda import common

LATTICE = [
    "lattice",
    "lattice:bits=8:rounding=stochastic:seed=77",
    "lattice:bits=16:rounding=stochastic:seed=5",
    "lattice:bits=16:ranks=7",
    "lattice:bits=32:ranks=3",
    "lattice:bits=32:rounding=stochastic",
]
BLOCKS = [
    "randomblock:ratio=0.05",
    "randomblock:ratio=0.7,seed=3",
    "randomblock:ratio=0.4,values=bf16",
    "randomblock:ratio=0.7,seed=3,values=(int8:block=64)",
    "randomblock:ratio=0.6,values=(int4:hadamard=true:block=64)",
]
SKETCHES = ["sketch", "sketch:load=0.5:lanes=64:form=packed"]


# -- messages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", [*LATTICE, *BLOCKS, *SKETCHES])
def test_bytes_are_the_cpus(spec: str, dtype: str) -> None:
    codec = hc.get_codec(spec)
    for n in common.SIZES:
        common.check(codec, common.values("gaussian", n, dtype), dtype, outputs=n in (9, 1000))
    for kind in common.VALUES:
        common.check(codec, common.values(kind, 700, dtype), dtype, outputs=kind in ("sparse", "not finite"))


@pytest.mark.parametrize("dtype", FLOATS)
def test_sketch_across_tiles(dtype: str) -> None:
    codec = hc.get_codec("sketch")
    for n in (16383, 16384, 16385, 40_000):
        common.check(codec, common.values("sparse", n, dtype), dtype, outputs=n == 16385)
    half = common.values("sparse", 20_000, dtype)
    half[:18_000] = 0  # a tile of zeros alone
    common.check(codec, half, dtype, outputs=False)


@pytest.mark.parametrize(("spec", "n"), [("lattice:bits=16", 140_001), ("sketch", 300_001)])
def test_grids_that_stride(spec: str, n: int) -> None:
    """There are more elements than a grid of the emulation has at a time."""
    common.check(hc.get_codec(spec), common.values("sparse", n, "float32"), "float32", outputs=False)


def test_sketch_at_the_border_of_its_forms() -> None:
    for zeros in (3, 4, 5, 6):  # 128 elements: the bitmap has four elements' bytes
        x = np.ones(128, np.float32)
        x[:zeros] = 0
        common.check(hc.get_codec("sketch"), x, "float32", outputs=False)
        common.check(hc.get_codec("sketch"), x.astype(np.float64), "float64", outputs=False)


@pytest.mark.parametrize("spec", ["lattice", "lattice:bits=32", *BLOCKS[1:], *SKETCHES])
def test_unaligned_and_hostile(spec: str) -> None:
    codec = hc.get_codec(spec)
    common.check_unaligned(codec, 333)
    common.check_hostile(codec, common.values("sparse", 277, "float32"), "float32", flips=60)


def test_randomblock_says_where_the_rest_overflows() -> None:
    codec = hc.get_codec("randomblock:ratio=0.1,seed=4")
    x = common.values("gaussian", 500, "float32")
    for at in range(0, 500, 97):
        bad = x.copy()
        bad[at] = np.inf
        common.check(codec, bad, "float32", outputs=False)


def test_randomblock_of_a_damaged_message_of_values() -> None:
    codec = hc.get_codec("randomblock:ratio=0.3,seed=4")
    msg = np.array(codec.encode(common.values("gaussian", 500, "float32")))
    for byte in range(32 + 24, 32 + 24 + 40):
        bad = msg.copy()
        bad[byte] ^= 1
        crc = wire.native.kernels().message_crc(bad)
        bad[28:32] = np.frombuffer(int(crc).to_bytes(4, "little"), np.uint8)
        out = common.to_device(np.full(500, 3, np.float32))
        with pytest.raises(hc.WireError):
            hc.decode(common.to_device(bad), out=out)


# -- powersgd --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape", [(0,), (0, 5), (1,), (7,), (1000,), (40, 50), (3, 300), (270, 4), (9, 6, 7)]
)
def test_powersgd_has_the_cpus_layout(shape: tuple[int, ...], dtype: str) -> None:
    codec = hc.get_codec("powersgd:rank=3,seed=2")
    storage = common.values("gaussian", int(np.prod(shape)), dtype).reshape(shape)
    kind = as_dtype(dtype)
    want = np.array(flatten(codec.encode(common.host_array(storage, dtype))).data)
    got = common.to_host(codec.encode(common.to_device(storage, kind)))
    assert got.size == want.size
    raw, header = wire.open_message(got)
    assert header == wire.open_message(want)[1]
    assert raw[32:56].tobytes() == want[32:56].tobytes()
    ours, theirs = np.zeros(storage.size, np.float32), np.zeros(storage.size, np.float32)
    hc.decode(got, out=ours)  # either side reads the other's
    hc.decode(want, out=theirs)
    if storage.size:
        assert np.abs(ours - theirs).max() <= 1e-4 * max(1.0, np.abs(theirs).max())
    for out_kind in (d for d in DType if d.is_float):
        expected = np.zeros(storage.size, out_kind.storage)
        hc.decode(want, out=common.host_array(expected, out_kind.label))
        out = common.to_device(np.full(storage.size, 7, out_kind.storage), out_kind)
        hc.decode(common.to_device(want), out=out)
        common.assert_same(common.to_host(out), expected, f"{shape} {dtype} into {out_kind.label}")
    acc = np.linspace(-1, 1, storage.size).astype(kind.accumulator.storage)
    total = common.to_device(acc)
    hc.decode_add(want, acc)
    hc.decode_add(common.to_device(want), total)
    common.assert_same(common.to_host(total), acc, f"{shape} {dtype} added")


@pytest.mark.parametrize(
    ("shape", "rank"), [((40, 300), 20), ((300, 33), 33), ((600, 70), 17), ((64, 64), 64)]
)
def test_powersgd_columns_are_orthonormal(shape: tuple[int, int], rank: int) -> None:
    x = common.values("gaussian", shape[0] * shape[1], "float32").reshape(shape)
    codec = hc.get_codec(f"powersgd:rank={rank}")
    msg = common.to_host(codec.encode(common.to_device(x)))
    p = msg[56 : 56 + 4 * shape[0] * rank].view(np.float32).reshape(shape[0], rank).astype(np.float64)
    np.testing.assert_allclose(p.T @ p, np.eye(rank), atol=2e-6)
    assert relative_error(hc.decode(np.array(codec.encode(x))), hc.decode(msg)) < 1e-4


def test_powersgd_of_dependent_columns_and_of_what_is_not_finite() -> None:
    codec = hc.get_codec("powersgd:rank=4")
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((60, 2)) @ rng.standard_normal((2, 50))).astype(np.float32)
    msg = common.to_host(codec.encode(common.to_device(x)))
    p = msg[56 : 56 + 4 * 60 * 4].view(np.float32).reshape(60, 4)
    assert not p[:, 2:].any()
    assert relative_error(x, hc.decode(msg)) < 1e-5
    x[3, 3] = np.nan
    msg = common.to_host(codec.encode(common.to_device(x)))
    assert np.isnan(hc.decode(msg)).all()
    words = msg[56:].view(np.uint32)
    nan = (words & 0x7FFFFFFF) > 0x7F800000
    assert nan.any()
    assert np.all(words[nan] == 0x7FC00000), "a message has one NaN"


def test_powersgd_starts_as_the_cpu_does() -> None:
    codec = hc.get_codec("powersgd:rank=3,seed=9")
    x = np.eye(120, dtype=np.float32)  # P is Q's start
    steps = codec.reduction(flatten(common.to_device(x), device=True), ranks=1)
    first = next(steps)
    first.wait()
    np.testing.assert_array_equal(first.array, initial_q(120, 3, 9))
    steps.close()


def test_powersgd_hostile() -> None:
    codec = hc.get_codec("powersgd:rank=2")
    common.check_hostile(codec, common.values("gaussian", 90, "float32"), "float32", flips=60)


# -- reductions ------------------------------------------------------------------------------------------------

EXACT = [
    ("lattice", 3),
    ("lattice:bits=16:rounding=stochastic:seed=3", 2),
    ("lattice:bits=32", 3),
    ("randomblock:ratio=0.3,seed=5", 3),
    ("randomblock:ratio=0.9", 2),
    ("sketch", 3),
    ("sketch:form=packed", 2),
    ("sketch:lanes=1:load=1.0", 2),
    ("sketch:index=bloom:density=0.2:fpr=0.05", 3),
]


def _host(result: Reduced) -> tuple[Any, Any]:
    """Return total and own in host memory."""
    found = []
    for array in (result.total, result.own):
        assert isinstance(array, DeviceArray)
        found.append(Queue(array.runtime, 0).read(array))
    return found[0], found[1]


def _parts(kind: str, n: int, dtype: str, ranks: int) -> list[Any]:
    return [common.values(kind, n, dtype, seed=rank) for rank in range(ranks)]


def _check_reduction(spec: str, parts: list[Any], dtype: str, *, mean: bool) -> None:
    kind = as_dtype(dtype)
    with np.errstate(all="ignore"):
        want = reduce_all(spec, [common.host_array(p, dtype) for p in parts], mean=mean, step=3)
        got = reduce_all(spec, [common.to_device(p, kind) for p in parts], mean=mean, step=3)
    for one, other in zip(got, want, strict=True):
        total, own = _host(one)
        common.assert_same(total, other.total, f"{spec}: total of {other.total.size} {dtype}")
        common.assert_same(own, other.own, f"{spec}: own of {other.total.size} {dtype}")
        assert one.recovered == other.recovered


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("spec", "ranks"), EXACT)
def test_reductions_are_the_cpus(spec: str, ranks: int, dtype: str) -> None:
    for n in (0, 1, 65, 3000):
        _check_reduction(spec, _parts("sparse", n, dtype, ranks), dtype, mean=n == 65)
    for kind in ("gaussian", "tiny", "not finite", "zeros"):
        _check_reduction(spec, _parts(kind, 500, dtype, ranks), dtype, mean=kind == "gaussian")


def test_a_sketch_of_several_parts_in_all_forms() -> None:
    n = (1 << 18) + 5000
    parts = [np.zeros(n, np.float32) for _ in range(2)]
    rng = np.random.default_rng(8)
    for part in parts:
        at = rng.integers(0, 1 << 18, 3000)
        part[at] = rng.standard_normal(3000)
        part[1 << 18 :] = rng.standard_normal(5000)
    for spec in ("sketch", "sketch:form=packed", "sketch:index=bloom", "sketch:index=bloom:fpr=0.3"):
        _check_reduction(spec, parts, "float32", mean=True)


def test_ranks_on_devices_and_on_hosts_go_together() -> None:
    for spec in ("lattice", "randomblock:ratio=0.3", "sketch", "sketch:index=bloom", "powersgd:rank=2"):
        x = [common.values("sparse", 900, "float32", seed=r).reshape(30, 30) for r in range(2)]
        on_device, on_host = reduce_all(spec, [common.to_device(x[0]), x[1]])
        total, _ = _host(on_device)
        common.assert_same(total, on_host.total, spec)


def test_a_reduction_that_is_dropped_or_cannot_be() -> None:
    x = flatten(common.to_device(np.ones(100, np.float32)), device=True)
    codec = hc.get_codec("lattice")
    assert isinstance(codec, LinearCodec)
    steps = codec.reduction(x, ranks=2)
    next(steps)
    steps.close()
    with pytest.raises(ValueError, match="cannot hold the sum"):
        next(codec.reduction(x, ranks=1000))


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_powersgd_reduces_as_the_cpu_about(dtype: str, mean: bool) -> None:
    shape = (40, 30)
    parts = [p.reshape(shape) for p in _parts("gaussian", 1200, dtype, 3)]
    kind = as_dtype(dtype)
    warm: list[dict[str, Any]] = [{}, {}, {}]
    cold: list[dict[str, Any]] = [{}, {}, {}]
    for _ in range(2):
        want = reduce_all(
            "powersgd:rank=3", [common.host_array(p, dtype) for p in parts], mean=mean, warm=cold, name="w"
        )
        got = reduce_all(
            "powersgd:rank=3", [common.to_device(p, kind) for p in parts], mean=mean, warm=warm, name="w"
        )
    assert warm[0]["w"].shape == (30, 3)
    totals = [_host(result) for result in got]
    assert totals[0][0].tobytes() == totals[2][0].tobytes()
    for (total, own), other in zip(totals, want, strict=True):
        np.testing.assert_allclose(total, other.total, atol=2e-4)
        np.testing.assert_allclose(own, other.own, atol=2e-4)


# -- error feedback --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_error_feedback(dtype: str) -> None:
    kind = as_dtype(dtype)
    codec = hc.get_codec("lattice")
    assert isinstance(codec, LinearCodec)
    queue = Queue(common.runtime(), 0)
    host = np.zeros(300, kind.accumulator.storage)
    residual = flatten(common.to_device(host), device=True).data
    for step, name in enumerate(("gaussian", "mixed", "not finite", "gaussian")):
        x = common.values(name, 300, dtype, seed=step)
        given = base.corrected(queue, flatten(common.to_device(x, kind), device=True), residual)
        wide = flatten(common.host_array(x, dtype))
        corrected = np.zeros(300, kind.accumulator.storage)
        wire.native.kernels().convert(wide.data, kind, corrected, kind.accumulator, False)
        corrected += host
        want = reduce_all(codec, [corrected])[0]
        got = _run(codec.reduction(given, ranks=1))
        base.keep_lost(queue, given, got.own, residual)
        with np.errstate(invalid="ignore"):
            lost = corrected - want.own
        if np.isfinite(lost).all():
            host = lost
        common.assert_same(queue.read(residual), host, f"residual after {name}")


def _run(steps: Any) -> Reduced:
    """Run a reduction of one rank."""
    while True:
        try:
            following: Round = next(steps)
        except StopIteration as end:
            result: Reduced = end.value
            return result
        following.wait()


def test_widened_and_flat() -> None:
    queue = Queue(common.runtime(), 0)
    x = flatten(common.to_device(common.values("gaussian", 77, "float16")), device=True)
    assert isinstance(x, Flat)
    np.testing.assert_array_equal(
        queue.read(base.widened(queue, x)), common.values("gaussian", 77, "float16").astype(np.float32)
    )

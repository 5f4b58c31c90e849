"""``fp8``, ``mxfp8`` and ``mxfp4`` on a device."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.device import Queue
from tests.codecs.common import FLOATS, reseal
from tests.cuda import common

USUAL = ["fp8", "mxfp8", "mxfp8:e5m2", "mxfp4"]
# Blocks that go by chunks in registers, of part of a row and of several rows; by warps; by whole thread blocks.
BLOCKS = [32, 64, 256, 512, 1024, 8, 24, 200, 2048, 2056, 65536]
# Edges of a chunk, and messages whose codes begin at each address modulo 4, with whole chunks.
SIZES = [31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 2047, 2049, 2049 + 32, 2049 + 64, 2049 + 96, 3079]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", USUAL)
def test_bytes_are_the_cpus(spec: str, dtype: str) -> None:
    codec = hc.get_codec(spec)
    for n in sorted({*common.SIZES, *SIZES}):
        common.check(codec, common.values("mixed", n, dtype, seed=n), dtype, outputs=n in (129, 2081, 4097))
    for kind in common.VALUES:
        common.check(codec, common.values(kind, 1100, dtype), dtype, outputs=kind == "not finite")


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_every_block(form: str, block: int) -> None:
    codec = hc.get_codec(f"fp8:{form},block={block}")
    for i, n in enumerate([0, 1, 7, 200, 1024, 2049, 4099, 6150]):
        dtype = FLOATS[i % 4]
        common.check(codec, common.values("mixed", n, dtype, seed=n), dtype, outputs=n == 2049)
    for kind in common.VALUES:
        common.check(codec, common.values(kind, 2500, "float32"), "float32", outputs=False)


@pytest.mark.parametrize("spec", [*USUAL, "fp8:e5m2"])
def test_every_code(spec: str) -> None:
    """Rounding of every sixteenth of a code's distance, and the edges of what counts as zero."""
    codec = hc.get_codec(spec)
    patterns = np.arange(0x4000, dtype=np.uint32) << np.uint32(17)  # the upper 15 bits of positive floats
    finite = patterns[patterns < 0x7F800000]
    for nudge in (0, 1, -1):
        x = np.maximum(finite.astype(np.int64) + nudge, 0).astype(np.uint32).view(np.float32)
        rows = np.concatenate([x, -x])
        common.check(codec, rows, "float32", outputs=False)
    edges = np.array([0x12800000, 0x127FFFFF, 0x0D800000, 0x7F7FFFFF, 1, 0x7F800000], np.uint32)
    spread = np.zeros((edges.size, 128), np.uint32)
    spread[:, 5] = edges
    spread[:, 6] = edges // 2 | 0x80000000
    common.check(codec, spread.reshape(-1).view(np.float32), "float32", outputs=False)


@pytest.mark.parametrize("spec", [*USUAL, "fp8:e5m2,block=24"])
def test_every_payload_byte_is_read_as_the_cpu_does(spec: str) -> None:
    """Scales and codes that no encoder writes: infinities, NaN, negative and denormal numbers."""
    codec = hc.get_codec(spec)
    n = 2100
    msg = np.array(codec.encode(common.values("gaussian", n, "float32")))
    rng = np.random.default_rng(3)
    for _ in range(4):
        msg[40:] = rng.integers(0, 256, msg.size - 40, np.uint8)
        forged = reseal(msg)
        for kind in (np.float32, np.float64, np.float16):
            with np.errstate(all="ignore"):
                want = hc.decode(forged, out=np.zeros(n, kind))
            got = hc.decode(common.to_device(forged), out=common.to_device(np.zeros(n, kind)))
            common.assert_same(common.to_host(got), want, spec)


@pytest.mark.parametrize("spec", [*USUAL, "fp8:block=200", "fp8:block=2056"])
def test_any_grid_writes_the_same(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block strides over all of the array."""
    monkeypatch.setattr(Queue, "blocks", lambda self, items, per_block, waves=8: min(1, items))
    x = common.values("mixed", 20_100, "float32")
    common.check(hc.get_codec(spec), x, "float32", outputs=False)


@pytest.mark.parametrize("spec", [*USUAL, "fp8:block=200"])
def test_unaligned_and_hostile(spec: str) -> None:
    codec = hc.get_codec(spec)
    common.check_unaligned(codec, 3333)
    common.check_hostile(codec, common.values("gaussian", 77, "float32"), "float32")

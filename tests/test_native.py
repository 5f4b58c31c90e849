"""The extension module itself: CRC-32C, the choice of instruction set, argument checks, the GIL."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from hybridcomp import native
from hybridcomp.errors import NativeUnavailableError
from tests.codecs import common

kernels = native.kernels()
SIDCO = {"numerator": 1, "denominator": 2, "plain": 0}
INT8 = {"block": 8, "symmetric": True, "hadamard": False, "rounding": "nearest", "seed": 0}


@pytest.mark.parametrize("name", common.isas())
def test_crc32c_known_answers(name):
    """RFC 3720, appendix B.4."""
    with common.isa(name):
        assert kernels.crc32c(b"") == 0
        assert kernels.crc32c(b"123456789") == 0xE3069283
        assert kernels.crc32c(bytes(32)) == 0x8A9136AA
        assert kernels.crc32c(b"\xff" * 32) == 0x62A8AB43
        assert kernels.crc32c(bytes(range(32))) == 0x46DD794E
        assert kernels.crc32c(bytes(range(31, -1, -1))) == 0x113FDB5C


@pytest.mark.parametrize("name", common.isas())
def test_crc32c_chains_at_any_length_and_alignment(name):
    data = np.random.default_rng(0).integers(0, 256, 40000, np.uint8)
    with common.isa(common.isas()[-1]):  # the plainest
        whole = {n: kernels.crc32c(data[:n]) for n in (1, 7, 6143, 6144, 6145, 20000, 40000)}
    with common.isa(name):
        for n, expected in whole.items():
            assert kernels.crc32c(data[:n]) == expected
            for cut in {0, 1, n // 3, n // 2, n - 1, n}:
                assert kernels.crc32c(data[cut:n], kernels.crc32c(data[:cut])) == expected
        shifted = np.concatenate([np.zeros(5, np.uint8), data])[5:]
        assert kernels.crc32c(shifted) == whole[40000]


def test_isas():
    names = kernels.available_isas()
    assert names == [name for name in reversed(native.ISAS) if name in names]  # the best first
    assert "portable" in names or len(names) == 1  # unless the kernels are compiled for this processor alone
    for name in names:
        with common.isa(name):
            assert kernels.isa() == name
    with pytest.raises(ValueError, match="does not have"):
        kernels.set_isa("avx1024")
    with pytest.raises(NativeUnavailableError, match="this machine runs"):
        native.force_isa(kernels, "avx1024")


@pytest.mark.parametrize("name", [*common.isas(), "avx1024"])
def test_isa_from_the_environment(name):
    code = "from hybridcomp import native; print(native.kernels().isa())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env={**os.environ, "HYBRIDCOMP_ISA": name},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if name in common.isas():
        assert run.stdout.strip() == name
    else:
        assert run.returncode != 0
        assert "HYBRIDCOMP_ISA is 'avx1024'; allowed: portable, avx2 or avx512" in run.stderr


def test_arguments_are_checked():
    x, out = np.zeros(64, np.float32), np.zeros(1000, np.uint8)
    k = kernels
    int8 = k.encoder(3, 0, **INT8)
    for call, text in [
        (lambda: int8.encode(x, 9, out), "dtype code"),
        (lambda: int8.encode(x, 1, out[:135]), "too small"),
        (lambda: int8.encode(np.zeros(7, np.uint8), 1, out), "whole number"),
        (lambda: int8.bound(2**63, 1), "more than a message"),
        (lambda: k.encoder(10, 0, rate=0.75).encode(x, 1, out), "does not take"),
        (lambda: k.encoder(10, 0, rate=65), "rate must be"),
        (lambda: k.encoder(10, 0), "rate must be a number"),
        (lambda: k.encoder(3, 0, **{**INT8, "block": 12}), "block"),
        (lambda: k.encoder(3, 0, **{**INT8, "block": 4096, "hadamard": True}), "block"),
        (lambda: k.encoder(3, 0, **{**INT8, "symmetric": 1}), "symmetric must be true or false"),
        (lambda: k.encoder(6, 0, block=12), "block"),
        (lambda: k.encoder(6, 0, block=-8), "block is not a parameter"),
        (lambda: k.encoder(6, 0, block=None), "block is not a parameter"),
        (lambda: k.encoder(7, 0, format="e2m1", block=8), "format"),
        (lambda: k.encoder(7, 0, format=0, block=8), "format must be a word"),
        (lambda: k.encoder(11, 0, rel=0.0), "above 0"),
        (lambda: k.encoder(11, 0, abs=np.nan), "above 0"),
        (lambda: k.encoder(13, 0, lag=33), "lag must be from 1 to 32"),
        (lambda: k.encoder(16, 0, numerator=3, denominator=2, plain=0), "at most 1"),
        (lambda: k.encoder(16, 0, numerator=0, denominator=0, plain=0), "denominator"),
        (lambda: k.encoder(18, 0, **SIDCO, stages=17, distribution=0), "stages must be"),
        (lambda: k.encoder(18, 0, **SIDCO, stages=1, distribution=2), "distribution must be"),
        (lambda: k.encoder(11, 0, abs=1.0, coder="zip"), "coder must be planes, lz or huffman"),
        (lambda: k.encoder(11, 0, abs=1.0, coder="lz", vector=1025), "vector must be"),
        (lambda: k.encoder(17, 0, rel=-1.0, plain=0), "negative"),
        (lambda: k.encoder(33, 0, bits=9, ranks=1, rounding="nearest", seed=0), "bits"),
        (lambda: k.encoder(33, 0, bits=8, ranks=128, rounding="nearest", seed=0), "ranks"),
        (lambda: k.encoder(12, 0), "no codec of the kernels has the id 12"),
        (lambda: k.check_head(3, b"", 136, 64, 9), "dtype code"),
        (lambda: k.check_head(0, b"", 136, 64, 16), "dtype code"),
        (lambda: k.check_head(0, b"", 136, 2**48 + 1, 9), "more than a message"),
        (lambda: k.check_payload(0, out, 2**48 + 1, 9), "more than a message"),
        (lambda: k.decode_payload(0, out, 64, 8, x, 1, False), "as it is"),
        (lambda: k.decode_payload(0, out, 64, 8, x, 8, True), "as it is"),
        (lambda: k.decode_payload(3, out, 63, 1, x, 1, False), "n elements"),
        (lambda: k.decode_payload(3, out, 64, 9, x, 1, False), "dtype code"),
        (lambda: k.decode_payload(3, out, 128, 1, x, 3, True), "float32 or float64"),
        (lambda: k.decode_payload(3, out, 32, 1, x, 2, True), "doubles"),
        (lambda: k.convert(x, 1, out, 3, False), "as many"),
        (lambda: k.convert(x, 1, out[:128], 3, True), "float32 or float64"),
        (lambda: k.sparse_topk(x, 1, 65), "larger than"),
        (lambda: k.sparse_topk(x, 1, 4).write_indices(out[:11]), "indices"),
        (lambda: k.sparse_scatter(out, 64, 3, x, x, 1, False), "k elements"),
        (lambda: k.sparse_scatter(out, 63, 64, x, x, 1, False), "n elements"),
        (lambda: k.sparse_sum([], 63, 1, x), "n elements"),
        (lambda: k.lowrank_project(x, 8, 7, 1, x, x, False), "more than"),
        (lambda: k.lowrank_project(x, 2**40, 2**40, 1, x, x, False), "too large"),
        (lambda: k.lowrank_project(x, 8, 8, 2**60, x, x, False), "too large"),
        (lambda: k.lowrank_project(x, 8, 8, 9, x, x.copy(), False), "q must be"),
        (lambda: k.lowrank_project(x, 8, 8, 1, x[1:].view(np.uint8)[1:], x, False), "q must be"),
        (lambda: k.lowrank_reconstruct(x, x, 8, 8, 9, x.copy(), False), "p must be"),
        (lambda: k.lowrank_orthogonalize(x, 64, 2), "vectors must be"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
    read_only = x.copy()
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        k.convert(x, 1, read_only, 1, False)
    with pytest.raises(BufferError):
        k.convert(x, 1, bytes(256), 1, False)
    with pytest.raises(ValueError, match="contiguous"):
        k.crc32c(np.zeros((4, 4))[:, 1])
    with pytest.raises(TypeError):
        k.crc32c("text")
    with pytest.raises(TypeError):
        k.encoder(256, 0, **INT8)  # a codec's id is a byte


def test_the_gil_is_released():
    """While one thread selects and encodes, another goes on counting."""
    x = np.random.default_rng(0).standard_normal(1 << 23).astype(np.float32)
    out, ticks, stop = np.empty(x.nbytes, np.uint8), [], threading.Event()
    encoder = kernels.encoder(3, 0, **{**INT8, "block": 128})

    def count() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        time.sleep(0.05)
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.3:
            kernels.crc32c(x)
            encoder.encode(x, 1, out)
        end = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    assert sum(begin < t < end for t in ticks) > 20

"""Heads of payloads: devices check by them before their kernels start, and must say what the host says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp import native, wire
from hybridcomp.codecs import codec_for, own_names
from hybridcomp.codecs.kernel_codec import KernelCodec, check_head
from hybridcomp.errors import WireError
from tests.codecs import common

OTHER_CODEC = 8  # a Status
HEAD = 32
SPECS = [spec for spec in common.SPECS if isinstance(hc.get_codec(spec), KernelCodec)]


def verdict(check, *args) -> str | None:
    """Return what a check finds wrong, or None."""
    try:
        check(*args)
    except WireError as error:
        return str(error)
    return None


def test_the_kernels_know_all_codecs_that_say_so():
    for name in own_names():
        codec = hc.get_codec(name)
        known = native.kernels().check_head(codec.wire_id, b"", 0, 0, 1) != OTHER_CODEC
        assert known == isinstance(codec, KernelCodec), name


@pytest.mark.parametrize("spec", SPECS)
def test_the_head_says_what_the_host_says(spec):
    codec = hc.get_codec(spec)
    rng = np.random.default_rng(7)
    refused = 0
    for dtype in (np.float32, np.float64, np.float16, np.uint8, np.complex128):
        for n in (0, 1, 63, 1025, 3000):
            x = rng.integers(0, 100, n).astype(dtype)
            if codec.can_carry(hc.arrays.as_dtype(dtype), x.shape) is not None:
                continue
            message = codec.encode(x)
            header = wire.peek(message)
            payload = message[wire.HEADER_BYTES :]
            check_head(header, payload[:HEAD].tobytes())
            for _ in range(60):
                data, lie = payload.copy(), header
                kind = rng.integers(0, 4)
                if kind == 0 and data.size:
                    data[rng.integers(0, min(data.size, 24))] = rng.integers(0, 256)
                elif kind == 1:
                    data = data[: rng.integers(0, data.size + 1)]
                elif kind == 2:
                    data = np.concatenate([data, np.zeros(rng.integers(1, 200), np.uint8)])
                else:
                    count = int(rng.choice([n + 1, max(n - 1, 0), 8 * n + 8, 2**40, wire.MAX_COUNT]))
                    lie = dataclasses.replace(lie, count=count)
                lie = dataclasses.replace(lie, payload=data.size)
                msg = np.concatenate([message[: wire.HEADER_BYTES], data])
                by_head = verdict(check_head, lie, data[:HEAD].tobytes())
                by_all = verdict(codec_for(lie).check_payload, msg, lie)
                refused += by_head is not None
                if by_head is not None or codec.fixed_size:
                    assert by_head == by_all
    assert refused > 100


def test_a_head_of_what_is_no_float():
    header = wire.peek(hc.get_codec("int8").encode(np.ones(64, np.float32)))
    with pytest.raises(WireError, match="malformed int8 message: dtype int32 is not floating-point"):
        check_head(dataclasses.replace(header, dtype=hc.arrays.DType.INT32), b"")

"""Sums of several messages in one pass: the bits of one addition after the other."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp import wire
from hybridcomp.arrays import as_dtype, flatten
from hybridcomp.codecs.device import driver_of
from hybridcomp.device import Queue
from tests.codecs.common import FLOATS, accumulator
from tests.cuda import common

SPECS = ["sign", "sign:block=24", "fp8", "fp8:e5m2,block=200", "mxfp8", "mxfp8:e5m2", "mxfp4"]
CASTS = ["none", "fp16", "bf16"]


def check(specs: list[str], n: int, dtypes: list[str], *, offset: int = 0) -> None:
    acc = accumulator(as_dtype(dtypes[0]), n)
    total = common.to_device(acc, offset=offset)
    messages = [
        np.array(flatten(hc.get_codec(spec).encode(common.host_array(storage, dtype))).data)
        for i, (spec, dtype) in enumerate(zip(specs, dtypes, strict=True))
        for storage in [common.values("mixed", n, dtype, seed=i)]
    ]
    with np.errstate(all="ignore"):
        for message in messages:
            hc.decode_add(message, acc)
    headers = [wire.peek(message, message.size) for message in messages]
    on_device = [flatten(common.to_device(message), device=True).data for message in messages]
    driver, out = driver_of(headers[0].codec), flatten(total, device=True).data
    driver.decode_sum(
        headers,
        [message[32:].tobytes()[:64] for message in messages],
        [message[32:] for message in on_device],
        out,
        headers[0].dtype.accumulator,
        Queue(common.runtime(), 0),
    )
    common.assert_same(common.to_host(total), acc, f"{specs} of {n} {dtypes}")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", SPECS + CASTS)
def test_sums(spec: str, dtype: str) -> None:
    # Codes of mxfp8 begin at each address modulo 4, and end just after a whole chunk; eight messages are one pass.
    sizes = [0, 1, 255, 256, 257, 512, 515, 1024, 1024 + 32, 1024 + 64, 1024 + 96, 2100]
    for n, peers in zip(sizes, [1, 2, 3, 8, 7, 5, 9, 4, 2, 3, 6, 17], strict=True):
        check([spec] * peers, n, [dtype] * peers)


@pytest.mark.parametrize("spec", SPECS + CASTS)
def test_unaligned_and_of_several_types(spec: str) -> None:
    check([spec] * 3, 1000, ["float32", "bfloat16", "float16"], offset=4)
    check([spec] * 2, 1000, ["float64", "float64"], offset=8)


def test_unlike_messages() -> None:
    check(["sign:block=64", "sign:block=128"], 1000, ["float32"] * 2)
    check(["fp8", "fp8:e5m2"], 1000, ["float16"] * 2)
    check(["none"] * 2, 1000, ["float16", "bfloat16"])


@pytest.mark.parametrize("spec", ["fp8", "none"])
def test_damage_stops_a_sum(spec: str) -> None:
    """Nothing is added once the queue's status is set."""
    x = common.values("gaussian", 700, "float32")
    message = hc.get_codec(spec).encode(x)
    total = common.to_device(np.ones(700, np.float32))
    queue = Queue(common.runtime(), 0)
    queue.write(queue.status, np.array([1], np.uint32))
    header = wire.peek(message, message.size)
    payload = flatten(common.to_device(message), device=True).data[32:]
    out = flatten(total, device=True).data
    driver_of(header.codec).decode_sum(
        [header] * 2, [message[32:].tobytes()] * 2, [payload] * 2, out, header.dtype, queue
    )
    assert np.all(common.to_host(total) == 1)


@pytest.mark.parametrize("spec", SPECS)
def test_the_host_knows_the_prefix(spec: str) -> None:
    codec = hc.get_codec(spec)
    driver = driver_of(codec.wire_id)
    assert driver.head(codec) == codec.encode(np.ones(5, np.float32))[32:40].tobytes()

"""Target of every fuzzer: any bytes through every decoder.

The CRC would turn nearly every mutation away at the door; a sender who means harm computes it. So
:func:`without_crc` opens it, here only, for outer messages and for those inside.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import hybridcomp as hc
from hybridcomp import arrays, native, wire
from hybridcomp.codecs import Codec, codec_for
from hybridcomp.collectives.data_path import framing

GOLDEN = Path(__file__).parents[1] / "golden" / "messages.json"
FENCE = 64
MOST = 1 << 12  # elements that are decoded; larger counts are checked only
RECEIVED = 1 << 16  # bytes of a message whose receiver knows nothing of it, and of its elements
#: Codecs whose messages have parts: blocks of 65,536 indices, chunks of 131,072 words, shares of several threads.
IN_PARTS = (
    *(
        "topk:ratio=0.01",
        "topk:ratio=0.3",
        "threshold:rel=2",
        "sidco:ratio=0.02",
        "topk:ratio=0.02,values=int8",
    ),
    *(
        "topk:ratio=0.05,values=(bounded:abs=1e-3)",
        "lossless",
        "mpc",
        "sketch",
        "bounded:abs=1e-2",
        "bounded:abs=1e-2,coder=lz",
        "bounded:abs=1e-2,coder=huffman",
        "zfp:rate=4",
    ),
    *("int4", "sign", "fp8", "mxfp4"),
)
LARGE = (70_000, 131_073, 196_609, 300_000)  # elements


@contextlib.contextmanager
def without_crc() -> Iterator[None]:
    """Open messages whatever their CRC says."""

    def open_message(msg: Any) -> tuple[arrays.ByteArray, wire.Header]:
        raw = np.frombuffer(msg, np.uint8) if isinstance(msg, bytes) else np.asarray(msg)
        header = wire.peek(raw)
        return raw[: wire.HEADER_BYTES + header.payload], header

    checked = wire.open_message
    wire.open_message = open_message  # type: ignore[assignment]
    try:
        yield
    finally:
        wire.open_message = checked


def one_input(data: bytes, most: int = MOST) -> bool:
    """Decode ``data`` in every way, if it has at most so many elements; return whether it was taken for a message.

    Only :class:`hybridcomp.WireError` may refuse it, and nothing outside the outputs may be written.
    """
    received(data)
    try:
        raw, header = wire.open_message(data)
        codec = codec_for(header)
        codec.check_payload(raw, header)
        if header.count > most:
            return True
        n = header.count
        values = hc.decode(data)
        assert values.shape == (n,)
        assert values.dtype.itemsize == header.dtype.itemsize
        if not header.dtype.is_float:
            return True
        kind = header.dtype.accumulator.storage
        fenced = np.zeros(n + 2 * FENCE, kind)
        hc.decode(data, out=fenced[FENCE : FENCE + n])
        short = in_one_call(raw, header, fenced)
        hc.decode_add(data, fenced[FENCE : FENCE + n])
        halves = np.zeros(n + 2 * FENCE, np.float16)
        hc.decode(data, out=halves[FENCE : FENCE + n])
        summed = together(hc.get_codec(codec.name), data, header)
        for ends in (fenced, halves, short, summed):
            assert not ends[:FENCE].any()
            assert not ends[FENCE + n :].any()
    except hc.WireError:
        return False
    return True


def received(data: bytes) -> None:
    """Decode a received message that describes itself, as ``Recv_array`` does; between fences."""
    fenced = np.zeros(0, np.uint8)

    def keep(dtype: arrays.DType, n: int) -> np.ndarray[Any, Any]:
        nonlocal fenced
        fenced = np.zeros(n * dtype.itemsize + 2 * FENCE, np.uint8)
        return fenced[FENCE : fenced.size - FENCE].view(dtype.storage)

    with contextlib.suppress(hc.WireError, hc.MismatchError):
        framing.decode_array(np.frombuffer(data, np.uint8), keep, RECEIVED, "rank 0 sent")
    assert not fenced[:FENCE].any()
    assert not fenced[-FENCE:].any()


def in_one_call(
    raw: arrays.ByteArray, header: wire.Header, expected: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Decode as plain arrays are, with the CRC that a hostile sender would give; between fences."""
    sealed = np.array(raw)
    fields = {"dtype": header.dtype, "count": header.count, "payload": header.payload}
    wire.seal(sealed, header.codec, header.params, **fields)
    fenced = np.zeros_like(expected)
    if native.kernels().decode_plain(sealed, fenced[FENCE:-FENCE], False):
        assert fenced.tobytes() == expected.tobytes()
    return fenced


def together(codec: Codec, data: bytes, header: wire.Header) -> np.ndarray[Any, Any]:
    """Add the message twice, in one pass where that is possible; between fences."""
    kind = header.dtype.accumulator.storage
    own = np.zeros(header.count, kind)
    raw = np.frombuffer(data, np.uint8)
    fenced = np.zeros(header.count + 2 * FENCE, kind)
    if codec.refuses(arrays.flatten(own)) is None:
        dtype = header.dtype.accumulator
        bound = codec.bound(header.count, dtype)
        message = np.zeros(bound + 2 * FENCE, np.uint8)
        codec.sum_encode(arrays.flatten(own), [raw, raw], 1, dtype, message[FENCE:-FENCE])
        assert not message[:FENCE].any()
        assert not message[FENCE + bound :].any()
    codec.sum_into(arrays.flatten(own), [raw, raw], 2, fenced[FENCE:-FENCE], stream=True)
    for other in (np.float32, np.float64):  # of another type it may be refused
        mine = np.zeros(header.count, other)
        with contextlib.suppress(hc.WireError):
            codec.sum_into(arrays.flatten(mine), [raw], 1, mine)
        with contextlib.suppress(hc.WireError):
            codec.decode_many([raw], [mine], arrays.as_dtype(other))
    codec.decode_many([raw], [own], header.dtype.accumulator, stream=True)
    return fenced


def seeds() -> list[bytes]:
    """Return the golden messages, one of every codec, dtype and small count."""
    return [bytes.fromhex(entry["message"]) for entry in json.loads(GOLDEN.read_text()).values()]


def large_seeds() -> list[bytes]:
    """Return messages of parts: of every codec of :data:`IN_PARTS`, size and float type that it takes."""
    found, rng = [], np.random.default_rng(1)
    for i, n in enumerate(LARGE):
        x = rng.standard_normal(n)
        x[rng.random(n) < 0.5] = 0  # and zeros for codecs that count them
        for spec in IN_PARTS:
            codec = hc.get_codec(spec)
            values = x.astype(("float32", "float16", "float32", "float64")[i])
            if codec.refuses(arrays.flatten(values)) is None:
                found.append(bytes(codec.encode(values)))
    return found

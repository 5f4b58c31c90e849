"""The message header."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp import wire
from hybridcomp.arrays import DType
from tests.codecs.common import reseal

PAYLOAD = b"some payload bytes"


def sealed() -> np.ndarray:
    out = np.zeros(32 + len(PAYLOAD), np.uint8)
    out[32:] = np.frombuffer(PAYLOAD, np.uint8)
    size = wire.seal(out, 7, 0xDEADBEEF, dtype=DType.BFLOAT16, count=123, payload=len(PAYLOAD))
    assert size == out.size
    return out


def test_layout():
    fields = struct.unpack("<4sBBHQQII", sealed()[:32].tobytes())
    assert fields[:7] == (b"HYC\x01", 7, 4, 0, 123, len(PAYLOAD), 0xDEADBEEF)


def test_round_trip():
    raw, header = wire.open_message(sealed())
    assert header == wire.Header(
        codec=7, dtype=DType.BFLOAT16, count=123, payload=len(PAYLOAD), params=0xDEADBEEF
    )
    assert raw[32:].tobytes() == PAYLOAD
    raw, _ = wire.open_message(np.concatenate([sealed(), np.zeros(99, np.uint8)]))
    assert raw.size == 32 + len(PAYLOAD), "what follows the payload is not part of the message"


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        (0, b"XYC\x01", "not a hybridcomp message"),
        (0, b"HYC\x02", "of version 1"),
        (5, b"\x00", "unknown dtype code 0"),
        (5, b"\xff", "unknown dtype code 255"),
        (6, b"\x01", "reserved flag bits"),
        (7, b"\x80", "reserved flag bits"),
        (8, (2**48 + 1).to_bytes(8, "little"), "element count"),
        (16, (len(PAYLOAD) + 1).to_bytes(8, "little"), "payload of"),
        (16, (2**64 - 1).to_bytes(8, "little"), "payload of"),
    ],
)
def test_bad_headers(at, value, text):
    msg = sealed()
    msg[at : at + len(value)] = np.frombuffer(value, np.uint8)
    for form in (msg, reseal(msg.copy())):
        with pytest.raises(hc.WireError, match=text):
            wire.open_message(form)


def test_every_flipped_bit_is_found():
    for bit in range(sealed().size * 8):
        msg = sealed()
        msg[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(hc.WireError):
            wire.open_message(msg)


def test_every_truncation_is_found():
    for size in range(sealed().size):
        with pytest.raises(hc.WireError):
            wire.open_message(sealed()[:size])


def test_only_bytes_are_messages():
    with pytest.raises(hc.WireError, match="uint8, not float32"):
        wire.open_message(np.zeros(100, np.float32))


def test_peek_does_not_read_the_payload():
    msg = sealed()
    msg[40] ^= 1
    assert wire.peek(msg).count == 123

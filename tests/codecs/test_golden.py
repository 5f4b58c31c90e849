"""Messages that earlier versions wrote: they still decode, and are still what is written."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.arrays import DType
from hybridcomp.codecs import own_names
from hybridcomp.testing import check_golden
from tests.codecs import common
from tests.golden import make


def test_every_codec_has_golden_messages_of_its_defaults():
    """By these the headers hold its wire id, and the hash of its default spec."""
    assert set(own_names()) <= set(make.SPECS), "python -m tests.golden.make adds them"


@pytest.mark.parametrize("name", common.isas())
@pytest.mark.parametrize("spec", make.SPECS)
def test_golden_messages(spec, name):
    with common.isa(name):
        check_golden(spec, make.GOLDEN)


def test_one_message_by_hand():
    """An int8 message spelled out, so that the format does not hang on our own code alone."""
    x = np.array([127, -127, 1, 0, 64, -2, 3, 5, 254], np.float32)
    header = b"HYC\x01" + bytes([3, 1, 0, 0]) + (9).to_bytes(8, "little") + (25).to_bytes(8, "little")
    payload = (8).to_bytes(4, "little") + bytes(4) + np.array([1, 2], np.float32).tobytes()
    payload += np.array([127, -127, 1, 0, 64, -2, 3, 5, 127], np.int8).tobytes()
    params = crc32c(b"int8:block=8").to_bytes(4, "little")
    crc = crc32c(header + params + payload).to_bytes(4, "little")
    assert hc.get_codec("int8:block=8").encode(x).tobytes() == header + params + crc + payload
    assert DType.FLOAT32 == 1


def crc32c(data: bytes) -> int:
    """Return the CRC-32C, bit by bit (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF

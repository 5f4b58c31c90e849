"""Messages of few bytes that decode to many values take the caller's word for it."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.codecs import checks
from tests.cuda.common import to_device, to_host

SPECS = ["threshold:abs=1", "lossless", "sketch", "powersgd:rank=1"]
N = 100_000


def message(spec: str) -> np.ndarray:
    return hc.get_codec(spec).encode(np.zeros((N // 1_000, 1_000), np.float32))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_no_more_than_is_allowed(spec, device):
    msg = message(spec)
    given = to_device(msg) if device else msg
    for decode in (hc.decode, hc.get_codec(spec).decode):
        with pytest.raises(hc.WireError, match=rf"{N} float32, {4 * N} bytes, more than the {4 * N - 1} "):
            decode(given, max_bytes=4 * N - 1)
        assert decode(given, max_bytes=4 * N).shape == (N,)
        assert decode(given).shape == (N,)  # little in all
    out = np.ones(N, np.float32)
    target = to_device(out) if device else out
    hc.decode(given, out=target, max_bytes=1)  # a caller that gives an array has the memory
    assert not (to_host(target) if device else target).any()


@pytest.mark.parametrize("spec", SPECS)
def test_by_default_as_many_times_as_a_message_has_bytes(spec, monkeypatch):
    msg = message(spec)
    assert 4 * N // len(msg) > 30
    monkeypatch.setattr(checks, "_FREE_BYTES", 0)
    monkeypatch.setattr(checks, "_MOST_TIMES", 4 * N // len(msg))
    with pytest.raises(hc.WireError, match="give max_bytes=, or an array as out="):
        hc.decode(msg)
    monkeypatch.setattr(checks, "_MOST_TIMES", 4 * N // len(msg) + 1)
    assert len(hc.decode(msg)) == N

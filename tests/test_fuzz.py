"""A short run of the fuzzer on whatever kernels are installed; `make fuzz-smoke` has the sanitizers."""

from __future__ import annotations

import pytest

from tests.fuzz import smoke, target


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_mutated_messages(seed):
    done, taken = smoke.run(6000, seed)
    assert done == 6000
    assert 200 < taken < done  # mutations go deep, and not all of them pass


def test_the_target_takes_every_golden_message():
    for message in target.seeds():
        assert target.one_input(message)
        assert not target.one_input(message[:-1] + bytes([message[-1] ^ 1]))


def test_the_target_sees_wrong_exceptions(monkeypatch):
    from hybridcomp.codecs import NoneCodec

    def broken(*_):
        raise IndexError("not a WireError")

    monkeypatch.setattr(NoneCodec, "decode_flat", broken)
    with pytest.raises(IndexError):
        target.one_input(target.seeds()[1])

"""A short run of the fuzzer on whatever kernels are installed; `make fuzz-smoke` has the sanitizers."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.collectives.transport.arena import address
from hybridcomp.collectives.transport.shared_memory import SharedMemoryPeers, own_pool
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


def test_mutated_descriptors_of_shared_messages():
    """A descriptor names a block inside an arena that this rank knows, or is refused."""
    pool = own_pool()
    assert pool is not None
    peers = SharedMemoryPeers(pool, {})
    buffer = pool.take(5000)
    codec = hc.get_codec("int8")
    message = codec.encode(np.ones(3000, np.float32), out=buffer)
    honest = peers.publish(message, 1)
    assert honest is not None
    assert hc.decode(peers.read(honest)).size == 3000
    rng, kinds = np.random.default_rng(1), Counter()
    start, end = pool.arena.start, pool.arena.start + pool.arena.handle.nbytes
    for _ in range(20_000):
        data = smoke.mutate(honest.tobytes(), rng, [honest.tobytes()])[:32].ljust(32, b"\0")
        try:
            found = peers.read(np.frombuffer(data, np.uint8))
        except hc.WireError:
            kinds["refused"] += 1
            continue
        if found is None:
            kinds["no descriptor"] += 1
            continue
        kinds["a block"] += 1
        at = address(found)
        assert start <= at <= at + found.size <= end
        with contextlib.suppress(hc.WireError):  # what is there need not be a message
            hc.decode(found, max_bytes=1 << 20)
    assert min(kinds[kind] for kind in ("refused", "no descriptor", "a block")) > 500, kinds
    peers.release([message])

"""Threads of the kernels: their number is checked, and messages do not depend on it."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from tests.codecs import common


@pytest.fixture(autouse=True)
def one_thread():
    yield
    hc.set_num_threads(1)


def test_one_unless_set():
    assert hc.get_num_threads() == 1
    hc.set_num_threads(3)
    assert hc.get_num_threads() == 3


@pytest.mark.parametrize("count", [0, -1, 65, 1.5, True, "many"])
def test_counts_out_of_range(count):
    with pytest.raises(ValueError, match="threads must be an integer from 1 to 64"):
        hc.set_num_threads(count)


@pytest.mark.parametrize("spec", common.SPECS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_messages_do_not_depend_on_it(spec, dtype):
    codec = hc.get_codec(spec)
    x = common.gaussian((1 << 18) + 77, dtype)
    results = set()
    for count in (1, 2, 3, 64):
        hc.set_num_threads(count)
        msg = codec.encode(x)
        acc = np.ones(x.size, np.float32)
        hc.decode_add(msg, acc)
        results.add((msg.tobytes(), hc.decode(msg).tobytes(), acc.tobytes()))
    assert len(results) == 1

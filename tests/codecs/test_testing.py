"""The suite of hybridcomp.testing takes codecs of other packages, and finds what is wrong with them."""

from __future__ import annotations

import json

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.testing import CHECKS, check_codec, check_golden, write_golden
from tests.outside import EXAMPLE, POINTS, install, installed


@pytest.fixture
def ternary(tmp_path):
    """Have the example's codec; return its class."""
    with installed(EXAMPLE, install(tmp_path / "info", "hybridcomp-example", "1.0", POINTS)):
        yield type(hc.get_codec("example.ternary"))


def test_the_example_passes(ternary, tmp_path):
    write_golden(tmp_path / "messages.json", list(ternary.examples))
    for spec in ternary.examples:
        check_codec(spec, golden=tmp_path / "messages.json")
    with pytest.raises(AssertionError, match=r"there are no messages of example.ternary:block=8"):
        check_codec("example.ternary:block=8", golden=tmp_path / "messages.json")


def broken(cls):
    """Return faults by what the suite says of them: attributes of a subclass."""
    draws = iter(range(1 << 30))

    def unlike(self, values):
        payload = cls.pack(self, values)
        payload[4:5] = next(draws) % 256
        return payload

    def lenient(payload, n, dtype):
        return cls.check(payload[: cls(24).payload_bytes(n, dtype)], n, dtype)

    return {
        "'round_trips': AssertionError: the same input must": {"pack": unlike},
        "'round_trips'": {"payload_bytes": lambda self, n, dtype: cls.payload_bytes(self, n, dtype) + 1},
        "'non_finite'": {"pack": lambda self, values: cls.pack(self, np.nan_to_num(values))},
        "'hostile_bytes'": {"check": staticmethod(lenient)},
        "'config'": {"block": property(lambda self: self._block, lambda self, value: None)},
    }


@pytest.mark.parametrize("fault", range(5))
def test_faults_are_found(ternary, fault):
    said, attributes = list(broken(ternary).items())[fault]
    hc.register_codec(type("Broken", (ternary,), {**attributes, "name": "example.broken", "wire_id": 241}))
    with pytest.raises(AssertionError, match=said):
        check_codec("example.broken:block=24")


def test_a_changed_format_is_found(ternary, tmp_path):
    write_golden(tmp_path / "messages.json", ["example.ternary"])
    old = ternary.pack
    ternary.pack = lambda self, values: old(self, values * np.float32(1.0001))
    with pytest.raises(AssertionError, match=r"example.ternary float32 1: another message"):
        check_golden("example.ternary", json.loads((tmp_path / "messages.json").read_text()))


def test_every_check_has_a_name():
    assert list(CHECKS)[:2] == ["config", "round_trips"]

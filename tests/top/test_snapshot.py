"""The contents of a file are checked before they are believed."""

from __future__ import annotations

import json
import zlib

import pytest

from hybridcomp.steps import StepTotals
from hybridcomp.top.snapshot import MOST_BYTES, MOST_ENTRIES, TornError, from_bytes, to_bytes
from tests.top import flying, snapshot


def framed(body: bytes) -> bytes:
    return b"%08x %08d\n" % (zlib.crc32(body), len(body)) + body


def body() -> bytes:
    return to_bytes(snapshot()).partition(b"\n")[2]


def changed(**more: object) -> bytes:
    return framed(json.dumps(json.loads(body()) | more).encode())


def test_what_is_written_is_read() -> None:
    says = snapshot(
        in_flight=(flying(5.0, awaits=(1, 3)),),
        launcher="4711.0",
        unlisted=2,
        steps=StepTotals(9, 8, 1, 1.5, 0.5),
    )
    assert from_bytes(to_bytes(says)) == says


AXIS = {
    "axis": "dp",
    "calls": 1,
    "plain_bytes": 1,
    "wire_bytes": 1,
    "shared_bytes": 0,
    "between_bytes": 0,
    "encode_seconds": 0,
    "wire_seconds": 0,
    "decode_seconds": 0,
}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        body(),
        framed(b""),
        framed(b"[]"),
        framed(b"null"),
        framed(b"{}"),
        framed(b'{"version":1}'),
        framed(b"\xff\xfe{}"),
        framed(b"[" * 100_000),
        framed(b'{"a":' * 40_000),
        b" " * (MOST_BYTES + 1),
        changed(version=1),
        changed(version=True),
        changed(pid="7"),
        changed(pid=True),
        changed(pid=1.0),
        changed(pid=-1),
        changed(pid=1 << 63),
        changed(at=-1.0),
        changed(at=1e300),
        changed(at="now"),
        changed(at=None),
        framed(body().replace(b'"at":', b'"at":NaN,"x":')),
        framed(body().replace(b'"at":', b'"at":Infinity,"x":')),
        framed(body().replace(b'"pid":', b'"pid":' + b"9" * 5000 + b',"x":')),
        changed(host=7),
        changed(host=None),
        changed(steps=None),
        changed(steps=7),
        changed(steps={"count": 1}),
        changed(axes={}),
        changed(axes=[7]),
        changed(axes=[[]]),
        changed(axes=[AXIS | {"calls": -1}]),
        changed(axes=[{**AXIS, "axis": None}]),
        changed(axes=[AXIS] * (MOST_ENTRIES + 1)),
        changed(
            in_flight=[{"op": "send", "axis": "pp", "key": "1", "number": 0, "since": 1, "awaits": ["x"]}]
        ),
    ],
)
def test_all_else_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (of whatever kind)
        from_bytes(raw)


def test_what_a_terminal_would_act_on_does_not_come_through() -> None:
    evil = "a\x1b]0;title\x07\x1b[2Jb\u202ec\ud800\n"
    says = from_bytes(changed(host=evil, program=evil, axes=[AXIS | {"axis": evil}]))
    for text in (says.host, says.program, says.axes[0].axis):
        assert text == r"a\x1b]0;title\x07\x1b[2Jb\u202ec\ud800\n"
    assert len(from_bytes(changed(host="x" * 100_000)).host) < 1000


def test_what_later_versions_add_is_passed_over() -> None:
    assert from_bytes(changed(more=[1])).host == "here"


def test_what_is_being_written_is_known() -> None:
    old, new = to_bytes(snapshot(1)), to_bytes(snapshot(in_flight=(flying(5.0),)))
    for at in range(1, len(new)):
        torn = new[:at] + old[at:]
        if torn not in (old, new):
            with pytest.raises(TornError):
                from_bytes(torn)
    assert from_bytes(new + old).in_flight  # what a longer one has left

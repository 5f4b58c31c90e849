"""Define a rank's snapshot of itself, and check it as it is read: anybody may have written it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hybridcomp.errors import printable
from hybridcomp.steps import StepTotals

MOST_BYTES = 1 << 18  # bytes of a file, at most
MOST_ENTRIES = 1024  # entries of a list, at most
_MOST_TEXT = 256
_VERSION = 2
_HEAD, _HEAD_FORM = b"%08x %08d\n", re.compile(rb"([0-9a-f]{8}) (\d{8})\n")


class TornError(ValueError):
    """Bytes of a snapshot that is being written."""


@dataclass(frozen=True, slots=True)
class AxisTotals:
    """Totals of one axis on one rank, since its process began.

    Attributes:
        axis: mesh axis.
        calls: operations that have ended.
        plain_bytes: bytes that this rank would have sent uncompressed by the usual algorithms.
        wire_bytes: bytes that this rank sent.
        shared_bytes: part of them that ranks of the same host read in place.
        between_bytes: part of them that went to ranks of other hosts.
        encode_seconds, decode_seconds: seconds in kernels.
        wire_seconds: remaining seconds between start and end of each operation.
    """

    axis: str
    calls: int
    plain_bytes: int
    wire_bytes: int
    shared_bytes: int
    between_bytes: int
    encode_seconds: float
    wire_seconds: float
    decode_seconds: float


@dataclass(frozen=True, slots=True)
class CommunicatorState:
    """Communicator, as one of its ranks sees it.

    Attributes:
        key: a random number of 64 bits in hexadecimal digits, the same on all its ranks.
        axis: mesh axis.
        size: number of ranks.
        latest: number of the latest collective that this rank has started; the same one has the same number everywhere.
        waited: seconds of its collectives that have ended here, without those in kernels.
    """

    key: str
    axis: str
    size: int
    latest: int
    waited: float


@dataclass(frozen=True, slots=True)
class InFlight:
    """Operation in flight on one rank.

    Attributes:
        op: ``all_reduce``, ``send``, ...
        axis: mesh axis of its communicator.
        key: key of its communicator.
        number: number of a collective, the same on all ranks; 0 for sends and receives.
        since: start, in seconds of the wall clock.
        awaits: ranks of the job whose messages it waits for; empty where they are not known, or all are waited for.
    """

    op: str
    axis: str
    key: str
    number: int
    since: float
    awaits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a rank, as the rank reports it.

    Attributes:
        rank, size: rank and number of ranks in the job.
        pid: process id.
        started: start of the process, in its kernel's ticks; 0 where it is not known.
        host: name of the host.
        machine: identity of its machine and the process ids there.
        program: command line.
        launcher: job's name by its launcher; "" if it gave none.
        since: time at which its first communicator was made, in seconds of the wall clock.
        at: time of this snapshot.
        steps: totals of its optimizer steps.
        axes: totals by axis.
        groups: communicators.
        in_flight: the oldest operations in flight.
        unlisted: number of further operations in flight.
    """

    rank: int
    size: int
    pid: int
    started: int
    host: str
    machine: str
    program: str
    launcher: str
    since: float
    at: float
    steps: StepTotals
    axes: tuple[AxisTotals, ...]
    groups: tuple[CommunicatorState, ...]
    in_flight: tuple[InFlight, ...]
    unlisted: int


def total(each: Iterable[AxisTotals]) -> AxisTotals:
    """Return the sums of totals, at least one, under the first one's axis."""
    first, *others = each
    names = AxisTotals.__slots__[1:]
    sums = {name: sum((getattr(one, name) for one in others), getattr(first, name)) for name in names}
    return AxisTotals(first.axis, **sums)


def to_bytes(snapshot: Snapshot) -> bytes:
    """Return the bytes of a file: a line with checksum and length of the JSON that follows; any bytes may come after.

    A rank writes over its earlier snapshot, and a process that reads meanwhile is to know.
    """
    raw = json.dumps({"version": _VERSION, **_plain(snapshot)}, separators=(",", ":")).encode()
    return _HEAD % (zlib.crc32(raw), len(raw)) + raw


def _plain(record: Any) -> dict[str, Any]:
    found = {name: getattr(record, name) for name in record.__slots__}
    for name, value in found.items():
        if dataclasses.is_dataclass(value):
            found[name] = _plain(value)
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            found[name] = [_plain(one) for one in value]
    return found


def from_bytes(raw: bytes) -> Snapshot:
    """Return the snapshot that a file holds; texts without characters that a terminal would act on.

    Raises:
        TornError: the snapshot is being written, or damaged.
        ValueError: the file holds none.
    """
    if len(raw) > MOST_BYTES:
        raise ValueError(f"a snapshot has at most {MOST_BYTES} bytes")
    body = _body(raw)
    try:
        given = json.loads(body)
    except RecursionError:
        raise ValueError("a snapshot is not nested so deeply") from None
    if not isinstance(given, dict) or _checked(int, given.get("version"), "version") != _VERSION:
        raise ValueError(f"a snapshot has version {_VERSION}")
    found = _built(Snapshot, given)
    assert isinstance(found, Snapshot)
    return found


def _body(raw: bytes) -> bytes:
    head = _HEAD_FORM.match(raw)
    if head is None:
        raise ValueError("a snapshot has checksum and length")
    checksum, length = int(head[1], 16), int(head[2])
    body = raw[head.end() : head.end() + length]
    if len(body) != length or zlib.crc32(body) != checksum:
        raise TornError("a snapshot has the bytes that its checksum is of")
    return body


@functools.cache
def _kinds(record: type) -> dict[str, Any]:
    return typing.get_type_hints(record)


def _built(record: type, given: Any) -> Any:
    if not isinstance(given, dict):
        raise ValueError(f"{record.__name__} is an object")
    return record(**{name: _checked(kind, given.get(name), name) for name, kind in _kinds(record).items()})


def _checked(kind: Any, given: Any, name: str) -> Any:
    """Return a value of a kind; raise ValueError unless it is one."""
    if kind is str and isinstance(given, str):
        return printable(given[:_MOST_TEXT])
    if kind is int and type(given) is int and 0 <= given < 1 << 63:
        return given
    if kind is float and type(given) in (int, float) and 0 <= given < 1e15 and math.isfinite(given):
        return float(given)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _built(kind, given)
    if isinstance(kind, types.GenericAlias) and isinstance(given, list) and len(given) <= MOST_ENTRIES:
        (element, _) = typing.get_args(kind)
        return tuple(_checked(element, one, name) for one in given)
    raise ValueError(f"{name} is not what it should be")

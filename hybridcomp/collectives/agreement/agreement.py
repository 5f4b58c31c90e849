"""Check, when a communicator is made, what all its ranks must have in common."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hybridcomp import variables
from hybridcomp.collectives.agreement.earlier import NONE, Earlier
from hybridcomp.collectives.device.cuda_aware import Awareness
from hybridcomp.collectives.transport.topology import MOST_TOLD, check_hosts, told_hosts
from hybridcomp.errors import MismatchError, RemoteError
from hybridcomp.policy import Policy, load_policy
from hybridcomp.version import VERSION_BYTES, check_versions, packed_version

_WORD_BYTES = 224
_DIGEST_BYTES = 16
_PACKAGE_BYTES = 80
# ``words`` holds the policy's name, or the error of a rank that has failed. The version stands first, in a record of
# fixed length: ranks whose versions differ in all that follows can still report that.
_RECORD_BYTES = 512
_RECORD = np.dtype(
    [
        ("version", f"S{VERSION_BYTES}"),
        ("digest", "u1", 32),
        ("words", f"S{_WORD_BYTES}"),
        ("key", "<u8"),
        ("failed", "u1"),
        ("detail", "u1"),
        ("messages", "u1"),
        ("collectives", "u1"),
        ("defaulted", "u1"),
        ("rings", "<i8"),
        ("earlier", "<u8"),
        ("settings", "u1", _DIGEST_BYTES),
        ("heard", "u1", _DIGEST_BYTES),
        ("keeps", "u1"),
        ("hosts", f"S{MOST_TOLD}"),
        ("packages", f"S{_PACKAGE_BYTES}"),
        ("rest", "V2"),
    ]
)
assert _RECORD.itemsize == _RECORD_BYTES


class Agreement(NamedTuple):
    """The facts on which the ranks of a communicator have agreed.

    Attributes:
        awareness: whether every rank's MPI takes device pointers, so that both ends of a message treat it alike.
        key: random number of 64 bits, which tells the communicator from others.
        policy: policy of all ranks.
        acquainted: whether all ranks have proposed the same earlier communicator, from which they take over what they
            know of each other.
        informed: whether all ranks have been told rank 0's settings in that communicator.
        rings: for each rank, the place in its arena of its rings; -1 where it has none.
        keeps: whether all ranks would keep a base.
    """

    awareness: Awareness
    key: int
    policy: Policy
    acquainted: bool
    informed: bool
    rings: list[int]
    keeps: bool


class Preparation(NamedTuple):
    """The settings that a rank brings to a new communicator.

    Attributes:
        policy: policy of this rank.
        awareness: whether this rank's MPI takes device pointers.
        detail: whether this rank compares operations.
        settings: rank 0's profile and environment; see :func:`~.algorithms.selection.own_settings`.
    """

    policy: Policy
    awareness: Awareness
    detail: bool
    settings: str


def pack_preparation(
    own: Preparation | BaseException, earlier: Earlier = NONE, rings: int = -1, *, keeps: bool = False
) -> Any:
    """Pack the record that this rank sends the others: its settings, or the error that left it without them.

    Args:
        own: settings of this rank, or its error.
        earlier: communicator that it proposes.
        rings: place of its rings, if all propose that.
        keeps: whether it would keep a base.
    """
    record = np.zeros(1, _RECORD)
    record["version"] = packed_version()
    record["key"] = int.from_bytes(secrets.token_bytes(8), "little")
    if isinstance(own, BaseException):
        record["failed"] = True
        record["words"] = f"{type(own).__name__}: {own}".encode()[:_WORD_BYTES]
        return record
    record["digest"] = np.frombuffer(bytes.fromhex(own.policy.digest), np.uint8)
    record["words"] = own.policy.name.encode()[-_WORD_BYTES:]
    record["defaulted"] = own.policy.default
    record["detail"], record["messages"] = own.detail, own.awareness.messages
    record["collectives"] = own.awareness.collectives
    record["earlier"], record["rings"], record["keeps"] = earlier.key, rings, keeps
    record["settings"] = _digest_of(own.settings)
    record["heard"] = _digest_of(earlier.settings)
    record["hosts"] = told_hosts().encode()
    record["packages"] = ", ".join(own.policy.packages).encode()[:_PACKAGE_BYTES]
    return record


def agree(records: Any, own: Preparation, what: str) -> Agreement:
    """Check that every rank could prepare itself, and has the same policy, debug level and list of hosts.

    Args:
        records: records of all ranks.
        own: settings of this rank.
        what: name of the work in hand, for error messages.

    Returns:
        The facts that hold for all ranks.

    Raises:
        RemoteError: a rank has failed.
        MismatchError: versions, policies, levels or lists of hosts differ; raised on every rank, names the ranks and
            both values.
    """
    check_versions([bytes(version) for version in records["version"]])
    for rank in np.flatnonzero(records["failed"]).tolist():
        raise RemoteError(f"{what}: rank {rank} failed: {_words(records[rank])}{lacking(records)}")
    check_hosts([bytes(text).decode(errors="replace") for text in records["hosts"]])
    levels, names = records["detail"].tolist(), variables.DEBUG.names
    if len(set(levels)) > 1:
        other = levels.index(1 - levels[0])
        raise MismatchError(
            f"the ranks have different debug levels: rank 0 has {variables.DEBUG}={names[levels[0]]}, "
            f"rank {other} has {names[levels[other]]}; give all ranks the same"
        )
    different = np.flatnonzero((records["digest"] != records["digest"][0]).any(axis=1)).tolist()
    policy = own.policy
    if (
        different and records["defaulted"].all()
    ):  # not every host has a profile: rank 0's policy counts, as does its profile
        policy, different = load_policy(_words(records[0])), []
    if different:
        other = different[0]
        raise MismatchError(
            f"the ranks have different policies: rank 0 has {_words(records[0])!r} ({_digest(records[0])}), "
            f"rank {other} has {_words(records[other])!r} ({_digest(records[other])}); give all ranks the same policy"
            f"{_unlike_packages(records, other)}"
        )
    mine = own.awareness
    messages, collectives = bool(records["messages"].min()), bool(records["collectives"].min())
    why = mine.why if messages == mine.messages else "another rank's MPI does not"
    aware = Awareness(messages, collectives, why)
    earlier = records["earlier"]
    acquainted = bool(earlier[0]) and bool((earlier == earlier[0]).all())
    informed = acquainted and bool((records["heard"] == records["settings"][0]).all())
    rings = records["rings"].tolist()
    keeps = bool(records["keeps"].min())
    return Agreement(aware, int(records["key"][0]), policy, acquainted, informed, rings, keeps)


def lacking(records: Any) -> str:
    """Say which packages the policy takes codecs of, on ranks that have it, for an error of one that has not."""
    for rank in np.flatnonzero(records["packages"] != b"").tolist():
        return f"; rank {rank} has the policy's codecs of {_text(records[rank]['packages'])}"
    return ""


def _unlike_packages(records: Any, other: int) -> str:
    own, others = (_text(records[rank]["packages"]) or "hybridcomp alone" for rank in (0, other))
    return (
        "" if own == others else f", and its packages: rank 0 takes codecs of {own}, rank {other} of {others}"
    )


def _digest_of(settings: str | None) -> Any:
    if settings is None:
        return np.zeros(_DIGEST_BYTES, np.uint8)
    return np.frombuffer(hashlib.blake2b(settings.encode(), digest_size=_DIGEST_BYTES).digest(), np.uint8)


def _words(record: Any) -> str:
    return _text(record["words"])


def _text(field: Any) -> str:
    text = bytes(field).decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def _digest(record: Any) -> str:
    return bytes(record["digest"][:4]).hex()


def same_text(comm: MPI.Comm, text: str) -> str:
    """Broadcast rank 0's text to every rank of ``comm``. Collective."""
    data = np.frombuffer(text.encode(), np.uint8).copy()
    size = np.array([data.size], np.int64)
    comm.Bcast(size)
    if comm.Get_rank():
        data = np.empty(int(size[0]), np.uint8)
    comm.Bcast(data)
    return data.tobytes().decode()


def gathered(comm: MPI.Comm, number: int) -> list[int]:
    """Return every rank's number. Collective."""
    numbers = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(np.array([number], np.int64), numbers)
    return [int(n) for n in numbers]

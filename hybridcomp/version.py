"""Define the version of hybridcomp, which all ranks of a job must share: others may write other bytes."""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.errors import MismatchError

__version__ = "0.1.0"

#: Bytes of a version, padded with zeros, in what ranks tell each other.
VERSION_BYTES = 32


def packed_version() -> bytes:
    """Return this process's version in :data:`VERSION_BYTES` bytes."""
    return __version__.encode()[:VERSION_BYTES].ljust(VERSION_BYTES, b"\0")


def check_versions(versions: Sequence[bytes]) -> None:
    """Check that all ranks have this process's version.

    Args:
        versions: version of each rank, in :data:`VERSION_BYTES` bytes.

    Raises:
        MismatchError: a rank has another one; names the ranks, and both versions.
    """
    mine = packed_version()
    others = [rank for rank, theirs in enumerate(versions) if theirs.ljust(VERSION_BYTES, b"\0") != mine]
    if others:
        theirs = versions[others[0]].rstrip(b"\0").decode(errors="backslashreplace")
        raise MismatchError(
            f"the ranks have different versions of hybridcomp: {__version__} here, {theirs!r} on rank "
            f"{', '.join(map(str, others))}; install the same on all hosts"
        )

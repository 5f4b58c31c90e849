"""Bytes that cross a host's link, by the kernel's counters: right for every algorithm, ours or a peer's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_HEADERS = 14 + 20 + 32  # bytes that a packet's Ethernet, IPv4 and TCP headers (with timestamps) count for
_INTERFACES = {"namespaces": "eth0", "loopback": "lo"}


class Payload(NamedTuple):
    """TCP payload in bytes since the host came up."""

    received: int
    sent: int


def read(table: str, interface: str) -> Payload:
    """Return the payload by the text of ``/proc/net/dev``.

    A packet is counted once whether or not the interface cuts it into frames later, and so are its headers.

    Raises:
        ValueError: there is no such interface.
    """
    for line in table.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            numbers = [int(word) for word in counters.split()]
            return Payload(numbers[0] - _HEADERS * numbers[1], numbers[8] - _HEADERS * numbers[9])
    raise ValueError(f"/proc/net/dev has no interface {interface!r}")


class Link:
    """The link of this rank's host in the lab, if it has one.

    Attributes:
        rate: rate of the link in ``tc``'s syntax; "none" if unshaped.
    """

    def __init__(self) -> None:
        self.rate = os.environ.get("HYBRIDCOMP_LAB_RATE", "none")
        self._interface = _INTERFACES.get(os.environ.get("HYBRIDCOMP_LAB_KIND", ""))

    def now(self) -> Payload | None:
        """Return the counters; None outside a lab and where ranks share memory only."""
        if self._interface is None:
            return None
        return read(Path("/proc/net/dev").read_text(), self._interface)


def between(before: Payload | None, after: Payload | None) -> int:
    """Return the bytes in the busier direction; 0 without counters."""
    if before is None or after is None:
        return 0
    return max(after.received - before.received, after.sent - before.sent)

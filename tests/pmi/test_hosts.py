"""Hosts as MPICH is told of them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybridcomp.pmi import hosts


def test_ranks_of_one_host_are_of_one_host() -> None:
    mine = hosts.identity()
    assert re.fullmatch("[0-9a-f]{64}", mine)
    other = subprocess.run(
        [sys.executable, "-c", "from hybridcomp.pmi import hosts; print(hosts.identity())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == mine


def test_addresses() -> None:
    assert hosts.interfaces()["lo"] == "127.0.0.1"
    assert hosts.local_address("127.0.0.1") == "127.0.0.1"
    assert hosts.local_address("localhost") == "127.0.0.1"


def test_a_host_of_ipv6_is_reached_over_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI's messages go by the IPv4 address of the interface that leads there."""
    plain = hosts._source
    on_the_way = {"2001:db8::7": "fd00::2", "2001:db8::8": "fd00::3"}

    def source(family: socket.AddressFamily, towards: str) -> str:
        return on_the_way[towards] if family == socket.AF_INET6 else plain(family, towards)

    monkeypatch.setattr(hosts, "_source", source)
    monkeypatch.setattr(hosts, "_scopes", lambda: {"fd00::2": "net0", "fd00::3": "net1"})
    monkeypatch.setattr(hosts, "interfaces", lambda: {"lo": "127.0.0.1", "net0": "192.0.2.5"})
    assert hosts.local_address("2001:db8::7") == "192.0.2.5"
    with pytest.raises(OSError, match="the interface net1 has no IPv4 address"):
        hosts.local_address("2001:db8::8")


def test_interfaces_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "fd000000000000000000000000000002 04 40 00 82     eth0\n"
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: line)
    assert hosts._scopes() == {"fd00::2": "eth0"}

"""Hosts as MPICH is told of them."""

from __future__ import annotations

import re
import subprocess
import sys

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

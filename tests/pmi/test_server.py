"""The server that ranks meet at: PMI-1's lines, strangers, and how it ends."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridcomp.pmi import server

SERVER = Path(server.__file__)
SECRET = "f" * 64
HOSTS = "a1", "b2"
MAPPING = "(vector,(0,2,1))"
SECONDS = 20.0


class Job:
    """A server for two ranks."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        given = {"size": 2, "secret": SECRET, "host": "127.0.0.1", "seconds": seconds}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(given).encode() + b"\n")
        self.process.stdin.flush()
        self.port = int(self.process.stdout.readline())
        self.connections: list[Rank] = []

    def connect(self, greeting: bytes) -> Rank:
        """Connect, and send a first line."""
        self.connections.append(Rank(self.port, greeting))
        return self.connections[-1]

    def ranks(self) -> list[Rank]:
        """Connect both ranks."""
        found = [self.connect(f"{SECRET} {rank} {HOSTS[rank]}\n".encode()) for rank in range(2)]
        assert [rank.line() for rank in found] == ["welcome 2"] * 2
        return found

    def ends(self) -> bool:
        """Wait for the end; tell whether it is a good one."""
        return self.process.wait(SECONDS) == 0

    def close(self) -> None:
        """End all that is left."""
        for connection in self.connections:
            connection.close()
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Rank:
    """Connection of one rank to the server."""

    def __init__(self, port: int, greeting: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), SECONDS)
        self.file = self.socket.makefile("rb")
        self.socket.sendall(greeting)

    def line(self) -> str:
        """Read a line; nothing once the server has closed the connection."""
        try:
            return self.file.readline().decode().rstrip("\n")
        except ConnectionResetError:
            return ""

    def ask(self, line: str) -> str:
        """Send a line and read one."""
        self.socket.sendall(line.encode() + b"\n")
        return self.line()

    def close(self) -> None:
        """Leave."""
        self.file.close()
        self.socket.close()


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ("a", "(vector,(0,1,1))"),
        ("aaa", "(vector,(0,1,3))"),
        ("abc", "(vector,(0,3,1))"),
        ("aabbcc", "(vector,(0,3,2))"),
        ("aabcc", "(vector,(0,1,2),(1,1,1),(2,1,2))"),
        ("abab", "(vector,(0,2,1),(0,2,1))"),
        ("aaba", "(vector,(0,1,2),(1,1,1),(0,1,1))"),
    ],
)
def test_mapping(of: str, expected: str) -> None:
    assert server.mapping(list(of)) == expected


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


def test_a_job(job: Job) -> None:
    first, second = job.ranks()
    for rank in (first, second):
        assert rank.ask("cmd=init pmi_version=1 pmi_subversion=1") == (
            "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
        )
        assert rank.ask("cmd=get_maxes") == "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024"
        assert rank.ask("cmd=get_universe_size") == "cmd=universe_size size=2"
        assert rank.ask("cmd=get_appnum") == "cmd=appnum appnum=0"
        assert rank.ask("cmd=get kvsname=ranks key=PMI_process_mapping") == (
            f"cmd=get_result rc=0 msg=success value={MAPPING}"
        )
    names = {rank.ask("cmd=get_my_kvsname") for rank in (first, second)}
    assert len(names) == 1
    assert re.fullmatch(r"cmd=my_kvsname kvsname=ranks_[0-9a-f]{16}", names.pop()), (
        "no other job's: it names memory"
    )
    assert first.ask("cmd=put kvsname=ranks key=card-0 value=a=b,c") == "cmd=put_result rc=0 msg=success"
    assert second.ask("cmd=get kvsname=ranks key=card-0") == "cmd=get_result rc=0 msg=success value=a=b,c"
    assert second.ask("cmd=get kvsname=ranks key=card-1").startswith("cmd=get_result rc=-1 ")
    for _ in range(3):
        first.socket.sendall(b"cmd=barrier_in\n")
        assert second.ask("cmd=barrier_in") == first.line() == "cmd=barrier_out"
    assert first.ask("cmd=finalize") == "cmd=finalize_ack"
    first.close()
    assert second.ask("cmd=finalize") == "cmd=finalize_ack"
    assert job.ends()


@pytest.mark.parametrize(
    "greeting",
    [
        b"\n",
        b"cmd=init pmi_version=1 pmi_subversion=1\n",
        b"f" * 63 + b"e 0 a1\n",
        b"f" * 64 + b" 2 a1\n",
        b"f" * 64 + b" -1 a1\n",
        b"f" * 64 + b" 0 A1\n",
        b"f" * 64 + b" 0\n",
        b"f" * 64 + b"\n",
        b"\xff" * 64 + b" 0 a1\n",
        b"f" * 10_000 + b"\n",
    ],
)
def test_strangers_are_sent_away(job: Job, greeting: bytes) -> None:
    stranger = job.connect(greeting)
    assert stranger.line() == ""
    stranger.close()
    ranks = job.ranks()  # they are served all the same
    assert job.connect(f"{SECRET} 0 a1\n".encode()).line() == "", "a rank comes once"
    assert [rank.ask("cmd=finalize") for rank in ranks] == ["cmd=finalize_ack"] * 2
    assert job.ends()


@pytest.mark.parametrize(
    "line",
    [
        b"cmd=spawn nprocs=1\n",
        b"cmd=abort exitcode=1\n",
        b"mcmd=spawn\n",
        b"nothing\n",
        b"cmd=get cmd=put\n",
        b"cmd=put key= value=1\n",
        b"cmd=put key=PMI_process_mapping value=1\n",
        b"cmd=put key=" + b"k" * 65 + b" value=1\n",
        b"cmd=put key=k value=" + b"v" * 5000 + b"\n",
        b"cmd=put key=k value=\x07\n",
        b"cmd=put key=k value=\xc3\xa4\n",
    ],
)
def test_what_is_not_the_protocol_ends_the_job(job: Job, line: bytes) -> None:
    first, second = job.ranks()
    first.socket.sendall(line)
    assert first.line() == ""
    assert second.ask("cmd=barrier_in") == ""
    assert job.ends()


def test_a_lost_rank_ends_the_job(job: Job) -> None:
    first, second = job.ranks()
    second.socket.sendall(b"cmd=barrier_in\n")
    first.close()
    assert second.line() == "", "who waits for it is told"
    assert job.ends()


def test_it_ends_with_the_process_that_started_it(job: Job) -> None:
    first, _ = job.ranks()
    assert job.process.stdin is not None
    job.process.stdin.close()
    assert job.ends()
    assert first.line() == ""


def test_ranks_that_do_not_come_are_not_waited_for_for_ever() -> None:
    job = Job(seconds=0.5)
    first = job.connect(f"{SECRET} 0 a1\n".encode())
    assert first.line() == "missing 1"
    assert first.line() == ""
    assert job.ends()
    job.close()

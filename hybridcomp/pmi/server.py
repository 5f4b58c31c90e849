"""Serve PMI-1, the text protocol by which MPICH's ranks meet, to ranks that know a secret. A process of rank 0's.

The server is a process of its own, since ``MPI_Init`` holds Python's lock while it waits for an answer. It is run as a
file, by a Python without packages, and imports nothing but the standard library. Its first line of input is JSON:
``size``, ``host`` (the address to listen on), ``secret`` and ``seconds`` (for all ranks to come). It prints its port,
and ends when all ranks have, and when one of them is lost, or its input ends, before MPI has begun in all.

A rank's first line is the secret, its rank and its host's name. It is answered when all ranks have come, by ``welcome``
and the number of hosts, or by ``missing`` and the ranks that have not. The lines after it are MPICH's protocol (its
``src/pmi``): lines of ``key=value`` with single spaces. A line that is too long, is not ASCII, or has unknown
contents ends the connection, and with it the job.

On its second connection a rank says ``life`` in the place of the host, is answered ``alive``, and says ``begun`` when
its MPI has. It is told there, by ``gone`` and a rank, when that rank's second connection has ended before its MPI has:
its process is gone, however that came.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Sequence

MOST_BYTES = 4096  # bytes of a line, at most; MPICH's are at most 1024
MOST_KEYS = 1 << 16
AUTHENTICATION_SECONDS = 10.0
_WORD = re.compile(r"[A-Za-z_]{1,32}=[!-~]{0,2048}")  # printable ASCII without the space
_KEY = re.compile(r"[!-~]{1,64}")
_FIRST = re.compile(r"([0-9a-f]{64}) ([0-9]{1,9}) (life|[0-9a-f]{1,64})")  # secret, rank, host


class ProtocolError(Exception):
    """Line of a rank that is not PMI-1, or a connection that is not one of the ranks'."""


def parse(line: bytes) -> dict[str, str]:
    """Read a line of words ``key=value``.

    Raises:
        ProtocolError: the line is not of this form.
    """
    if not line.endswith(b"\n") or not line.isascii():
        raise ProtocolError("a line that is not whole, or not ASCII")
    words = line.decode("ascii").split()
    if not all(_WORD.fullmatch(word) for word in words):
        raise ProtocolError("words that are not key=value")
    found = dict(word.split("=", 1) for word in words)
    if len(found) != len(words) or "cmd" not in found:
        raise ProtocolError("a key that comes twice, or no command")
    return found


def mapping(hosts: Sequence[str]) -> str:
    """Return PMI's process mapping, of runs of ranks on hosts: ``(vector,(first host,hosts,ranks of each),...)``.

    Args:
        hosts: host of each rank, in the order of ranks.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(hosts))}
    vector: list[list[int]] = []
    for name, same in itertools.groupby(hosts):
        host, ranks = numbers[name], len(list(same))
        if vector and vector[-1][2] == ranks and vector[-1][0] + vector[-1][1] == host:
            vector[-1][1] += 1
        else:
            vector.append([host, 1, ranks])
    return "(vector," + ",".join(f"({host},{count},{ranks})" for host, count, ranks in vector) + ")"


class Server:
    """Meeting point of the ranks.

    Args:
        size: number of ranks.
        secret: secret that every rank knows, of 64 hexadecimal digits.
    """

    def __init__(self, size: int, secret: str) -> None:
        self.size = size
        self.secret = secret
        self.name = f"ranks_{os.urandom(8).hex()}"  # MPICH names its shared memory after it
        self.ended = asyncio.Event()  # set when all ranks have ended, or the job is lost
        self.complete = asyncio.Event()  # set when all ranks have come
        self.begun = asyncio.Event()  # set when MPI has begun in all ranks
        self._ranks: dict[int, asyncio.StreamWriter] = {}
        self._lives: dict[int, asyncio.StreamWriter] = {}  # second connections
        self._begun: set[int] = set()
        self._gone: list[int] = []
        self._finalized: set[int] = set()
        self._waiting: set[int] = set()  # ranks in the barrier
        self._hosts: dict[int, str] = {}
        self._values: dict[str, str] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, to its end."""
        rank = -1
        try:
            line = await asyncio.wait_for(reader.readline(), AUTHENTICATION_SECONDS)
            if self._is_life(line):
                await self._watch(line, reader, writer)
                return
            rank = self._admit(line, writer)
            while (line := await reader.readline()) and rank not in self._finalized:
                for answer in self._answers(rank, parse(line)):
                    writer.write(answer.encode("ascii") + b"\n")
                await writer.drain()
        except (ProtocolError, ValueError, OSError, TimeoutError, asyncio.CancelledError):
            pass  # a line over the limit is a ValueError; the end of the job cancels waiting reads
        finally:
            writer.close()
            # A stranger is sent away. A rank that leaves before its MPI has ended is lost: others would wait for it.
            if rank in self._ranks and rank not in self._finalized and not self.begun.is_set():
                self.ended.set()

    def _is_life(self, line: bytes) -> bool:
        return line.endswith(b" life\n")

    async def _watch(self, line: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keep a rank's second connection, and tell the others when it ends."""
        rank, _ = self._known(line)
        if rank not in self._ranks or rank in self._lives or rank in self._gone:
            raise ProtocolError("a rank that is not here, or is twice")
        self._lives[rank] = writer
        writer.write(b"alive\n" + b"".join(b"gone %d\n" % one for one in self._gone))
        try:
            if await reader.readline() == b"begun\n":
                self._begun.add(rank)
                if len(self._begun) == self.size:
                    self.begun.set()
                await reader.read(1)  # it says nothing more
        finally:
            del self._lives[rank]
            if rank not in self._finalized:
                self._gone.append(rank)
                for other in self._lives.values():
                    other.write(b"gone %d\n" % rank)
            if not self._lives:
                self.ended.set()

    def _known(self, line: bytes) -> tuple[int, str]:
        """Return the rank and the host of a first line that has the secret."""
        said = _FIRST.fullmatch(line.decode("ascii", "replace").rstrip("\n"))
        if said is None or not hmac.compare_digest(said[1], self.secret):
            raise ProtocolError("no rank, or another secret")
        return int(said[2]), said[3]

    def _admit(self, line: bytes, writer: asyncio.StreamWriter) -> int:
        rank, host = self._known(line)
        if rank >= self.size or rank in self._ranks:
            raise ProtocolError("a rank too many")
        self._ranks[rank], self._hosts[rank] = writer, host
        if len(self._ranks) == self.size:
            hosts = [self._hosts[one] for one in range(self.size)]
            self._values["PMI_process_mapping"] = mapping(hosts)
            self._tell(f"welcome {len(set(hosts))}")
            self.complete.set()
        return rank

    def give_up(self) -> None:
        """Tell the ranks that have come which ones have not."""
        missing = [str(rank) for rank in range(self.size) if rank not in self._ranks]
        self._tell(f"missing {','.join(missing)}"[: MOST_BYTES - 1])

    def _tell(self, line: str, but: int = -1) -> None:
        for rank, writer in self._ranks.items():
            if rank != but:
                writer.write(f"{line}\n".encode("ascii"))

    def _answers(self, rank: int, said: dict[str, str]) -> list[str]:
        """Return the lines that answer a rank's line."""
        command = said["cmd"]
        if command == "init":
            return ["cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"]
        if command == "get_maxes":
            return ["cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024"]
        if command == "get_appnum":
            return ["cmd=appnum appnum=0"]
        if command == "get_universe_size":
            return [f"cmd=universe_size size={self.size}"]
        if command == "get_my_kvsname":
            return [f"cmd=my_kvsname kvsname={self.name}"]
        if command == "put":
            return [self._put(said.get("key", ""), said.get("value", ""))]
        if command == "get":
            value = self._values.get(said.get("key", ""))
            found = (
                "rc=-1 msg=not_found value=unknown" if value is None else f"rc=0 msg=success value={value}"
            )
            return [f"cmd=get_result {found}"]
        if command == "barrier_in":
            return self._enter_barrier(rank)
        if command == "finalize":
            self._finalized.add(rank)
            if len(self._finalized) == self.size:
                self.ended.set()
            return ["cmd=finalize_ack"]
        raise ProtocolError(f"the command {command}")  # abort, and requests to start processes

    def _put(self, key: str, value: str) -> str:
        if not _KEY.fullmatch(key) or key in self._values or len(self._values) >= MOST_KEYS:
            raise ProtocolError("a key that is none, is there already, or is one too many")
        self._values[key] = value
        return "cmd=put_result rc=0 msg=success"

    def _enter_barrier(self, rank: int) -> list[str]:
        self._waiting.add(rank)
        if len(self._waiting) < self.size:
            return []
        self._waiting.clear()
        self._tell("cmd=barrier_out", but=rank)
        return ["cmd=barrier_out"]


async def _end_of_input() -> None:
    """Return when no process can write to this process's input any more."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while await reader.read(MOST_BYTES):
        pass


def _first_line() -> bytes:
    """Read a line of input, and no byte more: the rest is for the event loop."""
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(sys.stdin.fileno(), 1)):
        line += byte
    return bytes(line)


async def run(given: dict[str, object]) -> None:
    """Serve a job until it ends."""
    job = Server(int(str(given["size"])), str(given["secret"]))
    server = await asyncio.start_server(
        job.serve, str(given["host"]), 0, limit=MOST_BYTES, backlog=job.size + 16
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    gone = asyncio.ensure_future(_end_of_input())
    try:
        ways = [gone, asyncio.ensure_future(job.ended.wait())]
        complete = asyncio.ensure_future(job.complete.wait())
        done, _ = await asyncio.wait(
            [*ways, complete], timeout=float(str(given["seconds"])), return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            job.give_up()
        elif done == {complete}:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if job.begun.is_set():  # the others may outlive rank 0, and are told so
                await job.ended.wait()
    finally:
        server.close()


def main() -> None:
    """Serve the job that the first line of input describes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks' own end comes first
    asyncio.run(run(json.loads(_first_line())))


if __name__ == "__main__":
    main()

"""Start MPI in a rank that knows its number and a torch store, and was started without mpiexec."""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from hybridcomp import launcher, variables
from hybridcomp.errors import CollectiveTimeoutError, ConfigError, RemoteError
from hybridcomp.native import kernels
from hybridcomp.pmi import ending, hosts, lifeline

_CARD = "hybridcomp/pmi"  # key in the store: address of rank 0's server
_FAILED = "failed"
_AGAIN_SECONDS = 0.02
_LOOK_SECONDS = 0.1  # seconds between looks at whether another rank has failed
_SERVER_SECONDS = 20.0  # seconds for the server's process to print its port
_SHARED_MEMORY = re.compile(r"/dev/shm/mpich_shm_\w+")
_WAYS = "start the program with mpiexec or srun of the MPI that mpi4py uses, or `pip install mpich`"


def needed() -> bool:
    """Tell whether MPI has not begun, and would not know this process's rank.

    That is so where no MPI launcher started it; or where one started torchrun (``srun torchrun ...``), and torchrun
    this process, which has the launcher's variables all the same.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return (by_torchrun or not launcher.inside_mpi()) and (mpi is None or not mpi.Is_initialized())


def start(
    store: Any, rank: int, size: int, timeout: timedelta, check: Callable[[], None] = lambda: None
) -> None:
    """Initialise MPI with torch's ranks. Collective over all of them.

    Args:
        store: torch store in which all ranks see the same keys.
        rank: rank of this process.
        size: number of ranks.
        timeout: time for all ranks to come.
        check: function called while this rank waits for others; an error that it raises ends the waiting.

    Raises:
        ConfigError: mpi4py's MPI cannot be started this way, or this host has no route to rank 0's.
        NativeUnavailableError: this rank has no kernels, or lacks the instruction set that it is told to use.
        CollectiveTimeoutError: not all ranks came.
        RemoteError: rank 0 could not start the server.
    """
    mpi = _library()
    kernels()
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        try:
            store.set(_CARD, json.dumps(_serve(size, timeout.total_seconds())))
        except Exception as error:
            store.set(_CARD, json.dumps({_FAILED: f"{type(error).__name__}: {error}", "attempt": _attempt()}))
            raise
    connection, count, life = _join(store, rank, deadline, timeout, check)
    lifeline.hold(life)
    _initialise(mpi, connection, rank, size, _network() if count > 1 else _loopback())
    lifeline.begin()
    _unlink_shared_memory(mpi.COMM_WORLD, deadline)


def _join(
    store: Any, rank: int, deadline: float, timeout: timedelta, check: Callable[[], None]
) -> tuple[socket.socket, int, socket.socket]:
    """Connect to rank 0's server once all ranks have; return the connection, the number of hosts, and the lifeline.

    A store may outlive ranks that all started again, and hold what the earlier ones left. So an address without a
    listener is not an error until the time is up: rank 0's new one takes its place.
    """
    waited, error = f"starting MPI: rank {rank} waited {timeout.total_seconds():g} s", ""
    absent: CollectiveTimeoutError | None = None
    while time.monotonic() < deadline:
        check()
        if not store.check([_CARD]):
            time.sleep(_AGAIN_SECONDS)
            continue
        card = json.loads(store.get(_CARD))
        if _FAILED in card:
            if card["attempt"] == _attempt():
                raise RemoteError(f"starting MPI: rank 0 failed: {card[_FAILED]}")
            time.sleep(_AGAIN_SECONDS)
            continue
        try:
            connection, count = _greet(card, rank, deadline, check)
            return connection, count, _live(card, rank)
        except CollectiveTimeoutError as late:  # an OSError, too
            absent = late
            time.sleep(_AGAIN_SECONDS)
        except OSError as refused:
            error = f"{card['address']}:{card['port']}: {refused}"
            time.sleep(_AGAIN_SECONDS)
    if absent is not None:
        raise absent
    if error:
        raise ConfigError(
            f"{waited}, and cannot reach rank 0's server at {error}; MASTER_ADDR must be rank 0's host, or "
            f"{variables.INTERFACE} the network interface between the hosts"
        )
    raise CollectiveTimeoutError(f"{waited}, and rank 0 has not come")


def _attempt() -> str:
    """Return the number of times that torchrun has started the ranks again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "")


def _greet(
    card: dict[str, Any], rank: int, deadline: float, check: Callable[[], None]
) -> tuple[socket.socket, int]:
    connection = socket.create_connection((card["address"], card["port"]), _SERVER_SECONDS)
    answer = b""
    try:
        connection.sendall(f"{card['secret']} {rank} {hosts.identity()}\n".encode())
        end = max(deadline, time.monotonic()) + _SERVER_SECONDS
        connection.settimeout(_LOOK_SECONDS)
        while not answer.endswith(b"\n"):
            try:
                byte = connection.recv(1)  # later bytes are for MPI
            except TimeoutError:
                check()
                if time.monotonic() > end:
                    raise
                continue
            if not byte:
                break
            answer += byte
    except BaseException:
        connection.close()
        raise
    what, _, rest = answer.decode("ascii", "replace").strip().partition(" ")
    if what == "welcome" and rest.isdigit():
        connection.settimeout(None)
        return connection, int(rest)
    connection.close()
    if what == "missing":
        raise CollectiveTimeoutError(
            f"starting MPI: rank {rank} waited, and rank {rest.replace(',', ', ')} did not come"
        )
    raise ConnectionError("it sends this rank away, or a rank ended before all had come")


def _live(card: dict[str, Any], rank: int) -> socket.socket:
    """Return a connection by which the server knows that this process lives."""
    connection = socket.create_connection((card["address"], card["port"]), _SERVER_SECONDS)
    connection.sendall(f"{card['secret']} {rank} {lifeline.WORD}\n".encode())
    for byte in lifeline.GREETING:
        if connection.recv(1) != bytes([byte]):
            connection.close()
            raise ConnectionError("it sends this rank away, or a rank ended before all had come")
    return connection


def _library() -> Any:
    """Return mpi4py's MPI, not initialised, if it can be started this way.

    Raises:
        ConfigError: it cannot be started.
    """
    import mpi4py  # noqa: PLC0415  (only who starts MPI needs it)

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True  # MPI ends with Python, as where importing it initialises MPI
    from mpi4py import MPI  # noqa: PLC0415

    name = MPI.Get_library_version().split("\n")[0].strip("\x00 ")
    if not name.startswith(ending.MPICH):
        raise ConfigError(f"mpi4py's MPI, {name}, cannot be started by torchrun and its like: {_WAYS}")
    return MPI


def _unlink_shared_memory(world: Any, deadline: float) -> None:
    """Unlink the files of MPICH's shared memory, once all ranks have mapped them: they then end with the last rank.

    MPICH unlinks them when it ends, and leaves them where a rank is killed. It takes a missing file for unlinked.
    """
    maps = Path("/proc/self/maps")
    mine = set(_SHARED_MEMORY.findall(maps.read_text(encoding="utf-8"))) if maps.exists() else set()
    all_have = world.Ibarrier()
    while not all_have.Test():
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"starting MPI: rank {world.rank} waited for all ranks to have started it"
            )
        time.sleep(1e-4)
    for path in mine:
        Path(path).unlink(missing_ok=True)  # the first rank of a host unlinks them


def _serve(size: int, seconds: float) -> dict[str, Any]:
    """Start the server's process; return the facts that a rank needs to reach it."""
    address, secret = _own_address(), secrets.token_hex(32)
    job = {"size": size, "secret": secret, "host": address, "seconds": seconds}
    ours, theirs = os.pipe(), os.pipe()  # pipes to its input, and from its output
    # This process keeps the server's input open until it ends, however that happens; the server ends with its input.
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("server.py"))],
        dict(os.environ),
        file_actions=[(os.POSIX_SPAWN_DUP2, ours[0], 0), (os.POSIX_SPAWN_DUP2, theirs[1], 1)],
    )
    os.close(ours[0])
    os.close(theirs[1])
    os.write(ours[1], (json.dumps(job) + "\n").encode())
    with open(theirs[0], "rb") as output:
        ready, _, _ = select.select([output], [], [], _SERVER_SECONDS)
        port = output.readline().strip().decode() if ready else ""
    if not port.isdigit():
        raise ConfigError(
            f"starting MPI: the server that ranks meet at does not listen on {address}; its error is above"
        )
    return {"secret": secret, "address": address, "port": int(port)}


def _loopback() -> dict[str, str]:
    """Return MPI's settings for one host, where it needs no network: it listens on the loopback alone."""
    return {name: value for name, value in launcher.LOOPBACK.items() if name not in os.environ}


def _own_address() -> str:
    """Return this host's address on its network to rank 0's host, or the address of the named interface.

    Raises:
        ConfigError: there is no such interface, or no route.
    """
    named, main = variables.INTERFACE.read(), os.environ.get("MASTER_ADDR") or "127.0.0.1"
    if named:
        return _address_of(named)
    if launcher.one_machine():
        return "127.0.0.1"
    try:
        return hosts.local_address(main)
    except OSError as error:
        raise ConfigError(f"starting MPI: there is no way to MASTER_ADDR, {main!r}: {error}") from error


def _network() -> dict[str, str]:
    """Return MPICH's settings for several hosts: TCP over the one interface, unless the user has set others."""
    address = _own_address()
    names = [name for name, own in hosts.interfaces().items() if own == address]
    usual = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
    if names:
        usual["FI_TCP_IFACE"] = names[0]
    return {name: value for name, value in usual.items() if name not in os.environ}


def _address_of(interface: str) -> str:
    found = hosts.interfaces()
    if interface not in found:
        raise variables.INTERFACE.wrong(interface, f"one of {', '.join(found)}")
    return found[interface]


def _initialise(mpi: Any, connection: socket.socket, rank: int, size: int, network: dict[str, str]) -> None:
    """Initialise MPI over a connection to the server, which MPI closes when it ends."""
    own = {"PMI_FD": str(connection.detach()), "PMI_RANK": str(rank), "PMI_SIZE": str(size)}
    os.environ |= own | network
    try:
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    finally:
        for name in own:  # not for programs that this one starts
            os.environ.pop(name, None)
    ending.hold()
    world = mpi.COMM_WORLD
    if (world.rank, world.size) != (rank, size):
        raise ConfigError(
            f"starting MPI: this is rank {rank} of {size}, and MPI says {world.rank} of {world.size}"
        )

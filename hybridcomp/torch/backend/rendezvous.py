"""``init_process_group`` under MPI, with no ``MASTER_ADDR``, ``RANK`` or ``WORLD_SIZE`` set.

torch's ``env://`` needs these four variables. Under mpiexec or srun MPI knows the rank and the size, and can tell
all ranks where rank 0's store listens: rank 0 opens it on a free port and broadcasts all its addresses, a port and
a token; every other rank takes the first address at which it finds that token. Several addresses, because hosts
have some that others cannot reach (a container bridge's, the loopback).

:mod:`hybridcomp.plugin` puts this in front of torch's own handler of ``env://``, so that it serves gloo and NCCL as
well; where the variables are set, torch's own still does the work.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from hybridcomp.errors import CollectiveTimeoutError, ConfigError, RemoteError
from hybridcomp.launcher import check_launcher, check_world, keep_to_loopback, one_machine
from hybridcomp.pmi import ending

_TOKEN_KEY = "hybridcomp/rendezvous"
_FAILED = "failed"  # in place of a token: rank 0 has no store
_PROBE_SECONDS = 2.0
_SIOCGIFADDR = 0x8915
_CARD_BYTES = 4096
_LOOPBACK = "127.0.0.1"


def by_mpi(timeout: timedelta) -> Iterator[tuple[Store, int, int]]:
    """Yield the store, this rank and the size, once; the form that torch asks of a handler."""
    check_launcher()
    keep_to_loopback()
    from mpi4py import MPI  # noqa: PLC0415  (initialises MPI)

    world = MPI.COMM_WORLD
    check_world(world.size, MPI.Get_library_version())
    ending.hold()
    if world.rank == 0:
        store: Store = _serve(world, timeout)
    else:
        store = _connect(world, timeout)
    yield store, world.rank, world.size
    raise RuntimeError("ranks under MPI meet once; another init_process_group starts anew")


def _serve(world: Any, timeout: timedelta) -> TCPStore:
    token = secrets.token_hex(16)
    try:
        store = _store(world.size, timeout)
        store.set(_TOKEN_KEY, token)
    except Exception as error:
        with suppress(CollectiveTimeoutError):
            _broadcast(world, _card(_FAILED, f"{type(error).__name__}: {error}"), timeout)
        raise
    where = [_LOOPBACK] if one_machine() else addresses()
    _broadcast(world, _card(token, str(store.port), *where), timeout)
    return store


def _store(size: int, timeout: timedelta) -> TCPStore:
    """Return a store of this process's, at ``MASTER_PORT`` where that is set."""
    given = os.environ.get("MASTER_PORT") or "0"
    if not (given.isascii() and given.isdigit() and int(given) < 1 << 16):
        raise ConfigError(f"MASTER_PORT must be a port from 1 to 65535, not {given!r}")
    port, listening = int(given), None
    if not port and one_machine():  # torch's own socket would listen on every address
        with socket.create_server((_LOOPBACK, 0)) as server:
            port, listening = server.getsockname()[1], server.detach()
    try:
        # Where the port is given, another init_process_group of this process finds the store that has it.
        return TCPStore(
            "127.0.0.1",
            port,
            size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=port != 0 and listening is None,
            master_listen_fd=listening,
        )
    except DistError as error:
        raise ConfigError(
            f"rank 0 cannot open torch's store at port {port}: {str(error).splitlines()[0]}; MASTER_PORT must be a "
            "free port, or unset: then any free one is taken"
        ) from error


def _card(*lines: str) -> bytearray:
    """Return the message of rank 0 to the others, padded to the bytes that they expect."""
    return bytearray("\n".join(lines).encode()[:_CARD_BYTES].ljust(_CARD_BYTES, b"\n"))


def _connect(world: Any, timeout: timedelta) -> TCPStore:
    card = bytearray(_CARD_BYTES)
    _broadcast(world, card, timeout)
    token, text = card.decode(errors="replace").split("\n", 1)
    if token == _FAILED:
        raise RemoteError(f"rendezvous: rank 0 failed: {text.strip()}")
    port, *hosts = text.split()
    for host in hosts:
        store = _try(host, int(port), token, world.size)
        if store is not None:
            store.set_timeout(timeout)
            return store
    raise CollectiveTimeoutError(
        f"rendezvous: rank {world.rank} reached rank 0's store at none of {', '.join(hosts)} on port {port}; "
        f"set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE to say where it is"
    )


def _try(host: str, port: int, token: str, size: int) -> TCPStore | None:
    """Return the store at an address if it is rank 0's; else None."""
    try:
        socket.create_connection((host, port), _PROBE_SECONDS).close()
        patience = timedelta(seconds=5 * _PROBE_SECONDS)
        store = TCPStore(host, port, size, is_master=False, timeout=patience, wait_for_workers=False)
        return store if store.get(_TOKEN_KEY) == token.encode() else None
    except (OSError, DistError):
        return None


def _broadcast(world: Any, card: bytearray, timeout: timedelta) -> None:
    request = world.Ibcast(card, 0)
    deadline = time.monotonic() + timeout.total_seconds()
    while not request.Test():
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"rendezvous: rank {world.rank} of {world.size} waited {timeout.total_seconds():g} s for all ranks "
                f"to call init_process_group"
            )
        time.sleep(1e-3)


def addresses() -> list[str]:
    """Return this host's IPv4 addresses, the loopback last; ``MASTER_ADDR`` first where it is set."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            found.append(socket.inet_ntoa(reply[20:24]))
    given = os.environ.get("MASTER_ADDR")
    local = sorted(found, key=lambda address: address.startswith("127."))
    return list(dict.fromkeys([*([given] if given else []), *local]))

"""Tell which ranks share a host, and over which network interface another host is reached."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915


def identity() -> str:
    """Return an identity that processes have in common if they can share memory, as 64 hexadecimal digits.

    It hashes a boot of a kernel, its namespaces of networks and of shared memory, and the file system of the latter.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):  # not Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts += [str(os.stat(f"/proc/self/ns/{space}").st_ino) for space in ("net", "ipc")]
        parts.append(str(os.stat("/dev/shm").st_dev))
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


def local_address(towards: str) -> str:
    """Return this host's IPv4 address on the way to another, which need not answer.

    Where the other is known by IPv6 alone, it is that of the interface that leads there: MPI's messages go by IPv4.

    Raises:
        OSError: the name is unknown, there is no route, or the interface on it has no IPv4 address.
    """
    try:
        return _source(socket.AF_INET, towards)
    except OSError:
        if not _has_ipv6(towards):
            raise
    scope = _scopes().get(_source(socket.AF_INET6, towards).partition("%")[0])
    address = interfaces().get(scope or "")
    if address is None:
        raise OSError(
            f"the interface {scope or 'on the way'} has no IPv4 address, by which MPI's messages go"
        )
    return address


def _source(family: socket.AddressFamily, towards: str) -> str:
    """Return this host's address on the way to another."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        return str(probe.getsockname()[0])


def _has_ipv6(host: str) -> bool:
    with suppress(OSError):
        return bool(socket.getaddrinfo(host, 9, socket.AF_INET6))
    return False


def _scopes() -> dict[str, str]:
    """Return the interface of each IPv6 address of this host."""
    found = {}
    with suppress(OSError):  # not Linux
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))] = name
    return found


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one, by its name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(reply[20:24])
    return found

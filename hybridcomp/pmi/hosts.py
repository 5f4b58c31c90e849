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

    Raises:
        OSError: the name is unknown, or there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        return str(probe.getsockname()[0])


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one, by its name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(reply[20:24])
    return found

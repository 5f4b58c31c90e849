"""Find the folder in which the ranks of this user keep their files, and identify processes on this machine.

It is ``hybridcomp-top-UID`` in ``/tmp``, or in another folder for temporary files where that cannot be, and nobody else
may enter it; or the one in ``HYBRIDCOMP_TOP``, such as the folder of a run that several hosts share.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from hybridcomp import variables

WATCHED = "watched"
_NAME = re.compile(r"rank\.[\w.-]{1,80}\.json", re.ASCII)


def switched_off() -> bool:
    """Tell whether this process is to keep no file."""
    return variables.TOP.read() is False


def folders(asked: str | None = None) -> list[Path]:
    """Return the folders where the files may be, the likeliest first.

    Args:
        asked: folder to take instead; by default the one that the environment names.
    """
    if asked is None:
        asked = named_folder()
    if asked is not None:
        return [Path(asked).absolute()]
    bases = ["/tmp"]  # also where TMPDIR is set: a job's may differ from a login's
    with suppress(OSError):  # no folder for temporary files exists
        bases.append(tempfile.gettempdir())
    return [Path(base) / f"hybridcomp-top-{user}" for base in dict.fromkeys(bases) for user in _users()]


def _users() -> list[int]:
    """Return the ids of this user: outside the user namespace that it may be root of, as in a lab, and inside."""
    own = os.getuid()
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines():
            inside, outside, count = map(int, line.split())
            if inside <= own < inside + count:
                return list(dict.fromkeys([outside + own - inside, own]))
    return [own]


def named_folder() -> str | None:
    """Return the folder that the environment names; None where it names none."""
    named = variables.TOP.read()
    return named if isinstance(named, str) else None


def make_folder() -> Path | None:
    """Make the folder for this process's file; return None where there is none that it can trust and write to."""
    asked = named_folder() is not None
    for folder in folders():
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=asked, exist_ok=True)
            if usable(folder, shared=asked):
                return folder
    return None


def usable(folder: Path, *, shared: bool) -> bool:
    """Tell whether a folder exists and is private, or need not be where ``shared``: the user has named it.

    Raises:
        OSError: the folder does not exist.
    """
    info = folder.stat() if shared else folder.lstat()
    own = info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077
    return stat.S_ISDIR(info.st_mode) and (shared or own)


def file_name(pid: int, started: int) -> str:
    """Return the name of a process's file, which no other process has."""
    host = re.sub(r"[^\w-]", "-", socket.gethostname(), flags=re.ASCII)[:40]
    return f"rank.{host}.{pid}.{started}.json"


def is_file_name(name: str) -> bool:
    """Tell whether a file is named as a rank's file is."""
    return _NAME.fullmatch(name) is not None


@functools.cache
def machine() -> str:
    """Return an identity of this machine and its process ids, unlike others': hosts may have equal names."""
    boot, namespace = "", 0
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{boot}:{namespace}" if boot else socket.gethostname()


def started_at(pid: int) -> int:
    """Return when a process of this machine started, in the kernel's ticks; 0 if it has ended, or it is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0

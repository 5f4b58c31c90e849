"""Find the folder in which the ranks of this user keep their files, and who they are on this machine.

It is ``hybridcomp-top-UID`` in ``/tmp``, or in another folder for temporary files where that cannot be, and nobody else
may enter it; or what ``HYBRIDCOMP_TOP`` says, such as the folder of a run that several hosts share.
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

VARIABLE = "HYBRIDCOMP_TOP"
OFF = "0"
_DEFAULT = ("", "1")
WATCHED = "watched"
_NAME = re.compile(r"rank\.[\w.-]{1,80}\.json", re.ASCII)


def switched_off() -> bool:
    """Tell whether this process is to keep no file."""
    return os.environ.get(VARIABLE) == OFF


def folders(asked: str | None = None) -> list[Path]:
    """Return where the files may be, the likeliest first.

    Args:
        asked: the folder instead; by default what the environment asks for.
    """
    if asked is None:
        asked = os.environ.get(VARIABLE, "")
        if asked in (OFF, *_DEFAULT):
            asked = None
    if asked is not None:
        return [Path(asked).absolute()]
    bases = ["/tmp"]  # whatever TMPDIR is: a job's may differ from a login's
    with suppress(OSError):  # nowhere to put anything
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


def make_folder() -> Path | None:
    """Make the folder for this process's file; return None where there is none that it can trust and write to."""
    asked = os.environ.get(VARIABLE, "") not in (OFF, *_DEFAULT)
    for folder in folders():
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=asked, exist_ok=True)
            if usable(folder, shared=asked):
                return folder
    return None


def usable(folder: Path, *, shared: bool) -> bool:
    """Tell whether a folder is there, and nobody else's; ``shared`` if it may be, as who named it has decided.

    Raises:
        OSError: it is not there.
    """
    info = folder.stat() if shared else folder.lstat()
    own = info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077
    return stat.S_ISDIR(info.st_mode) and (shared or own)


def file_name(pid: int, started: int) -> str:
    """Return the name of a process's file, which no other process has."""
    host = re.sub(r"[^\w-]", "-", socket.gethostname(), flags=re.ASCII)[:40]
    return f"rank.{host}.{pid}.{started}.json"


def is_file_name(name: str) -> bool:
    """Tell whether a file is named as those of ranks are."""
    return _NAME.fullmatch(name) is not None


@functools.cache
def machine() -> str:
    """Return what tells this machine, and its process ids, from others: hosts may have equal names."""
    boot, namespace = "", 0
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{boot}:{namespace}" if boot else socket.gethostname()


def started_at(pid: int) -> int:
    """Return when a process of this machine started, in the kernel's ticks; 0 if it has ended, or nobody can say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0

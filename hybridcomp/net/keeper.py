"""Keep one lab: a process of its own session that makes the hosts, holds them, and takes them down.

The keeper runs as a script (``python -I -S keeper.py JSON``) and uses the standard library alone. It makes one
network namespace for the switch and one for each host, keeps them alive by holding them open, and answers on
stdout with one line of JSON: where they are, or which step failed. Then it reads commands from stdin:

    end RUN     end every process of that run, answer "done"

At the end of stdin, which comes when the parent closes it or dies for any reason, and when the parent is gone
though a child of it still holds the pipe, the keeper ends every process of the lab. The namespaces, their links and
their shaping have no name in the file system: the kernel removes them with the last process and the last open
file that refers to them, so that nothing can be left behind. Only the control groups of hosts that may not use all
cores have names: the keeper removes them at its end, and empty ones stay where it is killed.

A process belongs to the lab when it is in one of its network namespaces or carries its mark in its
environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
GROUPS = "/sys/fs/cgroup"
# Period in which a host gets its cores: when it has used them up, it stands still. A shorter one leaves it less than
# its part where others run, too, since it waits for a core after each.
PERIOD_MICROSECONDS = 10_000
PARENT_POLL_SECONDS = 0.5
END_SECONDS = 10.0
MARK = "HYBRIDCOMP_LAB_ID"  # a variable of hybridcomp.variables, which this program does without


class StepError(Exception):
    """Step of bringing the lab up that the machine refused."""


def _libc(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) != 0:
        code = ctypes.get_errno()
        raise StepError(f"{name} was refused: {os.strerror(code)}")


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    except FileNotFoundError as error:
        raise StepError(f"the program {command[0]!r} is missing; it is part of iproute2") from error
    if done.returncode != 0:
        raise StepError(f"`{' '.join(command)}` was refused: {done.stderr.strip() or done.returncode}")


def shaping(device: str, bits_per_second: int, burst_bytes: int) -> list[str]:
    """Return the command that limits what leaves through ``device``."""
    return ["tc", "qdisc", "add", "dev", device, "root", "handle", "1:", "tbf",
            "rate", f"{bits_per_second}bit", "burst", str(burst_bytes), "latency", "100ms"]  # fmt: skip


def _shape(device: str, bits_per_second: int | None, burst_bytes: int) -> None:
    if bits_per_second is not None:
        _run(*shaping(device, bits_per_second, burst_bytes))


def _make_group(name: str, cores: float) -> str:
    """Make a control group that gives its processes so many cores at most; return its directory, of either version."""
    old = os.path.isdir(f"{GROUPS}/cpu")
    directory = f"{GROUPS}/cpu/{name}" if old else f"{GROUPS}/{name}"
    quota = round(cores * PERIOD_MICROSECONDS)
    try:
        os.mkdir(directory)
        if old:
            _write(f"{directory}/cpu.cfs_period_us", str(PERIOD_MICROSECONDS))
            _write(f"{directory}/cpu.cfs_quota_us", str(quota))
        else:  # without the controller there is no such file
            _write(f"{directory}/cpu.max", f"{quota} {PERIOD_MICROSECONDS}")
    except OSError as error:
        _remove_groups([directory])
        code = errno.errorcode.get(error.errno or 0, "")
        raise StepError(
            f"limiting a host to {cores:g} cores takes root and cgroups' cpu controller: {directory} is not to be had "
            f"({code})"
        ) from error
    return directory


def _write(path: str, text: str) -> None:
    with open(path, "r+", encoding="ascii") as file:
        file.write(text)


def _make_groups(config: dict[str, Any]) -> list[str | None]:
    """Make the control groups of the hosts that may not use all cores; return each host's directory, or None."""
    found: list[str | None] = []
    try:
        for host, cores in enumerate(config["cores"], 1):
            name = f"hybridcomp-lab-{config['token']}-{host}"
            found.append(None if cores is None else _make_group(name, cores))
    except StepError:
        _remove_groups(found)
        raise
    return found


def _remove_groups(directories: list[Any]) -> None:
    for directory in filter(None, directories):
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def _enter_user_namespace() -> None:
    """Become root of a user namespace of our own, where an ordinary user may make network namespaces."""
    uid, gid = os.getuid(), os.getgid()
    _libc("unshare", CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _new_network() -> int:
    """Move this process into a fresh network namespace and return a file descriptor that keeps it alive."""
    _libc("unshare", CLONE_NEWNET)
    _run("ip", "link", "set", "lo", "up")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _make_hosts(config: dict[str, Any]) -> list[int]:
    """Make the switch and the hosts, each with a link to it; return their descriptors, the switch first."""
    subnet = config["subnet"]
    switch = _new_network()
    _run("ip", "link", "add", "br0", "type", "bridge")
    _run("ip", "addr", "add", f"{subnet}.254/24", "dev", "br0")
    _run("ip", "link", "set", "br0", "up")
    descriptors = [switch]
    for host in range(1, config["hosts"] + 1):
        descriptors.append(_new_network())
        _run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", f"port{host}",
             "netns", f"/proc/{os.getpid()}/fd/{switch}")  # fmt: skip
        _run("ip", "addr", "add", f"{subnet}.{host}/24", "dev", "eth0")
        _run("ip", "link", "set", "eth0", "up")
        _shape("eth0", *config["links"][host - 1])
        _libc("setns", switch, CLONE_NEWNET)
        _run("ip", "link", "set", f"port{host}", "master", "br0", "up")
    return descriptors


def _make_loopback(config: dict[str, Any]) -> list[int]:
    """Make one namespace whose loopback is the shared, shaped link."""
    only = _new_network()
    # Use Ethernet's size: a packet of the loopback's usual 64 KiB would not fit a slow link's token bucket.
    _run("ip", "link", "set", "lo", "mtu", "1500")
    _shape("lo", *config["links"][0])
    return [only]


def _processes(namespaces: set[tuple[int, int]], mark: bytes) -> tuple[list[int], bool]:
    """Return the ids of the processes in the namespaces or with the mark in their environment; and whether there may
    be more, whose environment is not there yet."""
    found = []
    unclear = False
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        inside = False
        with contextlib.suppress(OSError):  # the process ended, or it is another user's
            info = os.stat(f"/proc/{entry}/ns/net")
            inside = (info.st_dev, info.st_ino) in namespaces
        with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
            unclear |= _starting(int(entry))
            inside = inside or any(part.startswith(mark) for part in file.read().split(b"\0"))
        if inside:
            found.append(int(entry))
    return found, unclear


def _stat(process: int) -> list[str]:
    """Return the fields of proc(5)'s ``stat`` for a process, from its state on, which is the third field."""
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _starting(process: int) -> bool:
    """Tell whether a process is inside execve(2), with its old environment gone and the new one to come."""
    fields = _stat(process)
    # fields[20] is vsize, which is 0 for the kernel's own threads; fields[47] is env_start.
    return int(fields[20]) > 0 and int(fields[47]) == 0


def _dying(process: int) -> bool:
    """Tell whether a killed process is still on its way out; its environment goes before its files do."""
    try:
        return _stat(process)[0] not in "ZX"
    except OSError:
        return False


def _end(namespaces: set[tuple[int, int]], mark: bytes) -> None:
    """End those processes, again and again until none is left: one may start another meanwhile."""
    deadline = time.monotonic() + END_SECONDS
    killed: set[int] = set()
    while time.monotonic() < deadline:
        found, unclear = _processes(namespaces, mark)
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        killed.update(found)
        if not found and not unclear and not any(map(_dying, killed)):
            return
        time.sleep(0.02)


def _commands(parent: int) -> Any:
    """Yield the parent's lines until it closes the pipe or is gone."""
    pending = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], PARENT_POLL_SECONDS)[0]:
            continue
        data = os.read(0, 4096)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        yield from (line.decode() for line in lines)


def _say(answer: object) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def main(config: dict[str, Any]) -> int:
    """Make the lab that ``config`` asks for, hold it while the parent wants it, and take it down."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)  # meant for the parent, whose end is what counts
    mark = f"{MARK}={config['token']}.".encode()
    namespaces: set[tuple[int, int]] = set()
    groups: list[str | None] = []
    try:
        if config["kind"] == "namespaces":
            groups = _make_groups(config)
        descriptors: list[int] = []
        if config["kind"] != "shared-memory":
            if config["user_namespace"]:
                _enter_user_namespace()
            descriptors = (_make_hosts if config["kind"] == "namespaces" else _make_loopback)(config)
        namespaces = {(os.fstat(fd).st_dev, os.fstat(fd).st_ino) for fd in descriptors}
    except (StepError, OSError) as error:
        _remove_groups(groups)
        _say({"error": str(error)})
        return 1
    _say({"networks": [f"/proc/{os.getpid()}/fd/{fd}" for fd in descriptors],
          "user": f"/proc/{os.getpid()}/ns/user" if config["user_namespace"] else None,
          "groups": groups})  # fmt: skip
    try:
        for line in _commands(config["parent"]):
            _end(set(), f"{MARK}={line.removeprefix('end ')}".encode() + b"\0")
            _say("done")
    finally:
        _end(namespaces, mark)
        _remove_groups(groups)
        shutil.rmtree(config["directory"], ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))

"""Whatever ends the process that has a lab up, nothing of the lab stays."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(90)

# Ranks that ignore every polite signal and have a child that left their session.
STUBBORN = "trap '' TERM INT HUP; setsid sleep 986 & echo up; sleep 987; sleep 988"
PROGRAM = """
import signal, sys
from hybridcomp.net import Lab
signal.signal(signal.SIGINT, signal.default_int_handler)
with Lab(2, "1gbit", kind=sys.argv[1]) as lab:
    process = lab.popen(["sh", "-c", sys.argv[2]], 2)
    print(lab.environment()["HYBRIDCOMP_LAB_ID"].split(".")[0], lab._keeper.pid, lab._directory, flush=True)
    if sys.argv[3] == "raise":
        raise ValueError("as asked")
    process.wait()
"""


def of_the_lab(token: str) -> list[str]:
    """Return the names of the living processes that carry the lab's mark."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and f"HYBRIDCOMP_LAB_ID={token}.".encode() in (entry / "environ").read_bytes()
            ):
                found.append((entry / "comm").read_text().strip())
    return found


@pytest.mark.lab
@pytest.mark.parametrize("kind", ["namespaces", "shared-memory"])
@pytest.mark.parametrize("how", ["raise", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_is_left(how: str, kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "namespaces":
        request.getfixturevalue("namespaces")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind, STUBBORN, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            token, keeper, directory = told(process, ranks=0 if how == "raise" else 4)
            if how != "raise":
                assert len(of_the_lab(token)) >= 4
                process.send_signal(getattr(signal, how))
            assert process.wait(30) != 0
        finally:
            process.kill()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (of_the_lab(token) or gone_not_yet(int(keeper))):
        time.sleep(0.05)
    assert of_the_lab(token) == []
    assert not gone_not_yet(int(keeper))
    assert not Path(directory).exists()


def told(process: subprocess.Popen[str], ranks: int) -> list[str]:
    """Read until the program has said what it has up, and so many ranks that they are; in any order."""
    assert process.stdout is not None
    words: list[str] = []
    for line in process.stdout:
        if line == "up\n":
            ranks -= 1
        else:
            words = line.split()
        if words and ranks <= 0:
            return words
    raise AssertionError(process.communicate()[1])


def gone_not_yet(pid: int) -> bool:
    """Tell whether a process lives; a zombie waits for its parent only."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_keeper_outlives_a_child_that_holds_the_pipe() -> None:
    """A forked child of the lab's process keeps the pipe open; the keeper still sees the process go."""
    program = """
import os, time
from hybridcomp.net import Lab
lab = Lab(1, kind="shared-memory").__enter__()
if os.fork() == 0:
    os.close(1); os.close(2)
    time.sleep(15)
    os._exit(0)
print(lab._keeper.pid, flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    keeper = int(done.stdout)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and gone_not_yet(keeper):
        time.sleep(0.05)
    assert not gone_not_yet(keeper)

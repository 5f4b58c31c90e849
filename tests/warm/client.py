"""Stand-in for Python: asks a server for a process, and is its shadow. See the package."""

import array
import json
import os
import signal
import socket
import sys
import time

UNDERSTOOD = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}
START_SECONDS = 150.0  # seconds for the start of a server, which imports PyTorch beside all that a test runs
FORWARDED = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT]


def main(folder: str, arguments: list[str]) -> None:
    known = bool(arguments) and (arguments[0] in ("-c", "-m") or not arguments[0].startswith("-"))
    settings = {name for name in os.environ if name.startswith("PYTHON")} - UNDERSTOOD
    if known and not settings:
        number = int(os.environ.get("PMI_RANK", "0")) % 2
        run(os.path.join(folder, str(number)), arguments)
    os.execv(sys.executable, [sys.executable, *arguments])


def run(path: str, arguments: list[str]) -> None:
    """Have a server run a program; does not return if the server takes it."""
    connection = connect(path)
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [number for number in files if number != connection.fileno() and is_open(number)]
    wanted = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "files": files}
    body = json.dumps(wanted).encode("utf-8", "surrogateescape")
    passed = array.array("i", files)
    head = len(body).to_bytes(8, "little")
    connection.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
    connection.sendall(body)
    answers = connection.makefile("rb")
    pid = int(answers.readline() or "0")
    if pid == 0:  # the server declines
        connection.close()
        return
    for number in FORWARDED:
        signal.signal(number, lambda received, _: os.kill(pid, received))
    status = int(answers.readline() or "9")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def connect(path: str) -> socket.socket:
    until = time.monotonic() + START_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            if time.monotonic() > until:
                sys.exit(f"warm Python: nobody listens at {path}")
            time.sleep(0.02)
        else:
            return connection


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:  # the descriptor that listed them
        return False
    return True

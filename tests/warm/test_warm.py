"""The executable that stands in Python's place does as Python does."""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torch.harness import mpiexec
from tests.warm import python
from tests.warm.client import connect

pytestmark = pytest.mark.timeout(120)
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}
TELL = """
import json, os, sys
print(json.dumps([sys.argv[1:], sys.path, os.getcwd(), sys.executable, __name__, sys.stdin.read(), __file__,
                  {k: v for k, v in os.environ.items() if k[:5] != "TORCH"}, sorted(os.listdir("/proc/self/fd")),
                  os.getsid(0), "torch" in sys.modules]))
print("beside", file=sys.stderr)
sys.exit(7)
"""


def run(*command: str, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=ENVIRONMENT | extra,
        input="in",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("how", ["script", "module"])
def test_a_program_finds_what_it_finds_in_python(how: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "told.py").write_text(TELL)
    start = ["there/told.py"] if how == "script" else ["-m", "told"]
    cold, warm = (
        run(executable, *start, "a b", "-c", cwd=tmp_path, PYTHONPATH=f"{tmp_path}/there:/nowhere")
        for executable in (sys.executable, python())
    )
    assert (warm.returncode, warm.stderr) == (cold.returncode, cold.stderr) == (7, "beside\n")
    want, got = json.loads(cold.stdout), json.loads(warm.stdout)
    assert want[3] == sys.executable
    assert got[3] == python()
    assert (want.pop(), got.pop()) == (False, True)
    assert [x for x in got if x != python()] == [x for x in want if x != sys.executable]


def test_errors_and_signals_end_it_as_they_end_python() -> None:
    done = run(python(), "-c", "raise ValueError(3)")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: 3"
    done = run(python(), "-c", "import os; os.kill(os.getpid(), 11)")
    assert done.returncode == -signal.SIGSEGV
    done = run(python(), "-c", "import atexit; atexit.register(print, 'end'); print('well')")
    assert done.stdout == "well\nend\n"


def await_end(program: int, seconds: float) -> None:
    """Wait until a program has ended, and the server, which does things in their order, has seen that."""
    try:
        process = os.pidfd_open(program)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([process], [], [], seconds)
    finally:
        os.close(process)
    assert ended
    assert run(python(), "-c", "").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1])
def test_a_signal_gets_to_the_program(number: signal.Signals) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen(
        [python(), "-c", code], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        program = int(process.stdout.readline())
        assert program != process.pid
        process.send_signal(number)
        assert process.wait(timeout=20) == -number
    await_end(program, 20)
    assert not Path(f"/proc/{program}").exists()


def test_a_program_whose_client_dies_before_it_is_told_ends() -> None:
    """The server stands still from before the request until its client is gone."""
    assert run(python(), "-c", "").returncode == 0  # it is there
    with connect(os.path.join(os.path.dirname(python()), "0")) as connection:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        server = int.from_bytes(credentials[:4], sys.byteorder)
        os.kill(server, signal.SIGSTOP)
        try:
            wanted = {"arguments": ["-c", "import time; time.sleep(60)"], "environment": ENVIRONMENT}
            body = json.dumps({**wanted, "folder": "/", "files": [0]}).encode()
            head, files = len(body).to_bytes(8, "little"), array.array("i", [0])
            connection.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
            connection.sendall(body)
            connection.close()
        finally:
            os.kill(server, signal.SIGCONT)
    assert run(python(), "-c", "").returncode == 0  # it has answered the one before
    children = Path(f"/proc/{server}/task/{server}/children")
    for program in children.read_text().split():
        await_end(int(program), 10)
    assert not children.read_text().split()


def test_what_it_does_not_know_is_left_to_python() -> None:
    loaded = "import sys; print('torch' in sys.modules)"
    assert run(python(), "-c", loaded).stdout == "True\n"
    assert run(python(), "-I", "-c", loaded).stdout == "False\n"
    assert run(python(), "-c", loaded, PYTHONHASHSEED="0").stdout == "False\n"
    assert run(python(), "-c", loaded, OMP_NUM_THREADS="2").stdout == "False\n"


def test_what_it_runs_starts_others_as_fast() -> None:
    """Other programs start as fast though loaded modules have put variables of theirs into the environment."""
    loaded = "import sys; print('torch' in sys.modules)"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {loaded!r}])"
    assert run(python(), "-c", nested).stdout == "True\n"


def test_neighbouring_ranks_hash_differently() -> None:
    done = mpiexec(2, "-c", "import os; os.write(1, f'{hash(\"x\")}\\n'.encode())")
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 2


FILES = """
import os, sys
for number in range(3, 40):
    read, write = os.pipe()
    os.write(write, b"%d" % number)
    os.dup2(read, 100 + number)  # the next pipe takes the same numbers
    os.close(read)
    os.close(write)
for number in range(3, 40):
    os.dup2(100 + number, number)
    os.close(100 + number)
ask = "import gc, os; gc.collect(); print(*(os.read(fd, 9).decode() for fd in range(3, 40)))"
os.execv(sys.argv[1], [sys.argv[1], "-c", ask])
"""


def test_files_of_every_number_stay_open() -> None:
    """The server has files of the same numbers, and objects that close them."""
    started = [
        subprocess.Popen(
            [python(), "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1, env=ENVIRONMENT
        )
        for _ in range(4)
    ]
    for other in started:
        assert other.stdout is not None
        assert other.stdout.read(2) == b"1\n"
    done = run(sys.executable, "-c", FILES, python())
    for other in started:
        other.communicate(b"\n", timeout=20)
    assert done.stdout.split() == [str(number) for number in range(3, 40)], done.stderr
    assert [other.returncode for other in started] == [0] * 4

"""Fork for every program that a client asks for, with PyTorch loaded. See the package.

Runs until its standard input ends. A client that is gone takes its process with it.
"""

from __future__ import annotations

import array
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import types
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

# Without torch's pipelining and its ZeRO, whose import hybridcomp waits for.
LOADED = [
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.optim",
]
# Prefixes of variables that these modules read when they are loaded.
SETTINGS = (
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "KMP_",
    "GOMP_",
    "TORCH",
    "PYTORCH",
    "NPY_",
    "NUMPY_",
    "ATEN_",
    "LD_",
)
PR_SET_PDEATHSIG = 1
kept: list[object] = []  # objects for the life of a process
HIGH = 512  # above the numbers of files that anybody passes


def settings(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(SETTINGS)}


class Server:
    """Server of clients; :meth:`serve` returns in a process that was forked, with what is to be run there."""

    def __init__(self, path: str, environment: dict[str, str], put: dict[str, str]) -> None:
        """Listen at ``path``; ``environment`` is that in which modules were loaded, and ``put`` what they added."""
        self._settings, self._put = settings(environment), put
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._watch(self._listener, self._accept)
        self._watch(sys.stdin, lambda: leave(path))

    def serve(self) -> dict[str, Any]:
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._selector.get_map() and (wanted := key.data()) is not None:
                    return wanted  # type: ignore[no-any-return]

    def _watch(self, what: Any, do: Callable[[], Any]) -> None:
        self._selector.register(what, selectors.EVENT_READ, do)

    def _accept(self) -> dict[str, Any] | None:
        client, _ = self._listener.accept()
        client.settimeout(20)
        try:
            return self._start(client)
        except (OSError, ValueError, EOFError):  # it died
            client.close()
            return None

    def _start(self, client: socket.socket) -> dict[str, Any] | None:
        files = array.array("i")
        head, rights, _, _ = client.recvmsg(8, socket.CMSG_LEN(256 * files.itemsize))
        for _, kind, data in rights:
            if kind == socket.SCM_RIGHTS:
                files.frombytes(data[: len(data) - len(data) % files.itemsize])
        try:
            wanted = json.loads(
                _exactly(client, int.from_bytes(head, "little")).decode("utf-8", "surrogateescape")
            )
            # A program that was run here starts others with what loaded modules have put into its environment.
            own = dict(wanted["environment"].items() - self._put.items())
            if settings(own) != self._settings:
                client.sendall(b"0\n")
                client.close()
                return None
            pid = os.fork()
            if pid == 0:
                self._forget(client)
                become(dict(zip(wanted["files"], files, strict=True)))
                del files[:]
                return wanted  # type: ignore[no-any-return]
        finally:
            for number in files:
                if number < HIGH:
                    os.close(number)
        with contextlib.suppress(OSError):  # it died already: that is seen below, and the program is ended
            client.sendall(b"%d\n" % pid)
        process = os.pidfd_open(pid)
        self._watch(client, lambda: self._gone(client, pid))
        self._watch(process, lambda: self._ended(client, pid, process))
        return None

    def _forget(self, client: socket.socket) -> None:
        """Let no object that goes in a new process close a file that the program has by the same number."""
        for key in [*self._selector.get_map().values()]:
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.detach()
        client.detach()
        kept.append(self._selector)

    def _gone(self, client: socket.socket, pid: int) -> None:
        self._selector.unregister(client)
        os.kill(pid, signal.SIGKILL)

    def _ended(self, client: socket.socket, pid: int, process: int) -> None:
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(process)
        os.close(process)
        if client in self._selector.get_map():
            self._selector.unregister(client)
        with contextlib.suppress(OSError):
            client.sendall(b"%d\n" % status)
        client.close()


def _exactly(client: socket.socket, count: int) -> bytes:
    body = b""
    while len(body) < count:
        more = client.recv(count - len(body))
        if not more:
            raise EOFError
        body += more
    return body


def leave(path: str) -> None:
    shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    os._exit(0)


def become(files: dict[int, int]) -> None:
    """Hold, in a new process, the files that the client holds, by the same numbers, and no others."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    held = {number: fcntl.fcntl(file, fcntl.F_DUPFD, HIGH) for number, file in files.items()}
    os.closerange(0, HIGH)
    for number, file in held.items():
        os.dup2(file, number, inheritable=True)
        os.close(file)


def register(backends: Iterable[EntryPoint]) -> None:
    """Do what the end of ``import torch`` does with plugins."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        for backend in backends:
            backend.load()()


def run(
    wanted: dict[str, Any], path: list[str], loaded: dict[str, str], backends: Iterable[EntryPoint]
) -> None:
    """Run a program as Python does.

    Args:
        wanted: program that the client asks for.
        path: search path of modules, without what Python puts before the standard library.
        loaded: variables that loaded modules have put into the environment.
        backends: torch's plugins that are installed.
    """
    os.environ.clear()
    os.environ.update(loaded | wanted["environment"])
    os.chdir(wanted["folder"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.modules["numpy"].random.seed()
    first, *rest = wanted["arguments"]
    before = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    if first == "-m":
        sys.path[:] = [os.getcwd(), *before, *path]
        sys.argv[:] = ["-m", *rest[1:]]
        register(backends)
        runpy._run_module_as_main(rest[0])
        return
    if first == "-c":
        code, name, folder = rest.pop(0), "<string>", ""
    else:
        with open(first, "rb") as file:
            code, name, folder = file.read(), os.path.abspath(first), os.path.dirname(os.path.realpath(first))
        main.__file__ = name
    sys.path[:] = [folder, *before, *path]
    sys.argv[:] = [first, *rest]
    register(backends)
    exec(compile(code, name, "exec"), vars(main))


if __name__ == "__main__":
    where, sys.executable = sys.argv[1:]
    found = dict(os.environ)
    backends = entry_points(group="torch.backends")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # the program's business: it may be of another checkout
    for module in LOADED:
        importlib.import_module(module)
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD")
    os.environ |= {k: v for k, v in found.items() if k == "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread"
    gc.collect()
    gc.freeze()
    library = list(sys.path[1:]) if sys.path[0] == os.path.dirname(__file__) else list(sys.path)
    put = dict(os.environ.items() - found.items())
    run(Server(where, found, put).serve(), library, put, backends)

"""A Slurm cluster of four nodes on this machine: daemons on the hosts of a lab, which ends them all with itself."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hybridcomp.net import Lab
from tests.slurm.configuration import HEAD, NODES, write_configuration
from tests.train.harness import ROOT, environment

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged", "ip", "nsenter", "unshare")
_UP_SECONDS = 60.0
_ANSWER_SECONDS = 60.0
_POLL_SECONDS = 0.2


def refusal() -> str | None:
    """Return why this machine cannot run the cluster, or None."""
    if os.geteuid() != 0:
        return "a Slurm cluster on one machine takes root: network namespaces, and daemons that start jobs"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"missing: {', '.join(missing)} (Debian: apt-get install slurm-wlm munge iproute2)"
    return None


class Cluster:
    """A context manager: the cluster is up inside the ``with`` block.

    Its nodes n1 to n4 are hosts 1 to 4 of a lab; slurmctld and munged, with a key of its own, are on host 5. The
    daemons have names of hosts and mounts of their own.

    Attributes:
        work: folder from which jobs are submitted, with the repository's scripts.
    """

    def __init__(self) -> None:
        self._lab = Lab(HEAD, None, kind="namespaces")
        self._stack = contextlib.ExitStack()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._folder = Path()
        self.work = Path()

    def __enter__(self) -> Cluster:
        # Short, as a socket's path is; beneath /tmp, which munged trusts.
        self._folder = Path(tempfile.mkdtemp(prefix="hybridcomp-slurm-", dir="/tmp"))
        self._folder.chmod(0o755)  # as munge wants its socket's
        self._stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        try:
            write_configuration(self._folder)
            self.work = self._folder / "work"
            self.work.mkdir()
            for name in ("slurm", "benchmarks", "tests"):
                (self.work / name).symlink_to(ROOT / name)
            self._stack.callback(self._reap)  # once the lab has ended them
            self._stack.enter_context(self._lab)
            self._start_daemons()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- jobs ------------------------------------------------------------------------------------------

    def command(self, *argv: str, seconds: float = _ANSWER_SECONDS, **variables: str) -> str:
        """Return what a command of Slurm prints, on the head."""
        done = subprocess.run(
            self._lab.host_command(HEAD, argv),
            cwd=self.work,
            env=self._environment(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}{self.logs()}"
        return done.stdout

    def submit(self, *argv: str, **variables: str) -> str:
        """Submit a script, with what sbatch takes before and the script takes after it; returns the job's id."""
        return self.command("sbatch", "--parsable", *argv, **variables).strip()

    def job(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job."""
        text = self.command("scontrol", "show", "job", "--oneliner", job)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait(self, job: str, seconds: float) -> dict[str, str]:
        """Return the job, once it has ended for good."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.job(job)
            if found["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"):
                return found
            if time.monotonic() > deadline:
                raise AssertionError(f"job {job} did not end within {seconds:g} s: {found}{self.logs()}")
            time.sleep(_POLL_SECONDS)

    # -- nodes -----------------------------------------------------------------------------------------

    def lose(self, node: int) -> None:
        """Lose a node as by a power failure: its link goes down, and then whatever ran on it is gone."""
        self._on(node, "ip", "link", "set", "eth0", "down")
        here = self._on(node, "readlink", "/proc/self/ns/net")
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and os.readlink(entry / "ns/net") == here:
                    os.kill(int(entry.name), signal.SIGKILL)
        self._daemons.pop(f"n{node}").wait(_ANSWER_SECONDS)

    def recover(self, node: int, *, idle: bool = True) -> None:
        """Bring the node back, so that Slurm uses it again; with ``idle``, wait until all nodes have nothing to do."""
        self._on(node, "ip", "link", "set", "eth0", "up")
        self._start_node(node)
        if idle:
            self._wait_for_nodes()

    def lighthouse(self) -> str:
        """Start torchft's lighthouse on the head; return its address."""
        program = str(Path(sys.executable).with_name("torchft_lighthouse"))
        waits = "--min_replicas 2 --join_timeout_ms 1000 --quorum_tick_ms 50 --heartbeat_timeout_ms 3000"
        self._daemon(HEAD, program, *waits.split(), "--bind", "[::]:29510", name="lighthouse")
        return "http://head:29510"

    # -- inside ----------------------------------------------------------------------------------------

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that a user of this cluster has exported: the facts of the site."""
        site = {
            "SLURM_CONF": str(self._folder / "slurm.conf"),
            "HYBRIDCOMP_VENV": sys.prefix,
            "HYBRIDCOMP_INTERFACE": "eth0",
            "FI_PROVIDER": "tcp",
            "MPIR_CVAR_CH4_NETMOD": "ofi",
            # No name server answers here, and torch would warn on every connection.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        return environment(**{**site, **variables})

    def _on(self, host: int, *argv: str) -> str:
        done = subprocess.run(
            self._lab.host_command(host, argv),
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            check=True,
        )
        return done.stdout.strip()

    def _daemon(self, host: int, *argv: str, name: str) -> None:
        with (self._folder / "log" / f"{name}.out").open("a") as log:
            process = subprocess.Popen(
                self._lab.host_command(host, argv),  # which becomes the daemon
                env=self._environment({}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._daemons[name] = process

    def _named(self, name: str, command: str) -> list[str]:
        """Return the command on a host of that name, with mounts of its own: slurmd mounts control groups.

        The names of all hosts lead to them, as on a cluster.
        """
        mounted = f"mount --bind {self._folder}/hosts /etc/hosts"
        return ["unshare", "--uts", "--mount", "sh", "-c", f"{mounted} && hostname {name} && exec {command}"]

    def _reap(self) -> None:
        for process in self._daemons.values():
            process.wait(_ANSWER_SECONDS)

    def _start_daemons(self) -> None:
        f = self._folder
        self._daemon(
            HEAD, "munged", "--foreground", "--force", f"--key-file={f}/munge.key", f"--socket={f}/munge.socket",
            f"--pid-file={f}/munge.pid", f"--log-file={f}/log/munged.log", f"--seed-file={f}/munge.seed",
            name="munged",
        )  # fmt: skip
        self._wait_until("munged has made its socket", (f / "munge.socket").exists)
        self._daemon(HEAD, *self._named("head", f"slurmctld -D -f {f}/slurm.conf"), name="slurmctld")
        for node in range(1, NODES + 1):
            self._start_node(node)
        self._wait_for_nodes()

    def _start_node(self, node: int) -> None:
        run = f"slurmd -D -N n{node} -f {self._folder}/slurm.conf"
        self._daemon(node, *self._named(f"n{node}", run), name=f"n{node}")

    def _wait_for_nodes(self) -> None:
        sinfo = self._lab.host_command(HEAD, ["sinfo", "--noheader", "--format=%T %D"])

        def idle() -> bool:
            done = subprocess.run(
                sinfo,
                env=self._environment({}),
                capture_output=True,
                text=True,
                timeout=_ANSWER_SECONDS,
                check=False,
            )
            return done.stdout.split() == ["idle", str(NODES)]

        self._wait_until("all nodes are idle", idle)

    def _wait_until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _UP_SECONDS
        while not holds():
            ended = [name for name, process in self._daemons.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                why = f"ended: {', '.join(ended)}" if ended else f"not within {_UP_SECONDS:g} s"
                raise AssertionError(f"waited until {what}; {why}{self.logs()}")
            time.sleep(_POLL_SECONDS)

    def logs(self) -> str:
        """Return the ends of all daemons' and jobs' output, for a message."""
        files = [*sorted((self._folder / "log").glob("*.out")), *sorted(self.work.glob("slurm-*.out"))]
        return "".join(f"\n-- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)

"""Run labs: hosts with shaped links between them, and MPI ranks across them."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import subprocess
import sysconfig
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridcomp import variables
from hybridcomp.errors import ConfigError
from hybridcomp.launcher import SHARED_BYTES, SHARED_BYTES_TCP, check_room, find_mpiexec
from hybridcomp.net import keeper, launch
from hybridcomp.net.hosts import cores_of, rates_of, slowest
from hybridcomp.net.launch import LabError
from hybridcomp.net.process import KeeperProcess
from hybridcomp.net.rate import Rate

KINDS = ("auto", "namespaces", "loopback", "shared-memory")
SUBNET = "10.9.0"
MAX_HOSTS = 128
UP_SECONDS = 60.0
END_SECONDS = 5.0  # time for mpiexec to end its ranks itself

# Bytes/s between hosts of this machine, about; the cores bound it.
_UNSHAPED = 1_500_000_000
_LATENCY = "1.5e-5"  # seconds of a small message between them, about


class Lab:
    """Hosts on one machine, each behind a link of its own that is shaped in the direction out of the host.

    A context manager: the hosts exist inside the ``with`` block, and everything that runs on them is ended at
    its end, also when this process is killed. Several labs may be up at once; none of them is visible from
    outside.

    Args:
        hosts: number of hosts, 1 to 128; host ``i`` (from 1) is 10.9.0.i inside the lab.
        rate: the speed of the links in ``tc``'s syntax ("200mbit", "1gbit"), one for all or one for each host
            ("1gbit,1gbit,200mbit", or a sequence); "none" or None leaves a link unshaped.
        kind: "namespaces" (one network namespace a host; ranks of one host share memory), "loopback" (one
            shaped loopback that all ranks share and speak TCP over), "shared-memory" (this machine as it is),
            or "auto": the first of these that the machine allows.
        cores: number of this machine's processor cores that all ranks of a host may use together, by a control group,
            as root: one number for all or one for each host (0.25, "all,all,0.25"); "all" or None: no limit.
        mpiexec: the launcher; by default the one of this Python environment, or else of PATH.

    Attributes:
        kind: kind that is up, never "auto".
        rate: rate of the slowest link.
        rates, cores: values of each host.
        notes: sentences for the user: differences from the request, and their reasons.

    Raises:
        ConfigError: an argument is wrong.
        LabError: on entering, the machine refuses this kind of lab.
    """

    def __init__(
        self,
        hosts: int,
        rate: str | Rate | Sequence[str | Rate | None] | None = "1gbit",
        *,
        kind: str = "auto",
        cores: str | float | Sequence[float | None] | None = None,
        mpiexec: str | None = None,
    ) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ConfigError(f"a lab has 1 to {MAX_HOSTS} hosts, not {hosts}")
        if kind not in KINDS:
            raise ConfigError(f"unknown kind of lab {kind!r}; the kinds are {', '.join(KINDS)}")
        self.hosts = hosts
        self.rates = rates_of(rate, hosts)
        self.rate = slowest(self.rates)
        self.cores = cores_of(cores, hosts)
        self.kind = kind
        self.mpiexec = mpiexec
        self.notes: list[str] = []
        self._asked = kind
        self._token = ""
        self._runs = itertools.count(1)
        self._marks: weakref.WeakKeyDictionary[subprocess.Popen[Any], str] = weakref.WeakKeyDictionary()
        self._keeper: KeeperProcess | None = None
        self._directory = Path()
        self._networks: list[str] = []
        self._groups: list[str | None] = []
        self._user: str | None = None
        self._agent = Path()

    def __enter__(self) -> Lab:
        if self._keeper is not None:
            raise LabError("this lab is already up")
        self.mpiexec = self.mpiexec or find_mpiexec()
        self.notes = []
        candidates = [self._asked] if self._asked != "auto" else list(KINDS[1:])
        refusals: dict[str, list[str]] = {}  # kinds by what was refused
        for kind in candidates:
            try:
                self._up(kind)
            except LabError as error:
                refusals.setdefault(str(error), []).append(kind)
                continue
            self.kind = kind
            self._note(_listed(refusals))
            return self
        raise LabError(f"no lab of kind {self._asked!r} on this machine. {_listed(refusals)}")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._down()

    def _up(self, kind: str) -> None:
        assert self.mpiexec is not None
        if kind == "loopback" and (len(set(self.rates)) > 1 or any(self.cores)):
            raise LabError("it does not tell hosts apart: they have one rate, and all cores")
        if kind != "shared-memory":
            launch.require_hydra(self.mpiexec, kind)
            missing = [program for program in ("ip", "tc", "nsenter") if shutil.which(program) is None]
            if missing:
                raise LabError(f"missing: {', '.join(missing)} (packages iproute2 and util-linux)")
        self._token = secrets.token_hex(8)
        self._directory = Path(tempfile.mkdtemp(prefix="hybridcomp-lab-"))
        config = {
            "kind": kind,
            "hosts": self.hosts,
            "subnet": SUBNET,
            "links": [(rate.bits_per_second, rate.burst_bytes) for rate in self.rates],
            "cores": self.cores,
            "user_namespace": kind != "shared-memory" and os.geteuid() != 0,
            "token": self._token,
            "directory": str(self._directory),
            "parent": os.getpid(),
        }
        self._keeper = KeeperProcess(config)
        try:
            answer = self._keeper.answer(UP_SECONDS)
            if "error" in answer:
                raise LabError(answer["error"] + launch.hint(answer["error"]))
            self._networks, self._user = answer["networks"], answer["user"]
            if kind == "namespaces":
                self._groups = answer["groups"]
                self._agent = launch.write_agent(self._directory, self._networks[1:], self._groups)
            self._try_entering()
        except BaseException:
            self._down()
            raise

    def _try_entering(self) -> None:
        if self._networks:
            done = subprocess.run(
                [*self._enter(0), "true"],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                check=False,
            )
            if done.returncode != 0:
                raise LabError(f"the namespace cannot be entered: {done.stderr.strip()}")

    def _down(self) -> None:
        running, self._keeper = self._keeper, None
        if running is None:
            return
        running.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _note(self, refusals: str) -> None:
        if refusals:
            self.notes.append(f"This machine does not allow a better lab: {refusals}.")
        if self.kind == "loopback":
            self.notes.append(f"All ranks share one loopback at {self.rate}; hosts are not told apart.")
        if self.kind == "shared-memory":
            self.notes.append(
                "The ranks talk through shared memory, which no rate limits: this shows that things work, "
                "and speed is not the point."
            )

    def mpi_command(self, argv: Sequence[str], ppn: int = 1, *, ranks: int | None = None) -> list[str]:
        """Return the command line that runs ``argv`` on ``ppn`` ranks of each host, ranks 0 to ppn-1 on host
        1.

        It wants the environment that ``environment`` returns. ``ranks`` limits their number, the last hosts
        staying empty.

        Raises:
            ConfigError: no command, or a number of ranks that does not fit.
            LabError: the lab is not up.
        """
        command, _ = self._launch(ppn, ranks)
        if not argv:
            raise ConfigError("there is no command to run")
        return [*command, *launch.resolve(list(argv))]

    def environment(self, ppn: int = 1, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment for ``mpi_command``: this process's, the lab's over it, then ``env``."""
        _, wanted = self._launch(ppn, None)
        here = sysconfig.get_path("scripts")
        result = {**os.environ, **wanted}
        result["PATH"] = here + os.pathsep + os.environ.get("PATH", os.defpath)
        result.setdefault("OMP_NUM_THREADS", "1")  # the ranks share this machine's cores
        # torch would warn on every connection that no host of a lab has a name to look up.
        result.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        result[keeper.MARK] = f"{self._token}.{next(self._runs)}"
        bits = self.rate.bits_per_second
        result.setdefault(variables.BANDWIDTH.name, str(_UNSHAPED if bits is None else bits // 8))
        if bits is not None:
            result.setdefault(variables.BURST.name, str(self.rate.burst_bytes))
        result.setdefault(variables.LATENCY.name, _LATENCY)
        cores = len(os.sched_getaffinity(0)) / (self.hosts * ppn)  # all hosts are on one machine
        result.setdefault(variables.CORES.name, f"{min(1.0, cores):.3g}")
        result[variables.LAB_KIND.name] = self.kind
        result[variables.LAB_RATE.name] = str(self.rate)
        result[variables.LAB_HOSTS.name] = str(self.hosts)
        result[variables.LAB_PPN.name] = str(ppn)
        result.update(env or {})
        return result

    def popen(
        self,
        argv: Sequence[str],
        ppn: int = 1,
        *,
        ranks: int | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start ``argv`` across the hosts and return at once; ``options`` go to ``subprocess.Popen``.

        Raises:
            ConfigError: no command, a number of ranks that does not fit, or no room for them on this machine.
            LabError: the lab is not up.
        """
        environment = self.environment(ppn, env)
        command = self.mpi_command(argv, ppn, ranks=ranks)
        each = SHARED_BYTES if self.kind == "shared-memory" else SHARED_BYTES_TCP
        check_room(self.hosts * ppn if ranks is None else ranks, each)
        # MPICH's mpiexec writes to ranks that may have ended by then. SIGPIPE's default action would kill it and lose
        # the output of those ranks.
        options.setdefault("restore_signals", False)
        process = subprocess.Popen(command, env=environment, **options)
        self._marks[process] = environment[keeper.MARK]
        return process

    def mpirun(
        self,
        argv: Sequence[str],
        ppn: int = 1,
        *,
        ranks: int | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        capture: bool = True,
        check: bool = False,
        cwd: str | os.PathLike[str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` across the hosts, as ``subprocess.run`` would, and wait for its end.

        Args:
            argv: the command; ``python`` and ``hybridcomp`` are this environment's.
            ppn: ranks on each host, host by host.
            ranks: number of ranks in all, when the last hosts are to stay empty.
            env: variables over the lab's own.
            timeout: seconds after which the run and all it started are ended.
            capture: collect stdout and stderr as text; otherwise they go where this process's go.
            check: raise CalledProcessError unless the exit code is 0.
            cwd: the directory to run in.

        Raises:
            subprocess.TimeoutExpired: after ``timeout``, with the output until then.
        """
        pipe = subprocess.PIPE if capture else None
        process = self.popen(
            argv,
            ppn,
            ranks=ranks,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        with process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired as error:
                self.end(process)
                out, err = process.communicate()
                raise subprocess.TimeoutExpired(process.args, error.timeout, out, err) from None
            except BaseException:
                self.end(process)
                raise
        done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
        if check:
            done.check_returncode()
        return done

    def end(self, process: subprocess.Popen[Any]) -> None:
        """End a process that ``popen`` started: mpiexec first, politely, then every process that is left of the run."""
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        process.kill()
        if self._keeper is not None:
            self._keeper.end_run(self._marks[process])
        process.wait()

    def host_command(self, host: int, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs ``argv`` on one host (from 1), outside MPI.

        Raises:
            ConfigError: there is no such host.
            LabError: the lab is not up.
        """
        self._launch(1, None)
        if not 1 <= host <= self.hosts:
            raise ConfigError(f"this lab has hosts 1 to {self.hosts}, not {host}")
        if self.kind != "namespaces":
            return [*self._enter(0), *argv]
        group = self._groups[host - 1]
        return [*([] if group is None else launch.in_group(group)), *self._enter(host), *argv]

    def _launch(self, ppn: int, ranks: int | None) -> tuple[list[str], dict[str, str]]:
        if self._keeper is None or self.mpiexec is None:
            raise LabError("this lab is not up; use it as `with Lab(...) as lab:`")
        if ppn < 1:
            raise ConfigError(f"at least one rank runs on a host, not {ppn}")
        ranks = self.hosts * ppn if ranks is None else ranks
        if not 1 <= ranks <= self.hosts * ppn:
            raise ConfigError(
                f"{self.hosts} hosts with {ppn} ranks each hold 1 to {self.hosts * ppn}, not {ranks}"
            )
        if self.kind == "namespaces":
            command, env = launch.hydra_over_hosts(
                self.mpiexec, self._agent, SUBNET, hosts=self.hosts, ppn=ppn, ranks=ranks
            )
        elif self.kind == "loopback":
            command, env = launch.hydra_over_loopback(self.mpiexec, ranks)
        else:
            command, env = launch.plain(self.mpiexec, ranks)
        return [*self._enter(0), *command], env

    def change_rate(self, rate: str | Rate | None, hosts: Sequence[int] | None = None) -> None:
        """Change the speed of hosts' links while programs run; :attr:`rate` stays as the lab was made.

        Args:
            rate: speed in ``tc``'s syntax; "none" or None lifts the limit.
            hosts: numbers of the hosts, from 1; None: all.

        Raises:
            ConfigError: no such rate or host.
            LabError: the lab is not up, is not of kind "namespaces", or ``tc`` refuses.
        """
        new = rate if isinstance(rate, Rate) else Rate.parse(rate)
        if self.kind != "namespaces":
            raise LabError(
                f"rates of a lab of kind {self.kind!r} cannot be changed; those of 'namespaces' can"
            )
        for host in range(1, self.hosts + 1) if hosts is None else hosts:
            # Not by tc's own replace: a packet in the queue that is longer than the new burst would stay there.
            remove = self.host_command(host, ["tc", "qdisc", "del", "dev", "eth0", "root"])
            subprocess.run(remove, capture_output=True, check=False)  # an unshaped link has none
            if new.bits_per_second is None:
                continue
            words = keeper.shaping("eth0", new.bits_per_second, new.burst_bytes)
            done = subprocess.run(self.host_command(host, words), capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise LabError(f"`{' '.join(words)}` was refused on host {host}: {done.stderr.strip()}")

    def _enter(self, network: int) -> list[str]:
        """Return the prefix that runs a command in a network of the lab: 0 is the switch, i the host i."""
        if not self._networks:
            return []
        return [*launch.nsenter(self._user), f"--net={self._networks[network]}"]


def _listed(refusals: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{', '.join(kinds)}: {error}" for error, kinds in refusals.items())

"""Choose the mpiexec that starts the ranks of a lab, and its arguments."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from hybridcomp.errors import HybridcompError
from hybridcomp.files import write_text
from hybridcomp.launcher import LOOPBACK


class LabError(HybridcompError, RuntimeError):
    """Lab that this machine cannot bring up, or run a command on: names what is missing and what to do."""


def hint(refusal: str) -> str:
    """Return advice about a refusal, when there is any."""
    if "not permitted" in refusal or "denied" in refusal:
        return (
            " (network namespaces take root, or user namespaces: sysctl kernel.unprivileged_userns_clone=1, "
            "on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; in a container CAP_SYS_ADMIN and "
            "CAP_NET_ADMIN)"
        )
    return ""


# hydra calls an agent as it would call ssh: AGENT -x HOST COMMAND...
AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
group=
case "${{1##*.}}" in
{cases}
*) echo "hybridcomp lab: there is no host $1" >&2; exit 255 ;;
esac
[ -z "$group" ] || echo $$ > "$group/cgroup.procs" || exit 255
shift
exec {nsenter} --net="$net" sh -c "$*"
"""


@functools.cache
def is_hydra(mpiexec: str) -> bool:
    """Tell whether ``mpiexec`` is MPICH's hydra (or a relative of it: Intel MPI, MVAPICH)."""
    try:
        done = subprocess.run(
            [mpiexec, "--version"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"`{mpiexec} --version` does not run: {error}") from error
    return "HYDRA" in done.stdout.upper()


def require_hydra(mpiexec: str, kind: str) -> None:
    """Raise LabError unless ``mpiexec`` can start ranks on hosts that its caller made."""
    if not is_hydra(mpiexec):
        raise LabError(
            f"{mpiexec} is not MPICH's (hydra), and a lab of kind {kind!r} needs hydra to place ranks on its "
            "hosts; `pip install mpich` brings one, or use --kind shared-memory"
        )


def resolve(argv: list[str]) -> list[str]:
    """Resolve ``python`` and ``hybridcomp`` to this environment's, wherever the command runs."""
    if argv[0] in ("python", "python3"):
        return [sys.executable, *argv[1:]]
    if argv[0] == "hybridcomp":
        return [sys.executable, "-m", "hybridcomp", *argv[1:]]
    return list(argv)


def no_program(name: str) -> str:
    """Return what to say of a command whose program is not there."""
    how = f"; a Python program is run by: python {name}" if name.endswith(".py") else ""
    return f"there is no program {name!r}{how}"


def nsenter(user: str | None) -> list[str]:
    """Return the command that enters namespaces, those of the user namespace ``user`` when there is one."""
    program = shutil.which("nsenter") or "nsenter"
    return [program, f"--user={user}", "--preserve-credentials"] if user else [program]


def in_group(group: str) -> list[str]:
    """Return the command that runs another one in a control group."""
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', group]


def write_agent(directory: Path, hosts: list[str], groups: list[str | None]) -> Path:
    """Write the program that hydra runs in place of ssh.

    Args:
        directory: directory to write to.
        hosts: paths of network namespaces.
        groups: directories of the hosts' control groups, if they have any.
    """
    # hydra itself already runs inside the user namespace, when there is one.
    cases = "\n".join(
        f"{number}) net={net}{f' group={group}' if group else ''} ;;"
        for number, (net, group) in enumerate(zip(hosts, groups, strict=True), 1)
    )
    path = directory / "agent"
    write_text(path, AGENT.format(cases=cases, nsenter=nsenter(None)[0]))
    path.chmod(0o755)
    try:
        subprocess.run([path], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    except PermissionError as error:
        raise LabError(
            f"programs may not run from {directory}; set TMPDIR to a directory that is not mounted noexec"
        ) from error
    return path


def hydra_over_hosts(
    mpiexec: str, agent: Path, subnet: str, *, hosts: int, ppn: int, ranks: int
) -> tuple[list[str], dict[str, str]]:
    """Return the mpiexec arguments and environment that place ``ppn`` ranks on each host, host by host."""
    places = ",".join(f"{subnet}.{host}:{ppn}" for host in range(1, hosts + 1))
    command = [mpiexec, "-launcher", "ssh", "-launcher-exec", str(agent), "-localhost", f"{subnet}.254",
               "-iface", "br0", "-hosts", places, "-n", str(ranks)]  # fmt: skip
    return command, _tcp("eth0") | {"MASTER_ADDR": f"{subnet}.1"}


def hydra_over_loopback(mpiexec: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return the mpiexec arguments and environment for ranks that all talk TCP over the loopback."""
    command = [mpiexec, "-launcher", "fork", "-iface", "lo", "-n", str(ranks)]
    return command, _tcp("lo") | {"MPIR_CVAR_NOLOCAL": "1", "MASTER_ADDR": "127.0.0.1"}


def loopback() -> dict[str, str]:
    """Return the variables, of those that are not set, by which MPI's ranks on this machine listen on the loopback."""
    return {name: value for name, value in LOOPBACK.items() if name not in os.environ}


def plain(mpiexec: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return the mpiexec arguments and environment for ranks on this machine as it is."""
    if is_hydra(mpiexec):
        return [mpiexec, "-launcher", "fork", "-n", str(ranks)], loopback()
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [mpiexec, "--oversubscribe", "-n", str(ranks)], root


def by_slurm(mpiexec: str, ranks: int) -> list[str]:
    """Return the srun arguments for ranks on the nodes of the Slurm job that this process is in.

    Args:
        mpiexec: launcher of the MPI that the ranks load, which says how Slurm is to start them where ``SLURM_MPI_TYPE``
            does not.
        ranks: number of ranks.
    """
    kind = [] if "SLURM_MPI_TYPE" in os.environ else [f"--mpi={'pmi2' if is_hydra(mpiexec) else 'pmix'}"]
    # A shell that srun has started holds the cores that the ranks are to have.
    shared = ["--overlap"] if "SLURM_STEP_ID" in os.environ else []
    return ["srun", "--kill-on-bad-exit=1", *kind, *shared, "-n", str(ranks)]


def _tcp(device: str) -> dict[str, str]:
    """Return the settings that make MPICH and gloo talk TCP over ``device``."""
    return {
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": device,
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "GLOO_SOCKET_IFNAME": device,
    }

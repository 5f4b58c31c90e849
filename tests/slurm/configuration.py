"""The files of Slurm and munge for the cluster."""

from __future__ import annotations

import os
import stat
from pathlib import Path

NODES = 4
HEAD = 5  # host of the controller

_SLURM = """
ClusterName=hybridcomp
SlurmctldHost=head(10.9.0.{head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire is also how long a job waits that is queued again.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=pmi2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=0
# Jobs of the partition urgent take nodes from others, which get their own signal, and then a grace time.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
MailProg=/bin/true
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
# PMIx puts files there, the same names on every node.
TmpFS={folder}/tmp-%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
ReturnToService=2
# A node that is silent for so long is down, and its jobs are queued again.
SlurmdTimeout=10
SlurmdParameters=config_overrides
KillWait=5
GresTypes=gpu
NodeName=n[1-{nodes}] NodeAddr=10.9.0.[1-{nodes}] CPUs=4 RealMemory=1000 Gres=gpu:2
PartitionName=all Nodes=n[1-{nodes}] Default=YES State=UP MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-{nodes}] State=UP MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""

_CGROUP = """
CgroupPlugin=cgroup/v1
CgroupAutomount=yes
CgroupMountpoint={folder}/cgroup
"""

# Slurm hands out what these devices stand for, and does not open them: they are copies of /dev/null.
_GRES = "NodeName=n[1-{nodes}] Name=gpu File={folder}/gpu[0-1]\n"


def write_configuration(folder: Path) -> None:
    """Write slurm.conf and what else the daemons want into the folder."""
    nodes = [f"{of}-n{node}" for of in ("spool", "tmp") for node in range(1, NODES + 1)]
    for name in ("state", "log", "cgroup", *nodes):
        (folder / name).mkdir()
    for name in ("gpu0", "gpu1"):
        os.mknod(folder / name, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    for name, text in (("slurm.conf", _SLURM), ("cgroup.conf", _CGROUP), ("gres.conf", _GRES)):
        (folder / name).write_text(text.format(folder=folder, head=HEAD, nodes=NODES))
    names = {"localhost": "127.0.0.1", "head": f"10.9.0.{HEAD}"}
    names |= {f"n{node}": f"10.9.0.{node}" for node in range(1, NODES + 1)}
    (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names.items()))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)

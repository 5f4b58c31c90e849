"""Many mixed operations on every rank, and what is left of them: ``mpiexec -n 8 python -m tests.soak.program 20000``.

Operations of groups with several policies, synchronous, asynchronous and never waited for; groups that are made and
destroyed; training steps through DDP hooks with feedback. Their resources are measured after a warm-up and at
the end: nothing may have grown. Rank 0 prints a table; the exit code is 1 if something has. ``--groups 2000`` makes and
destroys as many groups instead, with an operation on each.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import random
import sys
import time
from collections import deque
from dataclasses import fields, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp as hc
import hybridcomp.torch as hct
from hybridcomp.policy import Policy, Rule
from tests.soak.measure import Held, everywhere, held
from tests.soak.operations import ALL_GATHER, OPERATIONS, Operation, choose

WARM_UP = 0.25  # share of the operations: pools, caches and first connections fill
CHECKS = 6  # measurements, evenly apart
GROUP_EVERY = 40  # operations
STEP_EVERY = 20
IN_FLIGHT = 6
TIMEOUT_SECONDS = 60
FORGOTTEN = 0.1  # share of the asynchronous works
POLICIES = {
    "none": "none",
    "int8": "int8",
    "topk": "topk:ratio=0.1",
    "tp": "int8:block=128",
    "sketch": "sketch",
}  # by axis
HOOKS = {
    "int8": Policy("int8", Rule(codecs=(hc.get_codec("int8"),), min_bytes=0)),
    "topk": Policy("topk", Rule(codecs=(hc.get_codec("topk:ratio=0.05"),), feedback="ef", min_bytes=0)),
    "powersgd": Policy(
        "powersgd", Rule(codecs=(hc.get_codec("powersgd:rank=2"),), feedback="ef", min_bytes=0)
    ),
}
# Growth that a process may have between the warm-up and the end. Memory is for fragments of the heap; the heap
# for the keys that torch's store, on rank 0, keeps of every group (with gloo as well); shared memory for pages of
# arenas that are used for the first time; threads for callbacks, as many as have ever waited at a time; objects for
# rows of statistics, cached choices, and one of torch's a group.
ALLOWED = Held(
    memory_mb=12.0,
    shared_mb=32.0,
    heap_mb=4.0,
    threads=2,
    tasks=2,
    files=0,
    requests=0,
    groups=0,
    objects=3_000,
)


# Of groups alone less may grow: each takes rings of 16 KiB for every neighbour, and two of MPI's 2048 contexts.
ALLOWED_OF_GROUPS = replace(ALLOWED, shared_mb=2.0, threads=0, tasks=0, objects=8_000)


class Soak:
    """The state of a run on one rank."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.groups = [
            dist.new_group(pg_options=hct.Options(policy=policy, axis=axis))
            for axis, policy in POLICIES.items()
        ]
        self.subgroup: dist.ProcessGroup | None = None
        self.members: list[int] = []
        self.in_flight: deque[list[dist.Work]] = deque()
        self.trained = [_Trained(policy) for policy in HOOKS.values()]
        for trained in self.trained:
            trained.step()  # a hook's thread and communicator come with its first
        self.made = 0
        gc.collect()
        gc.freeze()  # modules and what they made: to look at all of it again takes a second

    def run(self, count: int, done: int) -> None:
        """Do ``count`` operations after ``done`` ones."""
        for i in range(done, done + count):
            if i % STEP_EVERY == 0:  # where all threads are, if a rank hangs: before the others give up
                faulthandler.dump_traceback_later(0.75 * TIMEOUT_SECONDS)
            if i % GROUP_EVERY == 0:
                self.remake_group()
            if i % STEP_EVERY == STEP_EVERY - 1:
                self.random.choice(self.trained).step()
            else:
                self.one(self.random.choice(OPERATIONS))
        faulthandler.cancel_dump_traceback_later()

    def one(self, operation: Operation) -> None:
        """Do an operation on a group, both by chance."""
        in_subgroup = self.random.random() < 0.3
        group = self.subgroup if in_subgroup else self.random.choice(self.groups)
        size = len(self.members) if in_subgroup else dist.get_world_size()
        seed = self.random.random()  # ranks that are not in the group draw no more
        forgets = self.random.random() < FORGOTTEN
        if group is None:
            return
        setting = choose(random.Random(seed), group, dist.get_rank(group), size)
        works = operation(setting)
        if works is None or forgets:
            return
        self.in_flight.append(works if isinstance(works, list) else [works])
        if len(self.in_flight) > IN_FLIGHT:
            self.wait_for(self.in_flight.popleft())

    def remake_group(self) -> None:
        """Destroy the subgroup, and make another of some ranks."""
        self.end_group()
        size = self.random.randint(2, dist.get_world_size())
        self.members = sorted(self.random.sample(range(dist.get_world_size()), size))
        axis = self.random.choice([*POLICIES])
        group = dist.new_group(self.members, pg_options=hct.Options(policy=POLICIES[axis], axis=axis))
        self.subgroup = group if dist.get_rank() in self.members else None
        self.made += 1

    def end_group(self) -> None:
        """Wait for what is in flight, and destroy the subgroup."""
        while self.in_flight:
            self.wait_for(self.in_flight.popleft())
        if self.subgroup is not None:
            dist.destroy_process_group(self.subgroup)
            self.subgroup = None

    @staticmethod
    def wait_for(works: list[dist.Work]) -> None:
        for work in works:
            work.wait()


class _Trained:
    """A model that a hook averages the gradients of."""

    def __init__(self, policy: Policy) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        self.module = DistributedDataParallel(net)
        self.module.register_comm_hook(hct.HookState(policy, module=self.module), hct.comm_hook)
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.01)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.module(torch.ones(4, 64)).square().mean().backward()
        self.optimizer.step()


def run(count: int, seed: int) -> int:
    """Do ``count`` operations; print what is held after each part of them, and return the exit code."""
    start()
    soak = Soak(seed)
    began, done = time.monotonic(), 0
    marks = [round(count * (WARM_UP + (1 - WARM_UP) * i / CHECKS)) for i in range(CHECKS + 1)]
    base: Held | None = None
    grown = Held(*[0] * len(fields(Held)))
    for mark in marks:
        soak.run(mark - done, done)
        done = mark
        soak.end_group()
        dist.barrier()
        now = held()
        base = now if base is None else base
        grown = everywhere(now.beyond(base))
        _tell(done, time.monotonic() - began, soak.made, everywhere(now), grown)
    memory = MPI.COMM_WORLD.gather(f"{now.beyond(base).heap_mb:+.2f}")
    leaks = grown.leaks(ALLOWED)
    dist.destroy_process_group()
    if memory is not None:
        print(f"heap_mb by rank: {' '.join(memory)}")
        print("\n".join(leaks) or f"nothing leaked in {count} operations", flush=True)
    return int(bool(leaks))


def start() -> None:
    """Make the default group."""
    torch.set_num_threads(1)
    hct.set_policy("none")
    dist.init_process_group("hybridcomp", timeout=timedelta(seconds=TIMEOUT_SECONDS))


def run_groups(count: int, seed: int) -> int:
    """Make and destroy ``count`` groups; print what has grown since a quarter of them, and return the exit code."""
    start()
    random_, ranks = random.Random(seed), range(dist.get_world_size())
    base: Held | None = None
    for i in range(count):
        if i == round(count * WARM_UP):
            gc.collect()
            gc.freeze()
            for late in ranks:  # what a rank needs to wait for another comes with its first wait
                time.sleep(0.2 * (dist.get_rank() == late))
                dist.barrier()
            base = held()
        members = sorted(random_.sample(ranks, random_.randint(2, len(ranks))))
        policy = random_.choice(
            ["none", "int8", "sketch"]
        )  # sketch's gathers take the pool of Python's messages
        size = random_.choice([300, 20_000, 60_000])
        group = dist.new_group(members, pg_options=hct.Options(policy=policy))
        if dist.get_rank() in members:
            tensor = torch.ones(size)
            dist.all_reduce(tensor, group=group)
            assert abs(tensor[0].item() - len(members)) < 0.02 * len(members), tensor[0]
            ALL_GATHER(torch.empty(size * len(members)), tensor, group=group)
            dist.destroy_process_group(group)
    dist.barrier()
    assert base is not None
    grown = everywhere(held().beyond(base))
    leaks = grown.leaks(ALLOWED_OF_GROUPS)
    dist.destroy_process_group()
    if MPI.COMM_WORLD.rank == 0:
        print(grown)
        print("\n".join(leaks) or f"nothing leaked in {count} groups", flush=True)
    return int(bool(leaks))


def _tell(done: int, seconds: float, made: int, now: Held, grown: Held) -> None:
    """Print a row: the most of any rank, and how much more than after the warm-up."""
    if MPI.COMM_WORLD.rank:
        return
    if not grown.objects and not grown.memory_mb:
        print(
            f"{'operations':>10} {'seconds':>8} {'groups made':>11} "
            + " ".join(f"{name:>18}" for name in vars(now))
        )
    cells = (f"{value:.6g} ({getattr(grown, name):+.3g})" for name, value in vars(now).items())
    print(f"{done:10} {seconds:8.1f} {made:11} " + " ".join(f"{cell:>18}" for cell in cells), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operations", type=int, nargs="?", default=0)
    parser.add_argument("--groups", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.groups:
        sys.exit(run_groups(arguments.groups, arguments.seed))
    sys.exit(run(arguments.operations, arguments.seed))

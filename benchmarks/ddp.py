"""A step of DistributedDataParallel: ours by policy, uncompressed gloo, and PyTorch's own hooks, in turn.

hybridcomp lab -n 4 --rate 1gbit -- python benchmarks/ddp.py --policy 'int8;int4+ef;topk:ratio=0.01+ef'

The model is a transformer's encoder with 50 MB of float32 parameters; a step is forward and backward, whose
gradients DDP averages meanwhile. ``local`` is the same step without DDP, while all ranks compute at once. A policy is
a codec, ``+`` and a form of error feedback if it has one, used for every parameter from 64 KiB on, or a preset or
``auto``, as it is; those that choose by measuring first take as many steps as that needs, in which no time counts.
Gradients are compared with the exact average, and with the other ranks' bits, before a time is printed. PyTorch's
PowerSGD gets one bucket: on gloo it aborts with more. With ``--onebit`` 1-bit Adam takes turns, too, after its warm-up,
so that what is averaged, and compared, is its momentum; its step, which does not move the weights, is not timed, as no
optimizer's is.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from collbench import output, peers
from collbench.figures import link_seconds
from collbench.link import Link
from harness import WORLD
from mpi4py import MPI
from resultfile import write
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import hybridcomp.torch as hct
from hybridcomp.policy.load import PRESETS

_WIDTH, _LAYERS = 512, 4
_ONE_BUCKET_MB = 1000
_WARMUP = 1  # turns that are not counted: DDP rebuilds its buckets and PowerSGD begins
_LEAST_ALIKE = (
    0.1  # cosine of a step's gradients and the exact average's; of unrelated ones it is about 0.0003
)
_STEPS = 4  # steps in a turn; the first one, in caches that the other sides left, is not counted
_SETTLING = 50  # steps in which a policy that chooses by measuring has chosen


@dataclass(frozen=True)
class Row:
    """Figures of one way to take a step: medians of the slowest rank, in seconds.

    Attributes:
        kind: ``local``, ``peer`` or ``ours``.
        link_bytes: bytes on the busiest host's link in its busier direction, by the kernel's count; 0 if unknown.
        cores: processor time of all ranks over the time.
        wire_fraction: the least time in which the link carries those bytes, over the time; None if not shaped.
        relative_error: L2 error of a step's gradients against the exact average, without feedback's later corrections.
        over_local: the time over that of the local computation.
        speedup: the best peer's time over this.
    """

    kind: str
    name: str
    seconds: float
    link_bytes: int
    cores: float
    wire_fraction: float | None
    relative_error: float
    identical: bool
    over_local: float
    speedup: float

    def line(self) -> str:
        """Return the row as text."""
        return (
            f"{self.name:>40} {self.seconds * 1e3:>9.1f} {self.over_local:>8.2f} {self.speedup:>8.2f} "
            f"{self.link_bytes or '-':>11} {output.fraction(self.wire_fraction):>8} {self.cores:>6.2f} "
            f"{self.relative_error:>10.2e} {'yes' if self.identical else 'NO':>9}"
        )


HEADER = "\n".join(
    (
        f"{'':>40} {'time':>9} {'over':>8} {'best peer':>9} {'link':>10} {'of wire':>8} {'cores':>6} "
        f"{'rel. error':>10} {'same bits':>9}",
        f"{'':>40} {'(ms)':>9} {'local':>8} {'over this':>9} {'(B/host)':>10} {'limit':>8} {'busy':>6} "
        f"{'(L2)':>10} {'':>9}",
    )
)


@dataclass
class Side:
    """One of the ways to take a step that take turns, with its timings."""

    kind: str
    name: str
    model: nn.Module
    seconds: list[float] = field(default_factory=list)
    crossed: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    error: float = 0.0
    identical: bool = True
    after: Callable[[], Any] | None = None  # called after a step, not timed
    settling: int = 0  # steps before all turns


def network() -> nn.Module:
    """Build the network of 12.6 million parameters, with the same weights on every rank."""
    torch.manual_seed(1)
    layers = [
        nn.TransformerEncoderLayer(_WIDTH, 8, 4 * _WIDTH, dropout=0.0, batch_first=True)
        for _ in range(_LAYERS)
    ]
    return nn.Sequential(*layers)


def chooses(policy: str) -> bool:
    """Return whether a policy chooses by measuring."""
    return policy == "exact" or policy.partition(":")[0] == "auto"


def policy_of(text: str) -> str:
    """Write a policy file for ``codec`` or ``codec+feedback``; return its path. A preset and ``auto`` need none."""
    if chooses(text) or text in PRESETS:
        return text
    codec, _, feedback = text.partition("+")
    entry = f'codec = "{codec}"' + (f', feedback = "{feedback}"' if feedback else "")
    with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
        file.write(f"min_bytes = 65536\n[dp]\nall_reduce = {{ {entry} }}\n")
    return file.name


def sides_of(args: argparse.Namespace) -> list[Side]:
    """Make all sides that take turns; collective."""
    gloo = peers.gloo(args.timeout).group.WORLD
    ours = dist.new_group(backend="hybridcomp", pg_options=hct.Options(policy="none", axis="dp"))

    def ddp(group: Any, hook: Callable[[nn.Module], tuple[Any, Any]] | None, mb: float) -> nn.Module:
        model = DistributedDataParallel(
            network(), process_group=group, bucket_cap_mb=mb, gradient_as_bucket_view=True
        )
        if hook is not None:
            model.register_comm_hook(*hook(model))
        return model

    def powersgd(rank: int) -> Callable[[nn.Module], tuple[Any, Any]]:
        return lambda _: (
            powerSGD_hook.PowerSGDState(gloo, matrix_approximation_rank=rank, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        )

    def mine(policy: str, group: Any) -> Callable[[nn.Module], tuple[Any, Any]]:
        return lambda model: (
            hct.HookState(policy_of(policy), module=model, process_group=group),
            hct.comm_hook,
        )

    def onebit(group: Any, name: str) -> Side:
        model = ddp(group, None, args.bucket_mb)
        optimizer = hct.OnebitAdam(model.parameters(), lr=0.0, freeze_step=1)
        adam = torch.optim.AdamW(model.parameters(), lr=0.0)
        for p in model.parameters():  # as after many steps: each element has a variance
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.ones_like(p)}
            adam.state[p] = {"step": torch.tensor(1.0), **moments}
        optimizer.load_state_dict(adam.state_dict())
        optimizer.register(model)
        return Side("ours", name, model, after=optimizer.step)

    mb = args.bucket_mb
    sides = [
        Side("local", "local computation", network()),
        Side("peer", "gloo", ddp(gloo, None, mb)),
        Side("peer", "gloo, fp16 hook", ddp(gloo, lambda _: (gloo, default_hooks.fp16_compress_hook), mb)),
        *(
            Side("peer", f"gloo, PowerSGD hook, rank {rank}", ddp(gloo, powersgd(rank), _ONE_BUCKET_MB))
            for rank in (1, 4)
        ),
    ]
    for policy in args.policy.split(";"):
        settling = _SETTLING if chooses(policy) else 0
        sides.append(Side("ours", policy, ddp(ours, mine(policy, ours), mb), settling=settling))
        if args.over_gloo:
            over = ddp(gloo, mine(policy, gloo), mb)
            sides.append(Side("ours", f"{policy} over gloo", over, settling=settling))
        if args.alone and "+" not in policy:  # the backend knows no names, by which feedback is kept
            options = hct.Options(policy=policy_of(policy), axis="dp")
            group = dist.new_group(backend="hybridcomp", pg_options=options)
            sides.append(Side("ours", f"{policy} without the hook", ddp(group, None, mb)))
    if args.onebit:
        sides.append(onebit(ours, "1-bit Adam"))
        if args.over_gloo:
            sides.append(onebit(gloo, "1-bit Adam over gloo"))
    return sides


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Run a forward and a backward pass."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()
    nn.functional.mse_loss(model(x), y).backward()


def gradient(model: nn.Module) -> torch.Tensor:
    """Return all gradients in one tensor."""
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def check(side: Side, exact: torch.Tensor) -> None:
    """Compare the gradients with the exact average, and with the other ranks' bits.

    Raises:
        harness.CheckError: on all ranks, the gradients differ between ranks, or are no approximation of the average.
    """
    if side.kind == "local":
        return
    mine = gradient(side.model)
    wide = mine.double()
    error = ((wide - exact).norm() / exact.norm()).item()
    alike = (wide @ exact / (wide.norm() * exact.norm())).item()
    side.error = WORLD.allreduce(float("inf") if math.isnan(error) else error, op=MPI.MAX)
    least = WORLD.allreduce(-1.0 if math.isnan(alike) else alike, op=MPI.MIN)
    side.identical = len(set(WORLD.allgather(hashlib.blake2b(mine.numpy(), digest_size=16).digest()))) == 1
    # With feedback a step has the errors of earlier steps, too: it may be far off in length, but not in direction.
    if least < _LEAST_ALIKE or (side.kind == "ours" and not side.identical):
        raise harness.CheckError(
            f"{side.name}: relative error {side.error:.3g}, cosine {least:.3g}, ranks "
            f"{'agree' if side.identical else 'differ in their bits'}"
        )


def measure(args: argparse.Namespace) -> list[Row]:
    """Time all sides in turn; return their rows."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(WORLD.rank)
    x, y = torch.randn(2, args.tokens // 16, 16, _WIDTH, generator=generator)
    sides, link = sides_of(args), Link()
    exact = torch.zeros(0)
    rounds = _WARMUP + args.iters
    for side in sides:
        for _ in tqdm(
            range(side.settling), side.name, disable=None if WORLD.rank == 0 else True, leave=False
        ):
            with harness.bounded(args.timeout):
                step(side.model, x, y)
    for i in tqdm(range(rounds), disable=None if WORLD.rank == 0 else True, leave=False):
        for side in sides:
            for j in range(_STEPS):
                with harness.bounded(args.timeout):
                    seconds, crossed, busy = harness.timed(lambda side=side: step(side.model, x, y), link)
                    if side.after is not None and (i < rounds - 1 or j < _STEPS - 1):
                        side.after()
                if i >= _WARMUP and j:
                    side.seconds.append(seconds)
                    side.crossed.append(crossed)
                    side.busy.append(busy)
            if i == rounds - 1:
                if side.kind == "local":
                    exact = gradient(side.model).double()
                    WORLD.Allreduce(MPI.IN_PLACE, exact.numpy())
                    exact /= WORLD.size
                check(side, exact)
    middle = {side.name: statistics.median(side.seconds) for side in sides}
    best = min(middle[side.name] for side in sides if side.kind == "peer")
    return [_row(side, middle[side.name], middle[sides[0].name], best, link.rate) for side in sides]


def _row(side: Side, seconds: float, local: float, best: float, rate: str) -> Row:
    crossed = round(statistics.median(side.crossed))
    limit = link_seconds(crossed, rate)
    return Row(
        side.kind,
        side.name,
        seconds,
        crossed,
        statistics.median(side.busy) / seconds,
        None if limit is None else limit / seconds,
        side.error,
        side.identical,
        seconds / local,
        best / seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--policy", default="int8;int4+ef", help="codec or codec+feedback, separated by ';'")
    add("--bucket-mb", type=float, default=25.0, help="DDP's bucket_cap_mb (default 25, as DDP's)")
    add("--tokens", type=int, default=16, help="per rank and step, a multiple of 16 (default 16)")
    add("--iters", type=int, default=5, help="turns that are counted, of three steps each (default 5)")
    add("--over-gloo", action="store_true", help="measure our hook over gloo, too")
    add("--onebit", action="store_true", help="measure 1-bit Adam after its warm-up, too")
    add("--alone", action="store_true", help="measure the backend with the same codec and no hook, too")
    add("--timeout", type=float, default=300.0, help="seconds that one step may take (default 300)")
    add("--json", type=Path, help="also write the results there")
    args = parser.parse_args()
    args.dtype = "float32"

    def work() -> None:
        harness.say(f"# DDP step, 50 MB of float32 gradients, {WORLD.size} ranks")
        rows = measure(args)
        harness.say(HEADER)
        for row in rows:
            harness.say(row.line())
        record = output.record("ddp", args, rows, [])
        if WORLD.rank == 0 and args.json is not None:
            write(args.json, record)

    harness.run(work)


if __name__ == "__main__":
    main()

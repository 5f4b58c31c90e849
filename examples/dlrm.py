"""A recommendation model: embedding tables split over the ranks, whose rows travel compressed to the samples.

    torchrun --standalone --nproc-per-node 4 examples/dlrm.py
    torchrun --standalone --nproc-per-node 4 examples/dlrm.py --compress one --bound 0.02
    torchrun --standalone --nproc-per-node 4 examples/dlrm.py --backend gloo       # for comparison

DLRM (Naumov et al., arXiv:1906.00091) at a small size: an MLP of dense features, dot products of its output and the
rows of 8 tables, an MLP above. Each table lives on one rank; the MLPs are DDP's. Clicks are drawn: ids by Zipf's law,
labels from a fixed teacher. The rows of a batch are an all-to-all [1], of a group whose policy [2] compresses it; their
gradients come back as they are [3]. The first steps are exact. With `--compress dual` each table has a bound and a
coder of its own, found from the rows of step `--from-step` [4], and bounds are wider in the steps after it
(arXiv:2407.04272).
"""

import argparse
import itertools
import json
import math
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp.torch as hct

TABLES, DENSE, TEACHER = 8, 13, 4
TEST = 1 << 20  # added to the step whose samples are held out


class Clicks:
    """Samples of dense features, an id for each table, and a label."""

    def __init__(self, seed: int, rows: int) -> None:
        self.seed = seed
        self.rows = [round(50 * (rows / 50) ** (t / (TABLES - 1))) for t in range(TABLES)]
        ranks = [torch.arange(1, n + 1, dtype=torch.float64) for n in self.rows]
        self.shares = [(r ** -(1.05 + 0.05 * t)).cumsum(0) for t, r in enumerate(ranks)]
        g = torch.Generator().manual_seed(7)  # the same teacher for all seeds
        self.weights = [0.5 * torch.randn(n, generator=g) for n in self.rows]
        self.vectors = [0.7 * torch.randn(n, TEACHER, generator=g) for n in self.rows]
        self.dense = 0.4 * torch.randn(DENSE, generator=g)

    def draw(self, step: int, rank: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw a rank's samples for a step: dense float32 [n, DENSE], ids int64 [n, TABLES], labels float32 [n]."""
        g = torch.Generator().manual_seed(hash((self.seed, step, rank)))
        dense = torch.randn(n, DENSE, generator=g)
        chance = torch.rand(n, TABLES, generator=g, dtype=torch.float64)
        ids = torch.stack(
            [torch.searchsorted(s, chance[:, t] * s[-1]) for t, s in enumerate(self.shares)], dim=1
        )
        logit = dense @ self.dense - 1
        vectors = [v[ids[:, t]] for t, v in enumerate(self.vectors)]
        for t, weights in enumerate(self.weights):
            logit += weights[ids[:, t]] + (vectors[t] * vectors[t - 1]).sum(1)
        return dense, ids, (torch.rand(n, generator=g) < logit.sigmoid()).float()


def table(t: int, rows: int, width: int, seed: int, dtype: torch.dtype) -> nn.Embedding:
    """Make table t with DLRM's first values: uniform within 1 / sqrt(rows)."""
    g = torch.Generator().manual_seed(hash((seed, t)))
    first = (2 * torch.rand(rows, width, generator=g) - 1) / math.sqrt(rows)
    return nn.Embedding.from_pretrained(first.to(dtype), freeze=False, sparse=True)


def mlp(*widths: int) -> nn.Sequential:
    layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*itertools.chain.from_iterable(layers))[:-1]


class Interaction(nn.Module):
    """The MLPs that all ranks share, and the products between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        pairs = (TABLES + 1) * TABLES // 2
        self.bottom, self.top = mlp(DENSE, 64, width), mlp(width + pairs, 64, 32, 1)
        self.pairs = torch.tril_indices(TABLES + 1, TABLES + 1, -1).tolist()

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits [n] of dense features [n, DENSE] and rows [n, TABLES, width]."""
        x = self.bottom(dense)
        z = torch.cat([x[:, None], rows], dim=1)
        dots = (z @ z.mT)[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, dots], dim=1))[:, 0]


class Exchange(torch.autograd.Function):
    """Send rows to the ranks whose samples asked for them, in an all-to-all of each group; gradients go back in one.

    Rows are [ranks, tables that this rank has in the group, n, width], in the order of groups; `receives` says for each
    group how many of its tables each rank holds, and what arrives is [their sum, n, width].
    """

    @staticmethod
    def forward(ctx, receives, groups, back, *rows):  # type: ignore[no-untyped-def]
        ctx.receives, ctx.back, ctx.own = receives, back, [mine.shape[1] for mine in rows]
        arrived = [
            mine.new_empty(sum(each), *mine.shape[2:]) for mine, each in zip(rows, receives, strict=True)
        ]
        under_way = [
            dist.all_to_all_single(  # [1]
                to, mine.flatten(0, 1), each, [mine.shape[1]] * len(each), group=group, async_op=True
            )
            for to, mine, each, group in zip(arrived, rows, receives, groups, strict=True)
        ]
        for work in under_way:
            work.wait()
        return tuple(arrived)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        ranks, own = dist.get_world_size(), sum(ctx.own)
        by_rank = zip(
            *(grad.split(each) for grad, each in zip(grads, ctx.receives, strict=True)), strict=True
        )
        grad = torch.cat([part for parts in by_rank for part in parts])
        home = grad.new_empty(ranks * own, *grad.shape[1:])
        sends = [sum(each) for each in zip(*ctx.receives, strict=True)]
        dist.all_to_all_single(home, grad, [own] * ranks, sends, group=ctx.back)  # [3]
        mean = home.view(ranks, own, *grad.shape[1:]) / ranks  # over ranks, as DDP's
        return None, None, None, *mean.split(ctx.own, dim=1)


class Tables(nn.Module):
    """The tables of this rank, and the exchange of the rows that its samples ask for."""

    def __init__(
        self, clicks: Clicks, width: int, seed: int, dtype: torch.dtype, back: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self.rank, self.ranks, self.width, self.back = dist.get_rank(), dist.get_world_size(), width, back
        self.order = [
            t for r in range(self.ranks) for t in range(r, TABLES, self.ranks)
        ]  # in the order of the ranks that hold them
        self.own = [t for t in self.order if self.holder(t) == self.rank]
        self.tables = nn.ModuleList(table(t, clicks.rows[t], width, seed, dtype) for t in self.own)
        self.register_buffer("none", torch.empty(0, dtype=dtype), persistent=False)
        self.groups = [back] * TABLES  # of each table's rows

    def holder(self, t: int) -> int:
        return t % self.ranks

    def lookups(self, ids: torch.Tensor) -> torch.Tensor:
        """Exchange ids: int64 [n, TABLES] asked by this rank for [ranks, own tables, n] asked of its tables."""
        n = len(ids)
        sends = [n * sum(self.holder(t) == r for t in self.order) for r in range(self.ranks)]
        asked = ids.new_empty(self.ranks * len(self.own) * n)
        dist.all_to_all_single(asked, ids[:, self.order].T.flatten(), [len(self.own) * n] * self.ranks, sends)
        return asked.view(self.ranks, len(self.own), n)

    def forward(self, ids: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
        """Return the rows [n, TABLES, width] of ids, int64 [n, TABLES]; uncompressed if ``exact``."""
        n, asked = len(ids), self.lookups(ids)
        of_tables = [self.back] * TABLES if exact else self.groups
        groups = list(dict.fromkeys(of_tables))
        rows, tables = [], []
        for group in groups:
            mine = [self.tables[j](asked[:, j]) for j, t in enumerate(self.own) if of_tables[t] is group]
            # A rank with none of a group's tables needs a gradient, too: its backward pass must reach the all-to-all.
            empty = self.none.new_empty(self.ranks, 0, n, self.width, requires_grad=True)
            rows.append(torch.stack(mine, 1) if mine else empty)
            tables.append([t for t in self.order if of_tables[t] is group])
        receives = [[sum(self.holder(t) == r for t in some) for r in range(self.ranks)] for some in tables]
        arrived = Exchange.apply(receives, groups, self.back, *rows)
        found = dict(zip(itertools.chain(*tables), itertools.chain(*arrived), strict=True))
        return torch.stack([found[t] for t in range(TABLES)], dim=1)

    @torch.no_grad()
    def plan(self, ids: torch.Tensor, bounds: list[float], rate: float | None) -> list[hct.TablePlan]:
        """Plan all tables from the rows of a batch; alike on all ranks, since each is planned by its holder."""
        asked = self.lookups(ids)
        mine = {
            t: hct.plan_table(self.tables[j](asked[:, j]).flatten(0, 1).cpu(), bounds=bounds, rate=rate)
            for j, t in enumerate(self.own)
        }
        of_all = [mine] * self.ranks
        dist.all_gather_object(of_all, mine)
        return [of_all[self.holder(t)][t] for t in range(TABLES)]


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the chance that a click has a higher score than no click: by ranks, ties counting a half."""
    _, place, many = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(many) - (many - 1) / 2)[place]
    clicks = int(labels.sum())
    return float((ranks[labels > 0].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(labels) - clicks)))


def gathered(values: torch.Tensor) -> np.ndarray:
    """Return the values of all ranks."""
    of_all = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, values)
    return torch.stack(of_all).cpu().numpy()


def group_of(axis: str, codec: str = "none", until: int = 0) -> dist.ProcessGroup:
    if dist.get_backend() != "hybridcomp":
        return dist.new_group()
    policy = "none" if codec == "none" else hct.table_policy(codec, axis, until=until)
    return dist.new_group(pg_options=hct.Options(policy=policy, axis=axis))  # [2]


def groups_of(codecs: list[str], until: int = 0) -> list[dist.ProcessGroup]:
    """Return the groups of the tables' all-to-alls: tables with the same codec share one."""
    made = {codec: group_of("emb", codec, until) for codec in sorted(set(codecs))}
    return [made[codec] for codec in codecs]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", default="hybridcomp", help="or gloo, which compresses nothing")
    parser.add_argument(
        "--compress", choices=("none", "one", "dual"), default="dual", help="one bound, or two levels"
    )
    parser.add_argument("--bound", type=float, default=0.01, help="absolute, of one")
    parser.add_argument("--coder", choices=("lz", "huffman"), default="huffman", help="of one")
    parser.add_argument(
        "--bounds", type=float, nargs=3, default=[0.01, 0.005, 0.0025], help="of dual's classes"
    )
    parser.add_argument("--from-step", type=int, default=20, help="the first whose rows are compressed")
    parser.add_argument(
        "--until", type=int, default=100, help="steps in which dual's bounds fall from twice to once"
    )
    parser.add_argument(
        "--rate", type=float, help="bytes/s of the link by which dual chooses coders; else by bytes"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256, help="samples of each rank and step")
    parser.add_argument("--rows", type=int, default=20000, help="of the largest table; the smallest has 50")
    parser.add_argument("--width", type=int, default=16, help="elements of a row")
    parser.add_argument("--lr", type=float, default=0.02, help="of Adagrad")
    parser.add_argument("--test", type=int, default=8192, help="held-out samples of each rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--json", type=Path, help="file for what was found, losses of all steps included")
    parser.add_argument(
        "--folder", type=Path, help="of a checkpoint: written after the last step, and gone on from if there"
    )
    args = parser.parse_args()
    if args.backend != "hybridcomp":
        args.compress = "none"
    if args.compress != "none" and not 1 <= args.from_step <= args.steps:
        parser.error(f"--from-step must be from 1 to --steps ({args.steps}), not {args.from_step}")
    return args


class Checkpoint:
    """A file of this rank: its tables, the replica, the optimizer, codecs, and the state of compression."""

    def __init__(self, folder: Path | None, parts: dict[str, Any]) -> None:
        self.file = folder and folder / f"rank{dist.get_rank()}.pt"
        self.parts = parts  # objects with a state, by name
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def resume(self, tables: Tables, until: int) -> tuple[int, list[str], list[hct.TablePlan]]:
        """Load the parts, if there is a file; return the steps that are done, the tables' codecs and their plans."""
        if not self.file or not self.file.exists():
            return 0, [], []
        saved = torch.load(self.file)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        codecs, plans = saved["codecs"], [hct.TablePlan(*plan) for plan in saved["plans"]]
        if codecs:
            tables.groups = groups_of(codecs, until if plans else 0)
        hct.load_state_dict(saved["compression"])  # the steps that groups have counted, too
        return saved["step"], codecs, plans

    def save(self, **more: Any) -> None:
        if self.file:
            torch.save({n: part.state_dict() for n, part in self.parts.items()} | more, self.file)


def report(
    args: argparse.Namespace, found: dict[str, Any], plans: list[hct.TablePlan], rows: list[int]
) -> None:
    for t, plan in enumerate(plans):
        print(f"table {t}, {rows[t]} rows: index {plan.index:.3f}, {plan.codec}")
    print(f"AUC {found['auc']:.6f} on {found['held_out']} held-out clicks")
    speed, plain, wire = found["samples_per_second"], found["plain_bytes"], found["wire_bytes"]
    print(f"{found['seconds']:.2f} s, {speed:.0f} samples/s; replicas agree: {found['agree']}")
    print(
        f"rows: sent {wire / 1e6:.2f} MB in the place of {plain / 1e6:.2f} MB, ratio {plain / max(wire, 1):.2f}"
    )
    if args.json:
        args.json.write_text(json.dumps(found | {"codecs": [plan.codec for plan in plans]}) + "\n")


def main() -> None:
    args = arguments()
    torch.sparse.check_sparse_tensor_invariants.disable()  # otherwise Adagrad warns that it is not set
    hct.set_policy("none")
    dist.init_process_group(args.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    dtype = getattr(torch, args.dtype)

    clicks = Clicks(args.seed, args.rows)
    tables = Tables(clicks, args.width, args.seed, dtype, group_of("emb_grad")).to(device)
    one = f"bounded:abs={args.bound},coder={args.coder}" + f",vector={args.width}" * (args.coder == "lz")
    tables.groups = groups_of(["none"] * TABLES)
    torch.manual_seed(args.seed)
    ddp = DistributedDataParallel(Interaction(args.width).to(device, dtype))
    optimizer = torch.optim.Adagrad([*ddp.parameters(), *tables.parameters()], lr=args.lr)

    def drawn(step: int, n: int) -> list[torch.Tensor]:
        return [x.to(device, dtype if x.is_floating_point() else None) for x in clicks.draw(step, rank, n)]

    checkpoint = Checkpoint(args.folder, {"tables": tables, "ddp": ddp, "optimizer": optimizer})
    done, codecs, plans = checkpoint.resume(tables, args.until)
    losses: list[torch.Tensor] = []
    began = time.perf_counter()
    for step in range(done + 1, args.steps + 1):
        dense, ids, labels = drawn(step, args.batch)
        if step == args.from_step and args.compress != "none":
            plans = tables.plan(ids, args.bounds, args.rate) if args.compress == "dual" else []  # [4]
            codecs = [plan.codec for plan in plans] or [one] * TABLES
            tables.groups = groups_of(codecs, args.until if plans else 0)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(ddp(dense, tables(ids)), labels)
        loss.backward()
        optimizer.step()
        hct.advance_step()
        losses.append(loss.detach())
        if step in (1, args.steps) or step % 50 == 0:
            mean = gathered(losses[-1]).mean()
            if rank == 0:
                print(f"step {step}: loss {mean:.6f}")
    seconds = time.perf_counter() - began
    kept = {"codecs": codecs, "plans": [astuple(plan) for plan in plans]}
    checkpoint.save(step=args.steps, compression=hct.state_dict(), **kept)

    dense, ids, labels = drawn(TEST, args.test)
    with torch.no_grad():
        scores = ddp.module(dense, tables(ids, exact=True))
    sent = [[row.plain_bytes, row.wire_bytes] for row in hct.stats() if row.axis == "emb"]
    plain, wire = gathered(torch.tensor(sent or [[0, 0]], device=device).sum(0)).sum(0).tolist()
    shared = gathered(torch.cat([p.detach().flatten() for p in ddp.parameters()]))
    found = {
        "losses": gathered(torch.stack(losses)).mean(0).tolist(),
        "auc": auc(gathered(scores).ravel(), gathered(labels).ravel()),
        "held_out": args.test * ranks,
        "seconds": seconds,
        "samples_per_second": len(losses) * args.batch * ranks / seconds,
        "plain_bytes": plain,
        "wire_bytes": wire,
        "agree": bool((shared == shared[0]).all()),
    }
    if rank == 0:
        report(args, found, plans, clicks.rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

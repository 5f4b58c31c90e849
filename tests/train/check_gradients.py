"""Run on several ranks: are the gradients and the loss those of one process?

Arguments: dp pp tp backend. Every rank computes the whole model's gradients by itself and compares its part.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hybridcomp.train.data import Batches
from hybridcomp.train.model import ModelShape, build_gpt, loss_of
from hybridcomp.train.optim import global_norm, local_square_sums
from hybridcomp.train.parallel import build_stage, rehearse
from hybridcomp.train.pipeline import make_runner
from hybridcomp.train.start import prepare
from hybridcomp.train.trainer import process_group

SPLIT_DIM = {"qkv": 0, "up": 0, "out": 1, "down": 1}


def main(dp: int, pp: int, tp: int, backend: str) -> list[str]:
    arguments = (
        f"--dp {dp} --pp {pp} --tp {tp} --backend {backend} --policy none --layers 6 --d-model 48 --heads 12 "
        f"--seq-len 16 --micro-batches 4 --micro-batch-size 2 --eval-batches 2 --data {Path(__file__)}"
    )
    job = prepare(arguments.split())
    config = job.config
    problems: list[str] = []
    with process_group(job) as topology:
        shape = ModelShape(256, config.layers, config.d_model, config.heads, config.seq_len)
        stage = build_stage(shape, config, job.policy, topology)
        runner = make_runner(stage, shape, config, topology)
        rehearse(stage, shape, config, topology)
        batches = Batches(job.corpus, config)

        whole = build_gpt(shape, config.seed)
        everything = torch.cat([torch.from_numpy(batches.train(0, r)) for r in range(dp)])
        wanted_loss = loss_of(whole(everything[:, :-1]), everything[:, 1:])
        wanted_loss.backward()

        held_out = [torch.from_numpy(m) for m in batches.evaluate(topology.dp)]
        val_loss = runner.evaluate(held_out)  # before training: it must leave nothing behind
        with torch.no_grad():
            wanted_val = sum(loss_of(whole(m[:, :-1]), m[:, 1:]).item() for m in held_out) / len(held_out)
        loss = runner.train(torch.from_numpy(batches.train(0, topology.dp)))
        if topology.is_last_stage:
            mine = torch.tensor([loss / dp], dtype=torch.float64)
            dist.all_reduce(mine, group=topology.group("dp"))
            compare(problems, "loss", mine, wanted_loss.detach().double().view(1))
            compare(problems, "validation loss", torch.tensor([val_loss]), torch.tensor([wanted_val]))
        for name, parameter in whole.named_parameters():
            if name not in stage.parameters:
                continue
            wanted = parameter.grad
            if name in stage.split:
                wanted = wanted.chunk(tp, SPLIT_DIM[name.split(".")[-2]])[topology.tp]
            compare(problems, name, stage.parameters[name].grad, wanted)

        names = stage.parameters
        sums = local_square_sums(
            [p for n, p in names.items() if n in stage.split],
            [p for n, p in names.items() if n not in stage.split],
        )
        gathered = [torch.zeros(2, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.tensor(sums, dtype=torch.float64))
        norm = global_norm(topology, torch.stack(gathered))
        squares = sum(p.grad.double().square().sum() for p in whole.parameters())
        compare(problems, "norm", torch.tensor([norm]).double(), squares.sqrt().view(1))
        problems = [f"rank {topology.rank}: {p}" for p in problems]
        bad = torch.tensor([len(problems)])
        dist.all_reduce(bad)
        if topology.rank == 0:
            print(f"compared {len(names)} parameters, {int(bad)} problems", flush=True)
    return problems


def compare(problems: list[str], name: str, got: torch.Tensor | None, wanted: torch.Tensor) -> None:
    if got is None or got.shape != wanted.shape:
        problems.append(f"{name}: {None if got is None else got.shape} instead of {wanted.shape}")
    elif not torch.allclose(got, wanted.to(got.dtype), rtol=1e-4, atol=2e-6):
        problems.append(f"{name}: off by {(got - wanted).abs().max():.3g}")


if __name__ == "__main__":
    found = main(*map(int, sys.argv[1:4]), sys.argv[4])
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)

"""The communication hook alone: gloo (or NCCL) under torchrun, no MPI.

    torchrun --standalone --nproc-per-node 3 examples/torchrun_hook.py
    torchrun --standalone --nproc-per-node 3 examples/torchrun_hook.py --policy powersgd:rank=4

The line marked [1] is all that an existing program adds. The policy is a file beside this program: matrices and
convolutions go by low rank, with error feedback, what is small as it is, the first steps uncompressed.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp.torch as hct

POLICY = Path(__file__).with_name("policy.toml")


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 256), nn.ReLU(), nn.Linear(256, 10)),
    )


def draw(generator: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw noisy pictures of ten patterns: float32 [count, 1, 16, 16], and which pattern each shows."""
    patterns = torch.randn(10, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    labels = torch.randint(10, (count,), generator=generator)
    return patterns[labels] + 2 * torch.randn(count, 1, 16, 16, generator=generator), labels


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--policy", default=POLICY, help="a preset, a TOML file, or a codec such as int8")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="samples of each rank and step")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)

    model = DistributedDataParallel(make_model().to(device))
    state = hct.HookState(args.policy, module=model)
    model.register_comm_hook(state, hct.comm_hook)  # [1]

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(100 + rank)
    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        x, y = draw(generator, args.batch)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        if step == 1 or step % 10 == 0:
            mean = loss.detach()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item() / ranks:.6f}")
    seconds = time.perf_counter() - began

    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(everyone, mine)
    if rank == 0:
        agree = all(torch.equal(mine, other) for other in everyone)
        samples = args.steps * ranks * args.batch
        plain, wire = (
            sum(getattr(row, n) for row in hct.stats()) / 1e6 for n in ("plain_bytes", "wire_bytes")
        )
        print(f"{seconds:.2f} s, {samples / seconds:.0f} samples/s; replicas agree: {agree}")
        print(
            f"gradients: sent {wire:.2f} MB in the place of {plain:.2f} MB; MPI loaded: {'mpi4py' in sys.modules}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

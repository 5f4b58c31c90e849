"""DistributedDataParallel on the hybridcomp backend.

    mpiexec -n 4 python examples/ddp.py
    mpiexec -n 4 python examples/ddp.py --policy int4 --epochs 4 --checkpoint runs/ddp
    mpiexec -n 3 python examples/ddp.py --policy int4 --epochs 8 --checkpoint runs/ddp      # goes on, on fewer ranks

Two lines differ from a program for gloo: [1] and [2]. With them alone (--no-hook) the backend compresses DDP's buckets
as they are. Line [3] lets the policy choose for each parameter by its name, and keeps what compression loses for the
next step (error feedback); a checkpoint holds that memory of every rank, too: [4] and [5].
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hybridcomp.torch as hct  # [1]


def make_data(samples: int) -> TensorDataset:
    """Return random points, labelled by a random network."""
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 10))
    x = torch.randn(samples, 256)
    with torch.no_grad():
        return TensorDataset(x, teacher(x).argmax(1))


def make_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, device: torch.device
) -> float:
    """Train for an epoch; return its mean loss over all ranks."""
    total = torch.zeros((), device=device)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total, dist.ReduceOp.AVG)
    return total.item() / len(loader)


def replicas_agree(model: nn.Module) -> bool:
    """Tell whether all ranks hold the same bits."""
    data = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(data).hexdigest())
    return len(set(digests)) == 1


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(hct.state_dict(), folder / f"compression{dist.get_rank()}.pt")  # [4]
    if dist.get_rank() == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**saved, "epochs": epochs, "ranks": dist.get_world_size()}, folder / "training.pt")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    saved = torch.load(folder / "training.pt", map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    states = [torch.load(folder / f"compression{r}.pt") for r in range(saved["ranks"])]
    hct.load_state_dict(hct.reshard_state(states, dist.get_world_size())[dist.get_rank()])  # [5]
    return saved["epochs"]


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--policy", default="hybrid", help="a preset, a TOML file, or a codec such as int8")
    parser.add_argument("--hook", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64, help="samples of each rank and step")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to, and to go on from")
    args = parser.parse_args()

    options = hct.Options(policy=args.policy, axis="dp")
    dist.init_process_group("hybridcomp", pg_options=options)  # [2] was: dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)

    model = DistributedDataParallel(make_model().to(device))
    if args.hook:
        model.register_comm_hook(hct.HookState(args.policy, module=model), hct.comm_hook)  # [3]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    start = 0
    if args.checkpoint and (args.checkpoint / "training.pt").exists():
        start = load(args.checkpoint, model, optimizer, device)

    data = make_data(40 * args.batch)
    sampler = DistributedSampler(data, ranks, rank)
    loader = DataLoader(data, args.batch, sampler=sampler)
    began = time.perf_counter()
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        loss = train(model, optimizer, loader, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.6f}")
    seconds = time.perf_counter() - began

    if args.checkpoint:
        save(args.checkpoint, model, optimizer, args.epochs)
    agree = replicas_agree(model)
    if rank == 0:
        samples = (args.epochs - start) * len(data)
        plain, wire = (
            sum(getattr(row, n) for row in hct.stats()) / 1e6 for n in ("plain_bytes", "wire_bytes")
        )
        print(f"{seconds:.2f} s, {samples / seconds:.0f} samples/s; replicas agree: {agree}")
        print(f"sent {wire:.2f} MB in the place of {plain:.2f} MB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

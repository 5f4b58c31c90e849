"""Train with replicas that come and go: torchft's quorum and live recovery, gradients compressed by hybridcomp.

Start a lighthouse, then a replica in each of several shells (or on several hosts); end one and start it again:

    torchft_lighthouse --min_replicas 2 --bind '[::]:29510' &
    TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/torchft_ddp.py --steps 200 --policy hybrid

Replicas end at the same bits after each step that they commit, which the example prints as a hash.
"""

from __future__ import annotations

import argparse
import hashlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager
from torchft.optim import OptimizerWrapper

import hybridcomp.torch.torchft as hft


def model() -> nn.Module:
    torch.manual_seed(0)  # a replica that recovers gets the others' weights
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))


def digest(module: nn.Module) -> str:
    """Return a hash of a module's weights."""
    found = hashlib.sha256()
    for parameter in module.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="steps to commit")
    parser.add_argument("--policy", default="hybrid", help="preset, TOML file, or codec")
    parser.add_argument("--replicas", type=int, default=2, help="fewest replicas to train with")
    parser.add_argument("--name", default="replica", help="name of this replica")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds that an operation may take")
    args = parser.parse_args()

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=args.timeout)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def load(state: dict) -> None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=hft.ProcessGroupGloo(policy=args.policy, timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=args.replicas,
        timeout=limit,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=args.name,
    )
    try:
        ddp = hft.DistributedDataParallel(manager, net)
        managed = OptimizerWrapper(manager, optimizer)
        generator = torch.Generator().manual_seed(hash(args.name) % 2**31)
        truth = torch.linspace(-1, 1, 64)
        while manager.current_step() < args.steps:
            x = torch.randn(32, 64, generator=generator)
            managed.zero_grad()  # begins a step: the quorum
            loss = nn.functional.mse_loss(ddp(x).squeeze(1), torch.sin(x @ truth))
            loss.backward()
            before = manager.current_step()
            managed.step()  # if all replicas can commit
            if manager.current_step() > before:
                ranks = manager.num_participants()
                print(
                    f"step {manager.current_step()} of {ranks} replicas: loss {loss:.4f}, weights {digest(net)}",
                    flush=True,
                )
    finally:
        manager.shutdown(wait=False)


if __name__ == "__main__":
    main()

"""A mixture of experts: tokens travel to the ranks that hold their experts, and back.

    torchrun --standalone --nproc-per-node 4 examples/moe.py
    torchrun --standalone --nproc-per-node 4 examples/moe.py --backend gloo      # for comparison

The mesh's name [1] tells the policy what a message is: all-to-alls of a dimension named "ep" go by its section [ep],
8 bits in the default, in both directions. Experts live on one rank each, so their gradients need no sum; what all ranks
share is DDP's business, and the hook [2] compresses it by the section [dp].
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd as all_to_all
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import hybridcomp.torch as hct

WIDTH, LENGTH, LAYERS = 256, 64, 2


class Experts(nn.Module):
    """One expert on each rank; every token goes to the one that a router prefers, as far as there is room."""

    def __init__(self, group: dist.ProcessGroup, room: float) -> None:
        super().__init__()
        self.group, self.ranks, self.room = group, group.size(), room
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, self.ranks, bias=False)
        torch.manual_seed(10 + group.rank())  # experts differ, all else is the same on all ranks
        self.expert = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        torch.manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens: float32 [tokens, WIDTH], before and after."""
        y = self.norm(x)
        weight, choice = self.router(y).softmax(-1).max(-1)
        room = int(self.room * len(x) / self.ranks)  # tokens for an expert from each rank
        place = nn.functional.one_hot(choice, self.ranks).cumsum(0).gather(1, choice[:, None])[:, 0] - 1
        kept = (place < room).nonzero()[:, 0]
        slot = (choice * room + place)[kept]
        sent = torch.zeros(self.ranks * room, WIDTH, device=x.device).index_copy(0, slot, y[kept])
        arrived = all_to_all(sent, None, None, self.group)
        back = all_to_all(self.expert(arrived), None, None, self.group)
        return x.index_add(0, kept, back[slot] * weight[kept, None])


class Model(nn.Module):
    def __init__(self, group: dist.ProcessGroup, room: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.mix = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(LAYERS))
        self.experts = nn.ModuleList(Experts(group, room) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for mix, experts in zip(self.mix, self.experts, strict=True):
            x = x + mix(x)[0]
            x = experts(x.flatten(0, 1)).view_as(x)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", default="hybridcomp", help="or gloo, to compare with")
    parser.add_argument("--policy", default="hybrid", help="a preset, a TOML file, or a codec such as int8")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="sequences of each rank and step")
    parser.add_argument("--room", type=float, default=1.5, help="tokens of an expert, of its even share")
    args = parser.parse_args()

    hct.set_policy(args.policy)
    dist.init_process_group(args.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (ranks,), mesh_dim_names=("ep",))  # [1]
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    torch.manual_seed(1)
    model = Model(mesh.get_group(), args.room).to(device)
    own = [name for name, _ in model.named_parameters() if ".expert." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    ddp = DistributedDataParallel(model)
    if args.backend == "hybridcomp":
        ddp.register_comm_hook(hct.HookState(args.policy, module=ddp), hct.comm_hook)  # [2]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(100 + rank)
    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - LENGTH, (args.batch,), generator=generator)
        batch = torch.stack([text[s : s + LENGTH + 1] for s in starts]).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        for name, parameter in model.named_parameters():
            if name in own:
                parameter.grad /= ranks  # all ranks' tokens, as DDP's averages
        optimizer.step()
        if step == 1 or step % 10 == 0:
            mean = loss.detach()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item() / ranks:.6f}")
    seconds = time.perf_counter() - began

    shared = b"".join(
        p.detach().cpu().numpy().tobytes() for name, p in model.named_parameters() if name not in own
    )
    digests = [""] * ranks
    dist.all_gather_object(digests, hashlib.sha256(shared).hexdigest())
    if rank == 0:
        samples = args.steps * args.batch * ranks
        plain, wire = (
            sum(getattr(row, n) for row in hct.stats()) / 1e6 for n in ("plain_bytes", "wire_bytes")
        )
        agree = len(set(digests)) == 1
        print(f"{seconds:.2f} s, {samples / seconds:.0f} samples/s; replicas agree: {agree}")
        print(f"sent {wire:.2f} MB in the place of {plain:.2f} MB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

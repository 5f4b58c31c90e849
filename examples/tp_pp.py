"""Tensor and pipeline parallelism on one mesh, by PyTorch's own parallelize_module and pipelining.

    torchrun --standalone --nproc-per-node 4 examples/tp_pp.py                      # 2 stages of 2 ranks
    torchrun --standalone --nproc-per-node 8 examples/tp_pp.py --tp 2 --steps 100   # 4 stages of 2 ranks

The mesh's names [1] tell the policy what a message is: activations and their gradients inside a layer go by its section
[tp], those between stages by [pp]; --policy examples/policy.toml is one of your own. The default, hybrid, leaves [tp]
alone where all its ranks are on one host.
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hybridcomp.torch as hct

WIDTH, HEADS, LENGTH, LAYERS = 128, 4, 64, 4


class Block(nn.Module):
    """Causal attention and a perceptron. Works on however many heads this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def split_over_ranks(block: Block, mesh: DeviceMesh) -> None:
    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in ("out", "down")})


def make_stage(index: int, count: int, tp: DeviceMesh) -> nn.Module:
    """This rank's part of the model; all ranks build the whole from one seed, and keep some of it."""
    torch.manual_seed(1)
    embed, head = nn.Embedding(256, WIDTH), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
    blocks = [Block() for _ in range(LAYERS)]
    mine = blocks[index * LAYERS // count : (index + 1) * LAYERS // count]
    for block in mine:
        split_over_ranks(block, tp)
    return nn.Sequential(*[embed] * (index == 0), *mine, *[head] * (index == count - 1))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", default="hybridcomp", help="or gloo, to compare with")
    parser.add_argument("--policy", default="hybrid", help="a preset, a TOML file, or a codec such as int8")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share a layer; the others make stages")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step, in four micro-batches")
    args = parser.parse_args()

    hct.set_policy(args.policy)
    dist.init_process_group(args.backend)
    rank, kind = dist.get_rank(), "cuda" if torch.cuda.is_available() else "cpu"
    shape = (dist.get_world_size() // args.tp, args.tp)
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("pp", "tp"))  # [1]
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    index, last = mesh.get_local_rank("pp"), shape[0] - 1

    model = make_stage(index, shape[0], mesh["tp"]).to(device)
    stage = PipelineStage(model, index, shape[0], device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=False)  # of DTensors and plain ones

    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(2)  # the same batches on all ranks
    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - LENGTH, (args.batch,), generator=generator)
        batch = torch.stack([text[s : s + LENGTH + 1] for s in starts]).to(device)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = (batch[:, :-1],) if index == 0 else ()
        schedule.step(*inputs, target=batch[:, 1:] if index == last else None, losses=losses)
        optimizer.step()
        if index == last and mesh.get_local_rank("tp") == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step}: loss {sum(losses).item() / len(losses):.6f}\n", end="", flush=True)
    seconds = time.perf_counter() - began

    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]  # the same on all ranks of a stage
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in whole)).hexdigest()
    digests = [("", -1)] * dist.get_world_size()
    dist.all_gather_object(digests, (digest, index))
    if rank == 0:
        plain, wire = (
            sum(getattr(row, n) for row in hct.stats()) / 1e6 for n in ("plain_bytes", "wire_bytes")
        )
        agree = len(set(digests)) == shape[0]
        print(f"{seconds:.2f} s, {args.steps * args.batch / seconds:.0f} samples/s; replicas agree: {agree}")
        print(f"sent {wire:.2f} MB in the place of {plain:.2f} MB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

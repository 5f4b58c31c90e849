"""A GPT in nanoGPT's manner: a program that never heard of hybridcomp, and takes its backend from the command line.

    torchrun --standalone --nproc-per-node 4 examples/nanogpt.py --backend hybridcomp
    hybridcomp run -n 4 --replace gloo -- python examples/nanogpt.py           # although it names gloo
    hybridcomp run -n 4 --hook -- python examples/nanogpt.py                   # gloo, and gradients compressed

The loop is that of https://github.com/karpathy/nanoGPT: RANK tells whether there are other processes, gradients are
accumulated over micro-batches, and DDP sums them with the last one. It learns the sources of Python's own library, one
token a byte.
"""

import argparse
import contextlib
import math
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed import all_gather, destroy_process_group, get_backend, init_process_group
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.joined(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("joined.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if last else 0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.blocks(self.tokens(x) + self.places.weight[: x.shape[1]])
        return nn.functional.cross_entropy((h @ self.tokens.weight.T).flatten(0, 1), y.flatten())


def read_library() -> torch.Tensor:
    """Read the sources of Python's library that begin with a to d: uint8 [bytes]."""
    sources = sorted(Path(os.__file__).parent.glob("[a-d]*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


def replicas_agree(model: nn.Module, ranks: int) -> bool:
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(ranks)]
    all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", default="nccl" if torch.cuda.is_available() else "gloo")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank's micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    args = parser.parse_args()

    ddp = int(os.environ.get("RANK", "-1")) != -1  # is this a ddp run?
    rank, ranks, device = 0, 1, "cuda" if torch.cuda.is_available() else "cpu"
    if ddp:
        init_process_group(backend=args.backend)
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if device == "cuda":
            device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
            torch.cuda.set_device(device)

    torch.manual_seed(1337)
    raw = model = GPT(args.width, args.layers, 4, args.length).to(device)
    if ddp:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    data = read_library()
    generator = torch.Generator().manual_seed(1337 + rank)

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(data) - args.length - 1, (args.batch,), generator=generator)
        pieces = torch.stack([data[s : s + args.length + 1].long() for s in starts]).to(device)
        return pieces[:, :-1], pieces[:, 1:]

    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, step / 10) * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))
        for micro in range(args.accumulate):
            last = micro == args.accumulate - 1
            with contextlib.nullcontext() if last or not ddp else model.no_sync():
                loss = model(*get_batch()) / args.accumulate
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step}: loss {loss.item() * args.accumulate:.6f}", flush=True)
    seconds = time.perf_counter() - began

    agree = replicas_agree(raw, ranks) if ddp else True
    if rank == 0:
        tokens = args.steps * args.accumulate * args.batch * args.length * ranks
        print(f"backend {get_backend() if ddp else 'none'}; replicas agree: {agree}")
        print(f"{seconds:.2f} s, {tokens / seconds:.0f} tokens/s", flush=True)
    if ddp:
        destroy_process_group()


if __name__ == "__main__":
    main()

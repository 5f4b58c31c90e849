"""FSDP2: parameters gathered and gradients scattered in compressed form.

    torchrun --standalone --nproc-per-node 4 examples/fsdp2.py
    torchrun --standalone --nproc-per-node 4 examples/fsdp2.py --policy int8 --difference

One line follows fully_shard, [1]; it works on gloo and NCCL as well. Every rank keeps its own shard in full precision,
and all compute with the same rounded parameters. With --difference parameters travel as what has changed since the last
step, so that rounding errors do not add up.
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hybridcomp.torch as hct

WIDTH, HEADS, LENGTH, LAYERS = 128, 4, 64, 3


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        layer = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **layer) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x).clone()  # FSDP2 warns of a view


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", default="hybridcomp", help="or gloo, to compare with")
    parser.add_argument("--policy", default="hybrid", help="a preset, a TOML file, or a codec such as int8")
    parser.add_argument("--difference", action="store_true", help="gather differences of parameters")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4, help="sequences of each rank and step")
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (ranks,), mesh_dim_names=("fsdp",))
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    torch.manual_seed(1)
    model = LanguageModel().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if args.backend == "hybridcomp":
        hct.compress_fsdp(model, args.policy, difference=args.difference)  # [1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(100 + rank)
    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - LENGTH, (args.batch,), generator=generator)
        batch = torch.stack([text[s : s + LENGTH + 1] for s in starts]).to(device)
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if step == 1 or step % 10 == 0:
            mean = loss.detach()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step}: loss {mean.item():.6f}")
    seconds = time.perf_counter() - began

    with torch.no_grad():  # all ranks compute the same from the same
        logits = model(text[:LENGTH].unsqueeze(0).to(device))
    digests = [""] * ranks
    dist.all_gather_object(digests, hashlib.sha256(logits.cpu().numpy().tobytes()).hexdigest())
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

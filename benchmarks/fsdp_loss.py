"""Train under FSDP2 with gradients in 4 bits, by the form of their error feedback: losses over seeds.

python benchmarks/fsdp_loss.py --steps 200 --json benchmarks/results/fsdp_loss.json
python benchmarks/fsdp_loss.py --seeds 1 --steps 20                        # a short look

Each variant trains the GPT of studies/loco.toml with each seed on two hosts of the lab, two ranks each, links
unshaped: parameters are gathered as they are, gradients reduce-scattered in float32 by gloo, or through
``compress_fsdp`` in bf16 or in 4 bits. The loss is of held-out text, at the end. Ranks whose outputs have other bits,
and losses that are not finite, end the benchmark. Takes root, as ``hybridcomp lab`` does.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from programs import CheckError, found_by
from resultfile import write
from tqdm import tqdm

from hybridcomp.net import Lab
from hybridcomp_lab.train.config import TrainConfig

HOSTS, PPN = 2, 2
TIMEOUT = 900.0
CONFIG = TrainConfig(
    policy="none",
    dp=HOSTS * PPN,
    layers=4,
    d_model=128,
    heads=4,
    seq_len=64,
    micro_batches=1,
    micro_batch_size=8,
    lr=3e-3,
    min_lr=1e-4,
    warmup_steps=50,
    eval_batches=32,
)
GLOO = "gloo"
FOUR = 'min_bytes = 16384\nfsdp.reduce_scatter = {{ codec = "int4:block=128", algorithm = "{algorithm}"{more} }}\n'
ONE, TWO, LOCO = "hierarchical", "two_level", ', feedback = "loco"'
VARIANTS = {
    GLOO: "",
    "bf16": 'fsdp.reduce_scatter = "bf16"\n',
    "4 bits": FOUR.format(algorithm=ONE, more=""),
    "4 bits, ef": FOUR.format(algorithm=ONE, more=', feedback = "ef"'),
    "4 bits, loco": FOUR.format(algorithm=ONE, more=LOCO),
    "4 bits, loco, two levels": FOUR.format(algorithm=TWO, more=LOCO),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--kind", default="auto", help="of lab, see hybridcomp lab")
    parser.add_argument("--json", type=Path, help="write all runs there")
    parser.add_argument("--train", nargs=2, metavar=("POLICY", "SEED"), help=argparse.SUPPRESS)
    return parser.parse_args()


def train(config: TrainConfig, policy: Path, file: Path) -> None:
    """Train on this rank; the first one writes all ranks' loss, and whether they agree, to ``file``."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    import hybridcomp.torch as hct  # noqa: PLC0415
    from hybridcomp_lab.train.checkpoints.resume import run_identity  # noqa: PLC0415
    from hybridcomp_lab.train.data import Batches  # noqa: PLC0415
    from hybridcomp_lab.train.model.gpt import ModelShape, build_gpt, loss_of  # noqa: PLC0415
    from hybridcomp_lab.train.optimizer.optimizers import learning_rate, set_learning_rate  # noqa: PLC0415
    from hybridcomp_lab.train.text import load_corpus  # noqa: PLC0415

    dist.init_process_group("hybridcomp" if policy.stat().st_size else GLOO)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    corpus = load_corpus(config.data, config.tokenizer, config.val_fraction, config.vocab_size)
    batches = Batches(corpus, config)
    model = build_gpt(ModelShape.of(run_identity(config, corpus.vocab_size, "")), config.seed)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if policy.stat().st_size:
        hct.compress_fsdp(model, str(policy))
    every = dict(model.named_parameters())
    decayed = {name for name, p in every.items() if p.dim() >= 2 and "embed" not in name}
    groups = [
        {"params": [every[name] for name in sorted(decayed)], "weight_decay": config.weight_decay},
        {"params": [p for name, p in every.items() if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))
    for step in range(config.steps):
        set_learning_rate(optimizer, learning_rate(config, step))
        tokens = torch.from_numpy(batches.train(step, rank))
        optimizer.zero_grad()
        loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
    model.eval()
    total = torch.zeros(1, dtype=torch.float64)
    with torch.no_grad():
        for batch in batches.evaluate(rank):
            tokens = torch.from_numpy(batch)
            total += loss_of(model(tokens[:, :-1]), tokens[:, 1:]).double()
        probe = model(torch.arange(config.seq_len).unsqueeze(0))  # all ranks compute the same from the same
    losses, digests = [0.0] * ranks, [""] * ranks
    dist.all_gather_object(losses, total.item() / config.eval_batches)
    dist.all_gather_object(digests, hashlib.sha256(probe.numpy().tobytes()).hexdigest())
    if rank == 0:
        found = {"loss": mean(losses), "agree": len(set(digests)) == 1}
        file.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def run(lab: Lab, variant: str, seed: int, steps: int) -> dict[str, Any]:
    """Train a variant on all hosts.

    Raises:
        CheckError: the training failed, its loss is not finite, or its ranks differ.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as policy:
        policy.write(VARIANTS[variant])
        policy.flush()
        program = ["python", __file__, "--steps", str(steps), "--train", policy.name, str(seed)]
        found = found_by(lab, program, PPN, TIMEOUT)
    if not found["agree"] or not math.isfinite(found["loss"]):
        raise CheckError(f"{variant}, seed {seed}: ranks agree: {found['agree']}, loss {found['loss']}")
    return {"variant": variant, "seed": seed} | found


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each variant: means over the seeds, and gaps to gloo's loss with the same seed."""
    exact = {one["seed"]: one["loss"] for one in runs if one["variant"] == GLOO}
    rows = []
    for variant in VARIANTS:
        mine = [one for one in runs if one["variant"] == variant]
        gaps = [one["loss"] - exact[one["seed"]] for one in mine]
        rows.append(
            {
                "variant": variant,
                "loss": mean(one["loss"] for one in mine),
                "spread": stdev(one["loss"] for one in mine) if len(mine) > 1 else 0.0,
                "gap": mean(gaps),
                "least_gap": min(gaps),
                "largest_gap": max(gaps),
            }
        )
    return rows


def main() -> None:
    args = arguments()
    config = replace(CONFIG, steps=args.steps)
    if args.train is not None:
        policy, seed = args.train
        train(replace(config, seed=int(seed)), Path(policy), args.json)
        return
    runs = []
    with Lab(HOSTS, None, kind=args.kind) as lab:
        about = {"hosts": HOSTS, "ppn": PPN, "steps": args.steps}
        todo = list(itertools.product(args.seeds, VARIANTS))
        for seed, variant in (bar := tqdm(todo, unit="run")):
            bar.set_description(f"{variant}, seed {seed}")
            runs.append(run(lab, variant, seed, args.steps))
    rows = table(runs)
    print(f"{'variant':>26} {'loss':>8} {'spread':>8} {'gap':>8} {'from':>8} {'to':>8}")
    for row in rows:
        print(
            f"{row['variant']:>26} {row['loss']:>8.4f} {row['spread']:>8.4f} {row['gap']:>+8.4f} "
            f"{row['least_gap']:>+8.4f} {row['largest_gap']:>+8.4f}"
        )
    if args.json is not None:
        write(args.json, about | {"rows": rows, "runs": runs}, lab.kind)


if __name__ == "__main__":
    try:
        main()
    except CheckError as error:
        sys.exit(f"fsdp_loss: {error}")

"""1-bit Adam from a DeepSpeed user's seat: two lines, marked, beside AdamW; gloo or NCCL under torchrun, no MPI.

    torchrun --standalone --nproc-per-node 4 examples/onebit.py
    torchrun --standalone --nproc-per-node 4 examples/onebit.py --optimizer zero-one
    torchrun --standalone --nproc-per-node 4 examples/onebit.py --optimizer zero-one --local-steps 16
    torchrun --standalone --nproc-per-node 4 examples/onebit.py --optimizer adamw     # the same run, uncompressed

It trains nanogpt.py's model, and says the mean loss over text that it has not seen, the same batches whatever the
options, and the bytes that rank 0 has sent: of all steps, and of those since a part of them.
"""

import argparse
import itertools
import math
import time

import torch
import torch.distributed as dist
from nanogpt import GPT, read_library, replicas_agree
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp.torch as hct

HELD_OUT = 1 / 20  # of the text, its end


def sent() -> tuple[int, int]:
    """Return the bytes that rank 0 has sent, and those that it would have sent uncompressed."""
    rows = [row for row in hct.stats() if row.axis == "dp"]
    return sum(row.wire_bytes for row in rows), sum(row.plain_bytes for row in rows)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--optimizer", choices=("onebit", "zero-one", "adamw"), default="onebit")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--warmup", type=int, default=0, help="steps that send gradients; 0: a fifth")
    parser.add_argument("--codec", default="sign", help="of momenta")
    parser.add_argument(
        "--scaler",
        type=int,
        default=16,
        help="zero-one's var_update_scaler: renewals of the variance after which the steps between them double",
    )
    parser.add_argument(
        "--local-steps", type=int, default=1, help="most steps from one exchange of zero-one to the next"
    )
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--clip", type=float, default=0.0, help="norm at which gradients of the warm-up are clipped"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank's step")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    return parser.parse_args()


def make_optimizer(
    model: DistributedDataParallel, args: argparse.Namespace, warmup: int
) -> torch.optim.Optimizer:
    """Make an optimizer that decays matrices, and whatever exchanges what it steps by."""
    matrices = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}
    groups = [matrices, {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    options = {"lr": args.lr, "betas": (0.9, 0.99)}
    if args.optimizer == "adamw":
        model.register_comm_hook(hct.HookState("none", module=model), hct.comm_hook)  # which counts bytes
        return torch.optim.AdamW(groups, **options)
    options |= {"decoupled_weight_decay": True, "codec": args.codec}
    if args.optimizer == "onebit":
        optimizer = hct.OnebitAdam(groups, freeze_step=warmup, **options)  # [1]
    else:
        # Local steps begin a sixth of the run after the warm-up, when the variance stays, and double by twentieths.
        local = {
            "var_freeze_step": warmup + args.steps // 6,
            "local_step_scaler": max(1, args.steps // 20),
            "local_step_clipper": args.local_steps,
        }
        options |= local if args.local_steps > 1 else {}
        optimizer = hct.ZeroOneAdam(groups, warmup_steps=warmup, var_update_scaler=args.scaler, **options)
    optimizer.register(model)  # [2]
    return optimizer


def main() -> None:
    args = read_arguments()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    raw = GPT(args.width, args.layers, 4, args.length).to(device)
    model = DistributedDataParallel(raw)
    data = read_library()
    cut = int(len(data) * (1 - HELD_OUT))

    def draw(text: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - args.length - 1, (args.batch,), generator=generator)
        pieces = torch.stack([text[s : s + args.length + 1].long() for s in starts]).to(device)
        return pieces[:, :-1], pieces[:, 1:]

    warmup = args.warmup or args.steps // 5
    optimizer = make_optimizer(model, args, warmup)
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)
    began, before = time.perf_counter(), (0, 0)
    for step in itertools.count(1):
        # Local steps go on to the next exchange, after which the ranks' weights are equal.
        if step > args.steps and getattr(optimizer, "synchronized", True):
            break
        done = min(1, step / args.steps)
        rate = min(1, 10 * done) * (0.55 + 0.45 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        loss = model(*draw(data[:cut], generator))
        loss.backward()
        if args.clip and (step <= warmup or args.optimizer == "adamw"):
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        if step == warmup:
            before = sent()
        if rank == 0 and (step == 1 or step % max(1, args.steps // 12) == 0):
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    seconds = time.perf_counter() - began

    agree = replicas_agree(raw, ranks)
    if rank == 0:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            losses = [raw(*draw(data[cut:], generator)).item() for _ in range(100)]
        wire, plain = sent()
        print(f"held-out loss {sum(losses) / len(losses):.4f}; {seconds:.1f} s; replicas agree: {agree}")
        print(f"gradients: sent {wire / 1e6:.2f} MB in the place of {plain / 1e6:.2f} MB; ", end="")
        since, plain_since = wire - before[0], plain - before[1]
        print(f"after step {warmup} {since / 1e6:.2f} MB, {plain_since / since:.1f} times fewer")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

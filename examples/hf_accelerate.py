"""Hugging Face transformers with accelerate on the hybridcomp backend.

    accelerate launch --multi_gpu --num_processes 4 --mixed_precision no examples/hf_accelerate.py     # on CPUs, too
    torchrun --standalone --nproc-per-node 4 examples/hf_accelerate.py --policy int4 --steps 100
    hybridcomp run -n 4 -- python examples/hf_accelerate.py

A small GPT-2 with random weights learns the text of this program. accelerate is told the backend [1]; what it gathers
and reduces then goes over it, too. The hook [2] is optional, as with plain DDP. With ``--freeze-step`` 1-bit Adam takes
AdamW's place and the hook's [3].
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

import hybridcomp.torch as hct

LENGTH = 64


def windows(count: int) -> TensorDataset:
    """Pieces of this program's text, one token a byte: int64 [count, LENGTH]."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - LENGTH, (count,))
    return TensorDataset(torch.stack([text[s : s + LENGTH] for s in starts]))


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", default="hybridcomp", help="or gloo, to compare with")
    parser.add_argument("--policy", default="hybrid", help="a preset, a TOML file, or a codec such as int8")
    parser.add_argument("--hook", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--freeze-step", type=int, help="1-bit Adam, with a warm-up of so many steps")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4, help="sequences of each rank and step")
    args = parser.parse_args()

    hct.set_policy(args.policy)
    backend = InitProcessGroupKwargs(backend=args.backend)  # [1]
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[backend])

    set_seed(1)
    small = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 128, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**small, bos_token_id=None, eos_token_id=None, loss_type="ForCausalLM")
    model = GPT2LMHeadModel(config)
    if args.freeze_step is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    else:
        options = {"freeze_step": args.freeze_step, "decoupled_weight_decay": True, "weight_decay": 0.01}
        optimizer = onebit = hct.OnebitAdam(model.parameters(), lr=3e-3, **options)
    schedule = get_linear_schedule_with_warmup(optimizer, 5 * accelerator.num_processes, 10**6)
    loader = DataLoader(windows(args.steps * args.batch * accelerator.num_processes), args.batch)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if args.freeze_step is not None:
        onebit.register(model)  # [3]
    elif args.hook and args.backend == "hybridcomp":
        model.register_comm_hook(hct.HookState(args.policy, module=model), hct.comm_hook)  # [2]

    began = time.perf_counter()
    for step, (tokens,) in enumerate(loader, 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            mean = accelerator.reduce(loss.detach(), "mean").item()
            if accelerator.is_main_process:
                print(f"step {step}: loss {mean:.6f}")
    seconds = time.perf_counter() - began

    data = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    digests = [""] * accelerator.num_processes
    dist.all_gather_object(digests, hashlib.sha256(data).hexdigest())
    if accelerator.is_main_process:
        samples = args.steps * args.batch * accelerator.num_processes
        plain, wire = (
            sum(getattr(row, n) for row in hct.stats()) / 1e6 for n in ("plain_bytes", "wire_bytes")
        )
        agree = len(set(digests)) == 1
        print(f"{seconds:.2f} s, {samples / seconds:.0f} samples/s; replicas agree: {agree}")
        print(f"sent {wire:.2f} MB in the place of {plain:.2f} MB")
    accelerator.end_training()


if __name__ == "__main__":
    main()

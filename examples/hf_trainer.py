"""transformers' Trainer as it is: the backend is one of its arguments.

    torchrun --standalone --nproc-per-node 4 examples/hf_trainer.py --ddp_backend hybridcomp
    accelerate launch --multi_gpu --num_processes 4 --mixed_precision no examples/hf_trainer.py --ddp_backend hybridcomp
    HYBRIDCOMP_HOOK=1 torchrun --standalone --nproc-per-node 4 examples/hf_trainer.py     # gloo or NCCL, and the hook
    torchrun --standalone --nproc-per-node 4 examples/hf_trainer.py --freeze_step 10      # 1-bit Adam, on gloo or NCCL

A small GPT-2 learns the text of this program; ``--model`` names a folder with another, to go on from. All of
TrainingArguments' options are this program's, and its policy is HYBRIDCOMP_POLICY. Nothing here is of hybridcomp but
the optimizer of ``--freeze_step``, which the Trainer is given [1], and registered once it has wrapped the model [2].
"""

import hashlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import PrinterCallback, TrainerCallback

import hybridcomp.torch as hct

LENGTH = 64
DEFAULTS = {
    "--output_dir": tempfile.gettempdir(),
    "--max_steps": "40",
    "--per_device_train_batch_size": "4",
    "--learning_rate": "3e-3",
    "--logging_steps": "10",
    "--logging_first_step": "true",
    "--save_strategy": "no",
    "--report_to": "none",
    "--disable_tqdm": "true",
    "--log_level": "warning",
    "--ddp_find_unused_parameters": "false",
    "--use_cpu": str(not torch.cuda.is_available()).lower(),
}


@dataclass
class ModelArguments:
    model: str | None = None  # a folder that save_pretrained has written
    width: int = 128
    layers: int = 2
    freeze_step: int | None = None  # 1-bit Adam, with a warm-up of so many steps; None: AdamW


class Windows(torch.utils.data.Dataset):
    """Pieces of this program's text, one token a byte."""

    def __init__(self, count: int) -> None:
        text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
        starts = torch.randint(len(text) - LENGTH, (count,), generator=torch.Generator().manual_seed(1))
        self._pieces = TensorDataset(torch.stack([text[s : s + LENGTH] for s in starts]))

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        (piece,) = self._pieces[index]
        return {"input_ids": piece, "labels": piece}


class Losses(TrainerCallback):
    def on_log(
        self, args: TrainingArguments, state: object, control: object, logs: dict, **_: object
    ) -> None:
        if args.process_index == 0 and "loss" in logs:
            print(f"step {state.global_step}: loss {float(logs['loss']):.6f}", flush=True)


class Register(TrainerCallback):
    trainer: Trainer | None = None

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.trainer.optimizer.optimizer.register(self.trainer.model_wrapped)  # [2]


def make_model(arguments: ModelArguments) -> torch.nn.Module:
    if arguments.model is not None:
        return AutoModelForCausalLM.from_pretrained(arguments.model)
    small = {"vocab_size": 256, "n_positions": LENGTH, "n_head": 4}
    return GPT2LMHeadModel(
        GPT2Config(
            **small,
            n_embd=arguments.width,
            n_layer=arguments.layers,
            bos_token_id=None,
            eos_token_id=None,
            loss_type="ForCausalLM",
        )
    )


def main() -> None:
    given = {word.split("=")[0] for word in sys.argv[1:]}
    rest = [word for name, value in DEFAULTS.items() if name not in given for word in (name, value)]
    arguments, training = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses(
        [*rest, *sys.argv[1:]]
    )
    set_seed(training.seed)
    model = make_model(arguments)
    count = training.max_steps * training.train_batch_size * training.world_size
    optimizer, register = None, Register()
    if arguments.freeze_step is not None:
        options = {"freeze_step": arguments.freeze_step, "decoupled_weight_decay": True}
        optimizer = hct.OnebitAdam(model.parameters(), training.learning_rate, **options)
    trainer = Trainer(
        model,
        training,
        train_dataset=Windows(max(count, 1)),
        callbacks=[Losses(), *([] if optimizer is None else [register])],
        optimizers=(optimizer, None),  # [1]
    )
    register.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    said = trainer.train()
    if not dist.is_initialized():
        return

    data = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    digests = [""] * training.world_size
    dist.all_gather_object(digests, hashlib.sha256(data).hexdigest())
    if training.process_index == 0:
        print(f"backend {dist.get_backend()}; replicas agree: {len(set(digests)) == 1}")
        seconds = said.metrics["train_runtime"]
        print(f"{seconds:.2f} s, {count / seconds:.1f} samples/s", flush=True)
        if optimizer is not None:
            plain, wire = (
                sum(getattr(row, n) for row in hct.stats()) / 1e6 for n in ("plain_bytes", "wire_bytes")
            )
            print(f"sent {wire:.2f} MB in the place of {plain:.2f} MB", flush=True)


if __name__ == "__main__":
    main()

"""Lightning on the hybridcomp backend.

    torchrun --standalone --nproc-per-node 4 examples/lightning_ddp.py
    hybridcomp run -n 4 -- python examples/lightning_ddp.py --policy powersgd:rank=4 --epochs 10

An existing program changes the backend of its strategy [1]. Under torchrun Lightning finds its ranks by itself; what
else sets torchrun's variables is as good, and [2] says so. The callback [3] lets the policy choose for each parameter,
with error feedback. (DDPStrategy takes a hook, too, but drops it without a word on CPUs.) With ``--freeze-step`` 1-bit
Adam takes the places of SGD and of the hook [4].
"""

import argparse
import hashlib
import os
import time

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hybridcomp.torch as hct


class Classifier(lightning.LightningModule):
    def __init__(self, freeze_step: int | None) -> None:
        super().__init__()
        self.freeze_step = freeze_step
        self.net = nn.Sequential(
            nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch + 1}: loss {self.trainer.callback_metrics['loss']:.6f}")

    def on_train_end(self) -> None:
        data = b"".join(p.detach().cpu().numpy().tobytes() for p in self.parameters())
        digests = [""] * self.trainer.world_size
        dist.all_gather_object(digests, hashlib.sha256(data).hexdigest())
        if self.trainer.is_global_zero:
            print(f"backend {dist.get_backend()}; replicas agree: {len(set(digests)) == 1}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.freeze_step is not None:
            return hct.OnebitAdam(self.parameters(), lr=1e-3, freeze_step=self.freeze_step)  # [4]
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_train_start(self) -> None:
        if self.freeze_step is not None:
            self.trainer.optimizers[0].register(self.trainer.model)


class Compress(lightning.Callback):
    def __init__(self, policy: str) -> None:
        self.policy = policy

    def on_train_start(self, trainer: lightning.Trainer, _: lightning.LightningModule) -> None:
        state = hct.HookState(self.policy, module=trainer.model)
        trainer.model.register_comm_hook(state, hct.comm_hook)


def make_data(samples: int) -> TensorDataset:
    """Return random points, labelled by a random network."""
    teacher = nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 10))
    x = torch.randn(samples, 256)
    with torch.no_grad():
        return TensorDataset(x, teacher(x).argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", default="hybridcomp", help="or gloo, to compare with")
    parser.add_argument("--policy", default="hybrid", help="a preset, a TOML file, or a codec such as int8")
    parser.add_argument("--hook", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--freeze-step", type=int, help="1-bit Adam, with a warm-up of so many steps")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64, help="samples of each rank and step")
    args = parser.parse_args()

    lightning.seed_everything(1, verbose=False)
    hct.set_policy(args.policy)
    ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    strategy = DDPStrategy(
        process_group_backend=args.backend,  # [1]
        cluster_environment=TorchElasticEnvironment(),  # [2]
    )
    hooked = args.hook and args.backend == "hybridcomp" and args.freeze_step is None
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=here,
        num_nodes=ranks // here,
        max_epochs=args.epochs,
        strategy=strategy,
        callbacks=[Compress(args.policy)] if hooked else [],  # [3]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = make_data(10 * ranks * args.batch)
    began = time.perf_counter()
    trainer.fit(Classifier(args.freeze_step), DataLoader(data, args.batch, shuffle=True))
    seconds = time.perf_counter() - began
    if trainer.is_global_zero:
        samples = args.epochs * len(data)
        plain, wire = (
            sum(getattr(row, n) for row in hct.stats()) / 1e6 for n in ("plain_bytes", "wire_bytes")
        )
        print(f"{seconds:.2f} s, {samples / seconds:.0f} samples/s")
        print(f"sent {wire:.2f} MB in the place of {plain:.2f} MB")


if __name__ == "__main__":
    main()

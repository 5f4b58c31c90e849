"""Ray Train on the hybridcomp backend: its name is all that the job's configuration needs.

    python examples/ray_train.py --workers 4
    python examples/ray_train.py --workers 4 --backend gloo          # for comparison

Ray starts the workers and tells torch who they are; no mpiexec is needed. The line marked [1] is what an existing job
changes, and the workers' policy is HYBRIDCOMP_POLICY [2]. A worker's environment is Ray's to set, so variables go by
``runtime_env``. hybridcomp is imported for its statistics alone.
"""

import argparse
import hashlib
import tempfile
import time

import ray
import torch
import torch.distributed as dist
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import hybridcomp.torch as hct


def train_loop(config: dict) -> dict:
    rank, ranks = train.get_context().get_world_rank(), train.get_context().get_world_size()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    teacher = nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 10))
    model = train.torch.prepare_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    losses, began = {}, time.perf_counter()
    for step in range(1, config["steps"] + 1):
        x = torch.randn(config["batch"], 256, generator=generator)
        with torch.no_grad():
            y = teacher(x).argmax(1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if step == 1 or step % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses[step] = mean.item() / ranks
    seconds = time.perf_counter() - began

    data = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    digests = [""] * ranks
    dist.all_gather_object(digests, hashlib.sha256(data).hexdigest())
    plain, wire = (sum(getattr(row, n) for row in hct.stats()) / 1e6 for n in ("plain_bytes", "wire_bytes"))
    agree = len(set(digests)) == 1
    said = f"backend {dist.get_backend()}; replicas agree: {agree}\n"
    said += f"sent {wire:.2f} MB in the place of {plain:.2f} MB"
    return {"losses": losses, "said": said, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--backend", default="hybridcomp")
    parser.add_argument("--policy", default="hybrid", help="a preset, a TOML file, or a codec such as int8")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64, help="samples of each worker and step")
    args = parser.parse_args()

    variables = {"HYBRIDCOMP_POLICY": args.policy}  # [2]
    ray.init(
        num_cpus=args.workers + 1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"steps": args.steps, "batch": args.batch},
            scaling_config=ScalingConfig(num_workers=args.workers),
            torch_config=TorchConfig(backend=args.backend),  # [1]
            run_config=RunConfig(storage_path=folder),
        )
        said = trainer.fit().return_value
    for step, loss in said["losses"].items():
        print(f"step {step}: loss {loss:.6f}")
    samples = args.steps * args.batch * args.workers
    print(said["said"])
    print(f"{said['seconds']:.2f} s, {samples / said['seconds']:.0f} samples/s")
    ray.shutdown()


if __name__ == "__main__":
    main()

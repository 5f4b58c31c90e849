"""A program that knows nothing of hybridcomp: DDP over what argument 1 names; argument 2 says how it goes wrong.

With ``while:FILE`` it stands still under compression, as long as there is the file.
"""

import atexit
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

backend, how = sys.argv[1:]
torch.manual_seed(1)
module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
rank = 0
if how != "alone":
    dist.init_process_group(backend)
    rank = dist.get_rank()
    if how != "fails":
        module = DistributedDataParallel(module)
    atexit.register(lambda: os.write(1, f"rank {rank} left in order\n".encode()))
# A second optimizer steps in each iteration, too: that makes no second step.
parameters = list(module.parameters())
optimizers = [torch.optim.SGD(parameters[:2], 0.1), torch.optim.SGD(parameters[2:], 0.1)]
generator = torch.Generator().manual_seed(rank)
for step in range({"few": 9, "nearly": 13}.get(how, 10**9)):
    given = torch.randn(8, 64, generator=generator)
    for optimizer in optimizers:
        optimizer.zero_grad()
    (module(given) - given.flip(1)).square().mean().backward()
    if how == "none":
        break
    if how == "fails":
        dist.all_reduce(module[0].weight.grad)
    if how == "stops" and step == 5:
        torch.distributed.barrier()
        time.sleep(1000)
    if how.startswith("while:") and step == 5 and os.environ.get("HYBRIDCOMP_REPLACE"):
        os.write(1, f"process {os.getpid()} stands still\n".encode())
        while os.path.exists(how.removeprefix("while:")):
            time.sleep(0.05)
    if how == "fails" and step == 5 and "hybridcomp.torch" in sys.modules:
        sys.exit("this program does not like compression")
    for optimizer in optimizers:
        optimizer.step()

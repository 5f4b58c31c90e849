"""Two ranks a host that know what torchrun tells ranks, and nothing of mpiexec, which starts them here."""

import os

names = {"PMI_RANK": "RANK", "PMI_SIZE": "WORLD_SIZE", "MPI_LOCALRANKID": "LOCAL_RANK"}
for theirs, ours in names.items():
    os.environ[ours] = os.environ.pop(theirs)
for name in [name for name in os.environ if name.startswith(("PMI_", "FI_", "MPIR_", "MPI_LOCAL"))]:
    del os.environ[name]
os.environ["MASTER_PORT"] = "29411"  # a lab says MASTER_ADDR

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

dist.init_process_group("hybridcomp")
x = torch.full((100_000,), float(dist.get_rank()))
dist.all_reduce(x)

from mpi4py import MPI  # noqa: E402

node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
said = [
    os.environ["RANK"],
    str(node.rank),
    str(node.size),
    os.environ["FI_TCP_IFACE"],
    f"{x.unique().tolist()}",
]
node.Free()
dist.destroy_process_group()
os.write(1, (" ".join(said) + "\n").encode())

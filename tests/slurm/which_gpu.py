"""A program for gpu.sbatch: which GPU does this rank see, and what is MPI told of it?"""

import os

print(os.uname().nodename, os.environ["SLURM_LOCALID"], os.environ["CUDA_VISIBLE_DEVICES"],
      os.environ["HYBRIDCOMP_CUDA_AWARE"], os.environ["MPIR_CVAR_ENABLE_GPU"])  # fmt: skip

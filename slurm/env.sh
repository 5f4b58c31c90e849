# shellcheck shell=bash
# Facts about your site, in one place: edit this file, leave the scripts alone.
#
#   source slurm/env.sh              # in the shell you submit from: sbatch reads the SBATCH_ variables
#   sbatch slurm/train_gpt.sbatch    # the job sources it again, for the rest

# Where and on whose account jobs run. Empty: the cluster's defaults. They take precedence over #SBATCH lines.
partition=""
account=""

# Modules to load on the nodes, in order, separated by spaces: a compiler's runtime, MPICH or a relative of it.
# Empty: the MPICH that `pip install mpich` brings, which needs nothing from the site.
modules=""

# The virtual environment hybridcomp is installed in, on a file system that all nodes see.
venv="${HYBRIDCOMP_VENV:-$PWD/.venv}"

# The network interface between the nodes, as `ip -brief addr` on a node names it (ib0, hsn0, eth1).
# Empty: MPI and gloo choose, which on nodes with several networks may be the slow one.
interface="${HYBRIDCOMP_INTERFACE:-}"

# GPUs: 1 where MPI takes pointers to their memory, 0 where it does not, whatever it says of itself. Empty: MPI is asked.
cuda_aware="${HYBRIDCOMP_CUDA_AWARE:-}"

# How srun starts MPI ranks: pmi2 suits MPICH and its relatives, pmix Open MPI; `srun --mpi=list` shows what there is.
export SLURM_MPI_TYPE="${SLURM_MPI_TYPE:-pmi2}"

# ---- nothing to edit below ----

if [ -n "$partition" ]; then export SBATCH_PARTITION="$partition"; fi
if [ -n "$account" ]; then export SBATCH_ACCOUNT="$account"; fi

# The rest is for the nodes of a job.
if [ -n "${SLURM_JOB_ID:-}" ]; then
  if [ -n "$modules" ]; then
    # shellcheck disable=SC2086  # several names, separated by spaces
    module load $modules
  fi
  if [ ! -f "$venv/bin/activate" ]; then
    echo "slurm/env.sh: there is no virtual environment at $venv; set venv in that file" >&2
    exit 1
  fi
  # shellcheck disable=SC1091  # made at installation
  source "$venv/bin/activate"
  if [ -n "$interface" ]; then
    export FI_TCP_IFACE="$interface" OMPI_MCA_btl_tcp_if_include="$interface" GLOO_SOCKET_IFNAME="$interface"
  fi
  if [ -n "$cuda_aware" ]; then
    # The first is ours; the others switch it on or off in MPICH and its relatives.
    export HYBRIDCOMP_CUDA_AWARE="$cuda_aware" MPIR_CVAR_ENABLE_GPU="$cuda_aware"
    export MPICH_GPU_SUPPORT_ENABLED="$cuda_aware" MV2_USE_CUDA="$cuda_aware"
  fi
  # srun does not hand on sbatch's --cpus-per-task by itself (Slurm 22.05 and newer).
  export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
  export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
fi

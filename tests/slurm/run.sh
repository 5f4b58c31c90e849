#!/usr/bin/env bash
# make slurm-test: the tests of this folder, with Debian's packages of Slurm installed first where they are missing.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1

refuse() {
  echo "slurm-test: $1" >&2
  exit 2
}

installed() {
  local program
  for program in slurmctld slurmd srun munged ip unshare; do command -v "$program" >/dev/null || return 1; done
}

if [ "$(id -u)" != 0 ]; then refuse "a Slurm cluster on one machine takes root: network namespaces, and daemons that start jobs"; fi
# Slurm's plugin opens PMIx's library by the name that only the package for developers has.
pmix() { ! command -v apt-get >/dev/null || compgen -G '/usr/lib/*/libpmix.so' >/dev/null; }

if ! { installed && pmix; }; then
  command -v apt-get >/dev/null || refuse "slurmctld, slurmd, srun, munged, ip or unshare is missing, and there is no apt-get to install them"
  echo "slurm-test: installing slurm-wlm, munge, libpmix-dev and iproute2"
  apt-get update -qq
  # At this run level Debian starts no daemons of the packages, where it has no systemd.
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge libpmix-dev iproute2
  installed || refuse "slurm-wlm, munge and iproute2 are installed, and a program of theirs is still missing"
fi
# pytest takes the cluster down when it is interrupted, and the lab's keeper when pytest is killed.
exec timeout --foreground --signal=INT --kill-after=30 600 "$python" -m pytest tests/slurm -v -p no:cacheprovider

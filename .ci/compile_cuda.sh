#!/usr/bin/env bash
# Compile every CUDA source with warnings as errors for the architectures that we support.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v nvcc >/dev/null || { echo "missing: nvcc (the CUDA toolkit)"; exit 2; }
mapfile -t sources < <(find kernels/cuda -name '*.cu')
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for source in "${sources[@]}"; do
  for arch in sm_75 sm_80 sm_90; do
    nvcc -std=c++17 -arch="$arch" -Werror all-warnings -fmad=false -I kernels/include -cubin -o "$out/out.cubin" "$source"
  done
done
echo "compiled ${#sources[@]} CUDA sources"

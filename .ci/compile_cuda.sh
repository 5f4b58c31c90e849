#!/usr/bin/env bash
# Compile every CUDA source, and every header that CPU and CUDA share by itself, with warnings as errors for the
# architectures that we support.
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
headers=(kernels/include/hybridcomp/*.hpp)
for header in "${headers[@]}"; do
  echo "#include \"hybridcomp/$(basename "$header")\"" >"$out/header.cu"
  nvcc -std=c++17 -arch=sm_75 -Werror all-warnings -fmad=false -I kernels/include -cubin -o "$out/out.cubin" "$out/header.cu"
done
echo "compiled ${#sources[@]} CUDA sources and ${#headers[@]} headers"

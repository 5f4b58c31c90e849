#!/usr/bin/env bash
# Compile every module of CUDA kernels, with warnings as errors, for the architectures that we support, and print what
# each kernel uses; then every header that CPU and CUDA share by itself. Arguments: names of modules (default: all).
set -euo pipefail
cd "$(dirname "$0")/.."
command -v nvcc >/dev/null || { echo "missing: nvcc (the CUDA toolkit)"; exit 2; }
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
flags=(-std=c++17 -Werror all-warnings -fmad=false -I kernels/include -I kernels/cuda)

# The compiler's front runs once, its back for each architecture: no kernel asks which one it is on. (NVRTC, in
# check_nvrtc.py, runs the front for the others.)
compile_module() { # module source options...
  local module=$1 source=$2
  shift 2
  nvcc "${flags[@]}" "$@" -gencode 'arch=compute_75,code=[sm_75,sm_80,sm_90]' -Xptxas -v -fatbin \
    -o "$out/$module.fatbin" "kernels/cuda/$source" 2>"$out/$module.log" || { cat "$out/$module.log"; return 1; }
}

compile_header() { # header
  local name
  name=$(basename "$1" .hpp)
  echo "#include \"hybridcomp/$name.hpp\"" >"$out/$name-header.cu"
  nvcc "${flags[@]}" -arch=sm_75 -cubin -o "$out/$name-header.cubin" "$out/$name-header.cu"
}

wait_for_a_core() { while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done; }

wanted=" $* "
count=0
while read -r module source options; do
  [[ -z $module || $module == \#* ]] && continue
  [[ $# -gt 0 && $wanted != *" $module "* ]] && continue
  read -ra words <<<"${options:-}"
  wait_for_a_core
  compile_module "$module" "$source" "${words[@]}" &
  count=$((count + 1))
done <kernels/cuda/modules.txt
headers=()
if [ $# -eq 0 ]; then headers=(kernels/include/hybridcomp/*.hpp); fi
for header in "${headers[@]}"; do
  wait_for_a_core
  compile_header "$header" &
done
while [ "$(jobs -p | wc -l)" -gt 0 ]; do wait -n; jobs -p >/dev/null; done
python3 .ci/cuda_usage.py "$out"
echo "compiled $count CUDA modules for sm_75, sm_80 and sm_90, and ${#headers[@]} headers"

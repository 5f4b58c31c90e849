#!/usr/bin/env bash
# Everything that only a GPU can tell: `make gpu`. Needs python3 (or GPU_PYTHON) with cupy, torch, numpy, pytest and
# mpi4py, a C++ compiler, cmake, ninja and nanobind; no internet, no root. What python3 lacks may lie as wheels in the folder
# GPU_WHEELS (docs/cuda.md lists them). Leaves gpu.json and gpu_ranks.json and the table gpu.md in RESULTS.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${GPU_PYTHON:-python3}")
wheels=${GPU_WHEELS:-wheels}
results=${RESULTS:-benchmarks/results}
site=$PWD/build/gpu/site
mkdir -p "$site" "$results"

"$python" - <<'PY' || exit 2
import importlib.util, sys
missing = [name for name in ("cupy", "torch", "numpy", "pytest", "mpi4py", "nanobind") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"missing for {sys.executable}: {', '.join(missing)} (GPU_PYTHON names another Python)")
PY
if compgen -G "$wheels/*.whl" >/dev/null; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" "$wheels"/*.whl
fi
export PYTHONPATH="$site:$PWD" PYTHONUNBUFFERED=1
export PATH="$site/bin:$PATH"

echo "== kernels of the CPU, to compare with"
cmake -S . -B build/gpu/kernels -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$python" \
  -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >build/gpu/cmake.log || { cat build/gpu/cmake.log; exit 1; }
cmake --build build/gpu/kernels >build/gpu/build.log || { tail -50 build/gpu/build.log; exit 1; }
cp build/gpu/kernels/kernels/_kernels*.so hybridcomp/

"$python" -c 'from hybridcomp import cuda; r = cuda.runtime_of(0); print("==", r.name, r.multiprocessors, "multiprocessors")'
failed=()
check() { # name command...
  local name=$1
  shift
  echo "== $name"
  "$@" || failed+=("$name")
}

check "bytes and values against the CPU's" \
  env HYBRIDCOMP_TEST_DEVICE=cuda "$python" -m pytest tests/cuda -q -p no:cacheprovider --timeout 900
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    check "compute-sanitizer's $tool" env HYBRIDCOMP_TEST_DEVICE=cuda compute-sanitizer \
      --tool "$tool" --error-exitcode 9 --print-limit 20 "$python" -m pytest tests/cuda/test_every.py -q -x -p no:cacheprovider --timeout 900
  done
else
  echo "== compute-sanitizer is not here: the memory checker did not run"
fi
check "speed" "$python" benchmarks/codecs.py --device cuda --json "$results/gpu.json"
if mpiexec=$(command -v mpiexec); then
  check "four ranks on one GPU" timeout 600 "$mpiexec" -n 4 "$python" benchmarks/gpu_ranks.py --json "$results/gpu_ranks.json"
else
  failed+=("four ranks on one GPU: no mpiexec (bring the mpich wheel)")
fi
check "table" "$python" benchmarks/gpu_table.py "$results"
if [ "${#failed[@]}" -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "== all passed; $results/gpu.json, gpu_ranks.json and gpu.md are to be committed"

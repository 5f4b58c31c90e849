#!/usr/bin/env bash
# Everything that only a GPU can tell: `make gpu`, or benchmarks/gpu.sh with some of the stages
# tests sanitize speed ranks (where a machine is lent for minutes). Needs python3 (or GPU_PYTHON) with cupy, torch, numpy, pytest and
# mpi4py, a C++ compiler, cmake, ninja and nanobind; no internet, no root. What python3 lacks may lie as wheels in the folder
# GPU_WHEELS (docs/cuda.md lists them). Leaves gpu.json and gpu_ranks.json and the table gpu.md in RESULTS.
set -euo pipefail
cd "$(dirname "$0")/.."
stages=" ${*:-tests sanitize speed ranks} "
given=$(command -v "${GPU_PYTHON:-python3}")
wheels=${GPU_WHEELS:-wheels}
results=${RESULTS:-benchmarks/results}
venv=$PWD/build/gpu/venv
mkdir -p build/gpu "$results"

"$given" - <<'PY' || exit 2
import importlib.util, sys
missing = [name for name in ("cupy", "torch", "numpy", "pytest", "mpi4py", "nanobind") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"missing for {sys.executable}: {', '.join(missing)} (GPU_PYTHON names another Python)")
PY
# An environment of our own over the given one: wheels find their place there, libraries and programs too.
"$given" -m venv --without-pip "$venv"
python=$venv/bin/python
"$given" -c 'import site; [print(f"import site; site.addsitedir({folder!r})") for folder in site.getsitepackages()]' \
  >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/given.pth"
if compgen -G "$wheels/*.whl" >/dev/null; then
  "$given" -m pip --python "$python" install -q --no-index --no-deps --no-compile "$wheels"/*.whl
fi
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1 PATH="$venv/bin:$PATH"
export LD_LIBRARY_PATH="$venv/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

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

wanted() { [[ $stages == *" $1 "* ]]; }

echo "== compile the kernels by NVRTC, into CuPy's cache"
"$python" -c 'from hybridcomp import cuda; print("\n".join(cuda.modules()))' |
  xargs -P "$(nproc)" -n 1 "$python" -c 'import sys; from hybridcomp import cuda; cuda.runtime_of(0).prepare(sys.argv[1])'

if wanted tests; then
  check "bytes and values against the CPU's" \
    env HYBRIDCOMP_TEST_DEVICE=cuda "$python" -m pytest tests/cuda -q -p no:cacheprovider --timeout 300
fi
if wanted sanitize; then
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
      check "compute-sanitizer's $tool" env HYBRIDCOMP_TEST_DEVICE=cuda compute-sanitizer --tool "$tool" \
        --error-exitcode 9 --print-limit 20 "$python" -m pytest tests/cuda/test_every.py -q -x -p no:cacheprovider --timeout 900
    done
  else
    echo "== compute-sanitizer is not here: the memory checker did not run"
  fi
fi
if wanted speed; then
  check "speed" "$python" benchmarks/codecs.py --device cuda --threads "$(nproc)" --json "$results/gpu.json"
fi
if wanted ranks; then
  if mpiexec=$(command -v mpiexec); then
    check "the DDP hook's buckets" env HYBRIDCOMP_TEST_DEVICE=cuda OMP_NUM_THREADS=1 timeout 600 "$mpiexec" -n 3 \
      "$python" -m pytest tests/mpi/device/test_device_hook.py --with-mpi -q -p no:cacheprovider
    check "DDP with the hook" env HYBRIDCOMP_TEST_DEVICE=cuda "$python" -m pytest tests/torch/test_device_hook.py \
      -q -p no:cacheprovider --timeout 300
    check "four ranks on one GPU" timeout 600 "$mpiexec" -n 4 "$python" benchmarks/gpu_ranks.py --json "$results/gpu_ranks.json"
  else
    failed+=("four ranks on one GPU: no mpiexec (bring the mpich wheel)")
  fi
fi
if [ -f "$results/gpu.json" ]; then check "table" "$python" benchmarks/pages/gpu_table.py "$results"; fi
if [ "${#failed[@]}" -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "== all passed; $results/gpu.json, gpu_ranks.json and gpu.md are to be committed"

#!/usr/bin/env bash
# Run the tests and measurements that need a GPU: `make gpu`, or benchmarks/gpu.sh with some of the stages
# tests sanitize ranks bucket speed (where a machine is lent for minutes). Needs python3 (or GPU_PYTHON) with cupy, torch,
# numpy, pytest and mpi4py, a C++ compiler, cmake, ninja and nanobind; no internet, no root. Packages that python3 lacks
# may be wheels in the folder GPU_WHEELS (docs/cuda.md lists them); GPU_KERNELS is a _kernels*.so built for that Python
# elsewhere, GPU_SECONDS ends a stage (600). The memory checkers run beside the tests. Leaves gpu.json, gpu_ranks.json,
# gpu_bucket_*.json and the table gpu.md in RESULTS/gpu/<the GPU's name>, and the output of the stages in LOGS (build/gpu).
set -euo pipefail
cd "$(dirname "$0")/.."
stages=" ${*:-tests sanitize ranks bucket speed} "
given=$(command -v "${GPU_PYTHON:-python3}")
wheels=${GPU_WHEELS:-wheels}
results=${RESULTS:-benchmarks/results}
logs=${LOGS:-build/gpu}
seconds=${GPU_SECONDS:-600}
venv=$PWD/build/gpu/venv
mkdir -p build/gpu "$logs"

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

if [ -n "${GPU_KERNELS:-}" ]; then
  cp "$GPU_KERNELS" hybridcomp/
else
  echo "== kernels of the CPU, to compare with"
  cmake -S . -B build/gpu/kernels -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$python" \
    -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >build/gpu/cmake.log || { cat build/gpu/cmake.log; exit 1; }
  cmake --build build/gpu/kernels >build/gpu/build.log || { tail -50 build/gpu/build.log; exit 1; }
  cp build/gpu/kernels/kernels/_kernels*.so hybridcomp/
fi

"$python" -c 'from hybridcomp import cuda; r = cuda.runtime_of(0); print("==", r.name, r.multiprocessors, "multiprocessors")'
results=$results/gpu/$("$python" -c 'from hybridcomp import cuda; print("-".join(cuda.runtime_of(0).name.lower().split()))')
mkdir -p "$results"
failed=()
stage() { # log name command...: its last lines, and its exit code
  local log=$logs/$1.log name=$2
  shift 2
  local code=0
  timeout --kill-after 10 "$seconds" "$@" >"$log" 2>&1 || code=$?
  echo "== $name, ended with $code after $SECONDS s"
  tail -n "${GPU_LINES:-40}" "$log"
  return "$code"
}
check() { stage "$@" || failed+=("$2: $logs/$1.log"); }
aside=()
beside() { # as check, without waiting for its end
  stage "$@" >"$logs/$1.end" &
  aside+=("$! $1 $2")
}

wanted() { [[ $stages == *" $1 "* ]]; }

compile() {
  "$python" -c 'from hybridcomp import cuda; print("\n".join(cuda.modules()))' |
    xargs -P "$(nproc)" -n 1 "$python" -c 'import sys; from hybridcomp import cuda; cuda.runtime_of(0).prepare(sys.argv[1])'
}
export -f compile
export python
check nvrtc "compile the kernels by NVRTC" bash -o pipefail -c compile

# Several test processes share the GPU: each waits for the host most of the time.
workers=()
if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n "$(($(nproc) / 2 > 0 ? $(nproc) / 2 : 1))"); fi
pytest=("$python" -m pytest -q -p no:cacheprovider -p no:benchmark --color=no)

if wanted sanitize; then
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
      beside "$tool" "compute-sanitizer's $tool" env HYBRIDCOMP_TEST_DEVICE=cuda compute-sanitizer --tool "$tool" \
        --error-exitcode 9 --print-limit 20 "${pytest[@]}" tests/cuda/test_every.py -x --timeout 900
    done
  else
    echo "== compute-sanitizer is not here: the memory checker did not run"
  fi
fi
if wanted tests; then
  check tests "bytes and values against the CPU's" \
    env HYBRIDCOMP_TEST_DEVICE=cuda "${pytest[@]}" tests/cuda "${workers[@]}" --timeout 300 --durations 10
fi
if wanted ranks; then
  if mpiexec=$(command -v mpiexec); then
    check hook "the DDP hook's buckets" env HYBRIDCOMP_TEST_DEVICE=cuda OMP_NUM_THREADS=1 "$mpiexec" -n 3 \
      "${pytest[@]}" tests/mpi/device/test_device_hook.py --with-mpi
    check ddp "DDP with the hook" env HYBRIDCOMP_TEST_DEVICE=cuda "${pytest[@]}" tests/torch/test_device_hook.py --timeout 300
    check ranks "four ranks on one GPU" "$mpiexec" -n 4 "$python" benchmarks/gpu_ranks.py --json "$results/gpu_ranks.json"
  else
    failed+=("four ranks on one GPU: no mpiexec (bring the mpich wheel)")
  fi
fi
for one in "${aside[@]}"; do
  read -r process log name <<<"$one"
  wait "$process" || failed+=("$name: $logs/$log.log")
  cat "$logs/$log.end"
done
if wanted bucket; then # alone, too: less than five minutes
  if mpiexec=$(command -v mpiexec); then
    for ranks in 1 2 4; do
      check "bucket$ranks" "a bucket of the hook on $ranks ranks" timeout --kill-after 10 100 env OMP_NUM_THREADS=1 \
        "$mpiexec" -n "$ranks" "$python" benchmarks/gpu_bucket.py --json "$results/gpu_bucket_$ranks.json"
    done
  else
    failed+=("a bucket of the hook: no mpiexec (bring the mpich wheel)")
  fi
fi
if wanted speed; then # alone, since other work would show in the figures
  check speed "speed" "$python" benchmarks/codecs.py --device cuda --threads "$(nproc)" --json "$results/gpu.json"
fi
if [ -f "$results/gpu.json" ]; then check table "the table" "$python" benchmarks/pages/gpu_table.py "$results"; fi
if [ "${#failed[@]}" -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "== all passed; $results/gpu.json, gpu_ranks.json, gpu_bucket_*.json and gpu.md are to be committed"

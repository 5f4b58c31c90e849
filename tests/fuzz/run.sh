#!/usr/bin/env bash
# Fuzz the decoders on kernels built with AddressSanitizer and UndefinedBehaviorSanitizer.
#
#   tests/fuzz/run.sh smoke [RUNS] [SECONDS]   random mutations; needs g++ (CI runs this)
#   tests/fuzz/run.sh guided [RUNS]            coverage-guided by libFuzzer; needs clang++ with its runtimes
#
# HC_ISAS=native compiles for this machine's instruction set alone: half of what there is to compile.
# An input that fails is printed (smoke) or written to build/fuzz-guided/crash-* (guided).
set -euo pipefail
cd "$(dirname "$0")/../.."
mode=${1:-smoke}
bin=.venv/bin
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=16 UBSAN_OPTIONS=print_stacktrace=1

build() { # compiler, folder: the sanitized extension; prints its path
  CXX=$1 "$bin/cmake" -S . -B "$2" -G Ninja -DCMAKE_BUILD_TYPE=Release -DHC_SANITIZE=ON \
    ${HC_ISAS:+"-DHC_ISAS=$HC_ISAS"} \
    -DCMAKE_MAKE_PROGRAM="$PWD/$bin/ninja" -DPython_EXECUTABLE="$PWD/$bin/python" \
    -Dnanobind_DIR="$("$bin/python" -m nanobind --cmake_dir)" >&2
  "$bin/cmake" --build "$2" >&2
  echo "$PWD/$(ls "$2"/kernels/_kernels*.so)"
}

case $mode in
  smoke)
    command -v g++ >/dev/null || { echo "missing: g++, whose sanitizers this uses"; exit 2; }
    HYBRIDCOMP_FUZZ_KERNELS=$(build g++ build/fuzz-smoke)
    export HYBRIDCOMP_FUZZ_KERNELS
    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" \
      "$bin/python" -m tests.fuzz.smoke --runs "${2:-100000}" --seconds "${3:-90}"
    ;;
  guided)
    command -v clang++ >/dev/null || { echo "missing: clang++ and libFuzzer (Debian: clang, libclang-rt-dev)"; exit 2; }
    HYBRIDCOMP_FUZZ_KERNELS=$(build clang++ build/fuzz-guided)
    export HYBRIDCOMP_FUZZ_KERNELS
    config() { "$bin/python" -c "import sysconfig; print(sysconfig.get_config_var('$1') or '')"; }
    clang++ -std=c++20 -g1 -O1 -fsanitize=fuzzer,address,undefined -rdynamic tests/fuzz/driver.cpp \
      "-I$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
      "-L$(config LIBDIR)" "-Wl,-rpath,$(config LIBDIR)" "-lpython$(config LDVERSION)" -o build/fuzz-guided/decode
    "$bin/python" -m tests.fuzz.driven build/fuzz-guided/corpus
    # The embedded Python is the base one: it finds the environment's packages by this.
    PYTHONHOME=$("$bin/python" -c 'import sys; print(sys.base_prefix)')
    PYTHONPATH=$PWD:$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # Code that receives from MPI imports mpi4py, which finds its library beside the environment's Python alone.
    LD_LIBRARY_PATH=$("$bin/python" -c 'import sys; print(sys.prefix)')/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export PYTHONHOME PYTHONPATH LD_LIBRARY_PATH
    build/fuzz-guided/decode -detect_leaks=0 -max_len=6000 -runs="${2:-1000000}" \
      -artifact_prefix=build/fuzz-guided/crash- build/fuzz-guided/corpus
    ;;
  *)
    echo "usage: tests/fuzz/run.sh smoke [RUNS] [SECONDS] | guided [RUNS]"
    exit 2
    ;;
esac

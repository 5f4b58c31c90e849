#!/usr/bin/env bash
# The compiled engine, driven without Python and MPI, under GCC's sanitizers.
#
#   tests/engine/checked.sh threads|address|both [smoke|full] [SEED]
#
# threads: ThreadSanitizer, which finds races. address: AddressSanitizer and UndefinedBehaviorSanitizer, on the
# fuzzers' kernels (tests/fuzz/run.sh), which are built alike. The first finding ends it with an error.
set -euo pipefail
cd "$(dirname "$0")/../.."
kinds=${1:-both} extent=${2:-full} seed=${3:-1}
[ "$kinds" = both ] && kinds="address threads"
case $extent in
  smoke) rounds=1 ;;
  full) rounds=4 ;;
  *) echo "usage: tests/engine/checked.sh threads|address|both [smoke|full] [SEED]"; exit 2 ;;
esac
command -v g++ >/dev/null || { echo "missing: g++, whose sanitizers this uses"; exit 2; }
bin=.venv/bin cases=build/engine-cases-$extent
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:history_size=4:second_deadlock_stack=1
"$bin/python" -m tests.engine.dump "$cases" "$extent"
for kind in $kinds; do
  case $kind in
    address) folder=build/fuzz-smoke option=HC_SANITIZE run=() ;;
    # GCC 12's ThreadSanitizer does not know the addresses that newer kernels draw; without drawing it works.
    threads) folder=build/engine-threads option=HC_SANITIZE_THREADS run=(setarch -R) ;;
    *) echo "usage: tests/engine/checked.sh threads|address|both [smoke|full] [SEED]"; exit 2 ;;
  esac
  start=$SECONDS
  CXX=g++ "$bin/cmake" -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release "-D$option=ON" \
    ${HC_ISAS:+"-DHC_ISAS=$HC_ISAS"} \
    -DCMAKE_MAKE_PROGRAM="$PWD/$bin/ninja" -DPython_EXECUTABLE="$PWD/$bin/python" \
    -Dnanobind_DIR="$("$bin/python" -m nanobind --cmake_dir)" >/dev/null
  "$bin/cmake" --build "$folder" --target engine_driver
  echo "== $kind: built in $((SECONDS - start)) s"
  timeout -k 10 1800 "${run[@]}" "$folder/kernels/engine_driver" "$cases" "$rounds" "$seed"
  echo "== $kind: nothing found; $((SECONDS - start)) s in all"
done

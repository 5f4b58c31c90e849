#!/usr/bin/env bash
# Build the sdist, and the wheel from the sdist's content, as a release does; then install the wheel in a virtual
# environment of its own, and use it there, away from the checkout. Takes the index of packages, and a minute or two.
# The kernels are compiled for this machine alone, at -O1: the question is only whether everything is there.
set -euo pipefail
cd "$(dirname "$0")/.."
here=$PWD bin=$PWD/.venv/bin out=$PWD/build/wheel
unset PYTHONPATH
rm -rf "$out"
mkdir -p "$out/elsewhere"

"$bin/python" -m build --outdir "$out/dist" \
  -C cmake.define.HC_ISAS=native -C cmake.define.HC_LEVEL=-O1 >"$out/build.log" 2>&1 || { tail -n 40 "$out/build.log"; exit 1; }
wheel=$(ls "$out"/dist/*.whl)
"$bin/python" .ci/smoke.py contents "$wheel" "$here"

"$bin/python" -m venv "$out/env"
"$out/env/bin/pip" install -q --no-compile -c constraints.txt "${wheel}[mpich]"
# PyTorch, which is large, comes from the checkout's environment; its .pth files, which add the checkout, are not read.
"$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
  >"$("$out/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
cd "$out/elsewhere"
timeout -k 10 300 "$out/env/bin/python" "$here/.ci/smoke.py" use
du -h "$out"/dist/*

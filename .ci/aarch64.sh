#!/usr/bin/env bash
# Compile the kernels for aarch64 and run them on this machine under qemu: every codec must make and read the same bytes
# as here. Needs Debian's g++-aarch64-linux-gnu and qemu-user; Debian's Python for aarch64 and the wheels that the codecs'
# tests need are unpacked into build/aarch64, and nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin out=$PWD/build/aarch64
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v "$tool" >/dev/null || { echo "missing: $tool (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)"; exit 2; }
done
root=$out/root site=$out/site tree=$out/tree libraries=/usr/aarch64-linux-gnu

# Unpack this release's packages for the other architecture, by package lists of their own: dpkg's are not touched.
unpack_python() {
  mkdir -p "$out/apt/lists/partial" "$out/debs" "$root"
  cat >"$out/apt/conf" <<CONF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
Dir::State "$out/apt";
Dir::State::status "/dev/null";
Dir::Cache "$out/apt";
Acquire::Languages "none";
APT::Sandbox::User "root";
CONF
  export APT_CONFIG=$out/apt/conf
  apt-get update -qq
  python=$(apt-cache depends python3-minimal | sed -n 's/.*Depends: \(python3\.[0-9]*\)-minimal$/\1/p')
  (cd "$out/debs" && apt-get download -qq "$python-minimal" "lib$python-minimal" "lib$python-stdlib" "lib$python-dev" \
    zlib1g libexpat1 libffi8)
  unset APT_CONFIG
  for package in "$out"/debs/*.deb; do dpkg-deb -x "$package" "$root"; done
  echo "$python" >"$out/python"
}

[ -e "$out/python" ] || unpack_python
python=$(cat "$out/python")
[ -d "$site" ] || "$bin/pip" install -q -c constraints.txt --target "$site" --only-binary=:all: \
  --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 --implementation cp --python-version "${python#python}" \
  numpy zstandard hypothesis pytest pytest-timeout

# -O1 compiles in half the time, and is enough to compare bytes.
"$bin/cmake" -S . -B "$out/kernels" -G Ninja -DCMAKE_BUILD_TYPE=Release -DHC_LEVEL=-O1 \
  -DCMAKE_TOOLCHAIN_FILE="$PWD/.ci/aarch64.cmake" -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DPython_EXECUTABLE="$bin/python" \
  -DPython_INCLUDE_DIR="$root/usr/include/$python" -Dnanobind_DIR="$("$bin/python" -m nanobind --cmake_dir)" >/dev/null
"$bin/cmake" --build "$out/kernels"

# A copy of the tree, whose package has these kernels.
rm -rf "$tree"
mkdir -p "$tree"
cp -r hybridcomp hybridcomp_lab tests pyproject.toml "$tree"
rm -f "$tree"/hybridcomp/_kernels*.so
cp "$out"/kernels/kernels/_kernels*.so "$tree/hybridcomp/_kernels.so"
across() { # arguments of python
  (cd "$tree" && timeout -k 10 600 qemu-aarch64 -L "$libraries" \
    -E LD_LIBRARY_PATH="$root/usr/lib/aarch64-linux-gnu:$root/lib/aarch64-linux-gnu" -E PYTHONPATH="$site:$tree" \
    "$root/usr/bin/$python" "$@")
}
"$bin/python" -m tests.golden.elsewhere write "$out/here.json"
across -m tests.golden.elsewhere check "$out/here.json"
across -m pytest -q -p no:cacheprovider tests/codecs/test_golden.py

"""Check a wheel: that it holds what a run needs, and that it works where it is installed.

python .ci/smoke.py contents WHEEL CHECKOUT    # the package's files, and the CUDA sources that NVRTC compiles
python .ci/smoke.py use                        # by the Python that it is installed for, from another folder
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

SOURCES = (
    ".cu",
    ".cuh",
    ".hpp",
    ".txt",
)  # suffixes of the files in kernels/cuda and kernels/include that NVRTC compiles
CODECS = ("none", "lossless", "exponent", "bf16", "int8", "int4", "topk:ratio=0.1", "zfp:rate=16")
RANKS = 2


def contents(wheel: Path, checkout: Path) -> None:
    """Exit with 1 unless the wheel has every file of the package, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {
        path.relative_to(checkout).as_posix()
        for name in ("hybridcomp", "hybridcomp_lab")
        for path in (checkout / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    kernels = checkout / "kernels"
    sources = {
        f"hybridcomp/kernels/{path.relative_to(kernels).as_posix()}"
        for folder in ("cuda", "include")
        for path in (kernels / folder).rglob("*")
        if path.suffix in SOURCES and path.name != "CMakeLists.txt"
    }
    compiled = {name for name in held if name.startswith("hybridcomp/_kernels.")}
    missing, more = (package | sources) - held, held - package - sources - compiled
    if missing or more or len(compiled) != 1:
        sys.exit(
            f"{wheel.name} lacks {sorted(missing)}, has beside the package {sorted(more)}, and {sorted(compiled)}"
        )
    print(f"{wheel.name} holds {len(package)} files of the package and {len(sources)} of its CUDA kernels")


def run(*command: str | Path) -> str:
    """Return what the command prints; exit with 1 if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def use() -> None:
    """Use the installed package."""
    import numpy as np  # noqa: PLC0415

    import hybridcomp as hc  # noqa: PLC0415
    from hybridcomp import cuda  # noqa: PLC0415
    from hybridcomp.policy import load_policy  # noqa: PLC0415

    installed = Path(hc.__file__).parent
    if not installed.is_relative_to(sysconfig.get_path("purelib")):
        sys.exit(f"this uses {installed}, not what is installed in {sysconfig.get_path('purelib')}")
    x = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    for spec in CODECS:
        y = hc.decode(hc.get_codec(spec).encode(x))
        if y.shape != x.shape or not np.linalg.norm(y - x) <= np.linalg.norm(x):
            sys.exit(f"{spec} gives back {y}")
    for preset in (installed / "policy" / "presets").glob("*.toml"):
        load_policy(preset.stem)
    for module in cuda.modules():
        if 'extern "C"' not in cuda.source_of(module):
            sys.exit(f"the CUDA module {module} has no kernels")
    scripts = Path(sysconfig.get_path("scripts"))
    version = run(scripts / "hybridcomp", "--version").strip()
    if version != f"hybridcomp {hc.__version__}":
        sys.exit(f"hybridcomp --version says {version}")
    run(scripts / "hybridcomp", "doctor", "--quick")
    sums = run(scripts / "mpiexec", "-n", str(RANKS), sys.executable, __file__, "rank")
    if sums.count("the sum is right") != RANKS:
        sys.exit(f"the all-reduce of {RANKS} ranks said {sums}")
    torch = "without PyTorch"
    if importlib.util.find_spec("torch") is not None:
        run(sys.executable, "-W", "error", "-c", "import hybridcomp.torch")
        torch = "hybridcomp.torch"
    print(f"{version}, installed in {installed}: {len(CODECS)} codecs, {RANKS} ranks, {torch}")


def rank() -> None:
    """Sum an array in 8 bits over all ranks."""
    import numpy as np  # noqa: PLC0415
    from mpi4py import MPI  # noqa: PLC0415

    import hybridcomp as hc  # noqa: PLC0415

    parts = [np.random.default_rng(r).normal(size=100_000).astype(np.float32) for r in range(RANKS)]
    with_all = np.empty_like(parts[0])
    comm = hc.Communicator(MPI.COMM_WORLD, policy="int8:block=128")
    comm.Allreduce(parts[comm.rank], with_all)
    error = np.linalg.norm(with_all - sum(parts)) / np.linalg.norm(sum(parts))
    if comm.size == RANKS and 0 < error < 0.02:  # in 8 bits, not exactly
        print("the sum is right", flush=True)


def main() -> None:
    """Run what the command line names."""
    match sys.argv[1:]:
        case ["contents", wheel, checkout]:
            contents(Path(wheel), Path(checkout))
        case ["use"]:
            use()
        case ["rank"]:
            rank()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()

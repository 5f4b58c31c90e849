"""Inspect this installation for ``hybridcomp doctor``: versions, MPI, kernels, GPU, speeds, profile."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import hybridcomp
from hybridcomp import cuda, native
from hybridcomp.codecs import get_codec
from hybridcomp.errors import ConfigError, CudaUnavailableError, NativeUnavailableError
from hybridcomp.perfmodel import Profile, load_profile
from hybridcomp.perfmodel.calibrate import codec_speed, memory_speed

if TYPE_CHECKING:
    from mpi4py import MPI

_PACKAGES = ("numpy", "mpi4py", "zstandard", "torch")
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_CODECS = ("int8", "int4", "topk:ratio=0.01")
_THREADS = ("single", "funneled", "serialized", "multiple")


@dataclass
class Findings:
    """Findings of an inspection.

    Attributes:
        sections: facts by name, for each title.
        speeds: GB/s of fp32 encoded and decoded by one thread, and the same relative to a copy in memory; by codec.
        problems: reasons why hybridcomp cannot be used; empty where it can.
    """

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    speeds: dict[str, dict[str, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the findings in the form of JSON, for a file."""
        return {
            "usable": not self.problems,
            "problems": self.problems,
            **self.sections,
            "speeds": self.speeds,
        }


def versions() -> dict[str, str]:
    """Return the versions of hybridcomp and of the packages that it uses, without importing them."""
    found = {"hybridcomp": hybridcomp.__version__, "Python": platform.python_version()}
    found |= {name: _version(name) or "not installed" for name in _PACKAGES}
    found["CuPy"] = next((f"{v} ({name})" for name in _CUPY if (v := _version(name))), "not installed")
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def mpi(comm: MPI.Comm, hosts: int, shares_memory: bool) -> dict[str, str]:
    """Describe the MPI library.

    Args:
        comm: communicator of all ranks.
        hosts: number of hosts that they are on.
        shares_memory: whether ranks of a host can read each other's messages in place.
    """
    from mpi4py import MPI  # noqa: PLC0415  (initialises MPI)

    from hybridcomp.collectives.device.cuda_aware import awareness  # noqa: PLC0415

    try:
        aware = awareness()
        takes = (
            "in messages and collectives" if aware.collectives else "in messages" if aware.messages else "no"
        )
        device = f"{takes} ({aware.why})"
    except ConfigError as error:
        device = f"no ({error})"
    return {
        "library": MPI.Get_library_version().partition("\n")[0].strip().strip("\0"),
        "ranks": f"{comm.size} on {hosts} host{'s' * (hosts > 1)}",
        "threads": _THREADS[MPI.Query_thread()],
        "device pointers": device,
        "shared memory": "works"
        if shares_memory
        else "does not work here: ranks of a host send each other copies",
    }


def kernels(findings: Findings) -> dict[str, str]:
    """Describe the compiled CPU kernels."""
    try:
        module = native.kernels()
    except NativeUnavailableError as error:
        findings.problems.append(str(error))
        return {"kernels": "missing"}
    available = ", ".join(module.available_isas())
    return {"instruction set": f"{module.isa()} (of {available})", "threads": str(module.threads())}


def gpu() -> dict[str, str]:
    """Describe the first GPU, if the kernels can run on it."""
    try:
        runtime = cuda.runtime_of(0)
    except CudaUnavailableError as error:
        return {"usable": f"no: {error}"}
    return {"usable": f"yes: {runtime.name}"}


def speeds(seconds: float) -> dict[str, dict[str, float]]:
    """Measure codecs and a copy in memory, for about ``seconds`` each."""
    copy = memory_speed(seconds)
    found = {
        "memcpy": {
            "encode_gb_s": copy / 1e9,
            "decode_gb_s": copy / 1e9,
            "encode_ratio": 1.0,
            "decode_ratio": 1.0,
        }
    }
    for spec in _CODECS:
        speed = codec_speed(get_codec(spec), seconds)
        found[spec] = {
            "encode_gb_s": speed.encode / 1e9,
            "decode_gb_s": speed.decode / 1e9,
            "encode_ratio": speed.encode / copy,
            "decode_ratio": speed.decode / copy,
        }
    return found


def profile(findings: Findings) -> dict[str, str]:
    """Describe the profile in use."""
    try:
        found = load_profile()
    except ConfigError as error:
        findings.problems.append(str(error))
        return {"file": "wrong"}
    return describe(found)


def describe(found: Profile) -> dict[str, str]:
    """Describe a profile's links in words."""
    return {
        "file": found.name,
        "inside a host": f"{found.host.latency * 1e6:.1f} us, {found.host.bandwidth / 1e9:.2f} GB/s",
        "between hosts": f"{found.network.latency * 1e6:.1f} us, {found.network.bandwidth / 1e6:.1f} MB/s",
        "copy in memory": f"{found.memory / 1e9:.1f} GB/s",
        "a message": f"{found.message * 1e6:.1f} us of a core",
        "a byte between hosts": f"{found.wire * 1e9:.2f} ns of a core",
        "codecs": str(len(found.codecs)),
    }

"""The kernels' sources as CuPy is given them, and what a machine without a usable GPU is told."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hybridcomp as hc
from hybridcomp import cuda
from tests.cuda import common, fake_cupy
from tests.emulation.runtime import emulated

pytestmark = pytest.mark.skipif(common.ON_GPU, reason="the real CuPy is under test there")
INSTALLED = {"cuda": (".cu", ".cuh"), "include": (".hpp",)}  # by kernels/cuda/CMakeLists.txt


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No test sees what another one found."""
    caches = (cuda._cupy, cuda.runtime_of, cuda.kernel_folder, cuda.modules)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


# -- sources ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", list(cuda.modules()))
def test_a_module_is_one_file(module: str) -> None:
    source, options = cuda.modules()[module]
    assert (cuda.kernel_folder() / "cuda" / source).is_file()
    assert all(re.fullmatch(r"-D\w+=\w+", option) for option in options)
    text = cuda.source_of(module)
    assert not re.search(r"^\s*#\s*(include|pragma\s+once)", text, re.MULTILINE)
    assert "HC_KERNEL(" in text
    assert text.count("namespace std { typedef signed char int8_t") == 1, "headers are pasted once"


def test_every_source_belongs_to_a_module() -> None:
    """And is installed: every file that a module pastes has one of the endings that CMake looks for."""
    folder = cuda.kernel_folder()
    sources = {source for source, _ in cuda.modules().values()}
    cu = folder / "cuda"
    assert {str(path.relative_to(cu)) for path in cu.rglob("*.cu")} == sources
    for part, endings in INSTALLED.items():
        files = [path for path in (folder / part).rglob("*") if path.is_file()]
        other = {path.name for path in files if path.suffix not in endings}
        assert other <= {"modules.txt", "CMakeLists.txt"}, part


def test_an_installed_package_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("package/kernels/cuda", "kernels/cuda"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "modules.txt").write_text("# only this\n\nonly only.cu -DA=1 -DB=2\n")
    monkeypatch.setattr(cuda, "__file__", str(tmp_path / "package" / "cuda.py"))
    assert cuda.kernel_folder() == tmp_path / "package" / "kernels"
    assert cuda.modules() == {"only": ("only.cu", ("-DA=1", "-DB=2"))}
    with pytest.raises(hc.CudaUnavailableError, match=r"includes 'only\.cu', which is in neither folder"):
        cuda.source_of("only")


def test_an_installation_without_sources_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "__file__", str(tmp_path / "package" / "cuda.py"))
    with pytest.raises(hc.CudaUnavailableError, match="sources are missing: no kernels/cuda in or beside"):
        cuda.kernel_folder()


def test_a_fatbin_comes_before_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    fake = fake_cupy.make(emulated())
    fake.RawModule = lambda **given: asked.append(given) or SimpleNamespace(compile=lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    folder = cuda.kernel_folder()
    monkeypatch.setattr(cuda, "kernel_folder", lambda: tmp_path)
    (tmp_path / "fatbin").mkdir()
    (tmp_path / "fatbin" / "sign.fatbin").touch()
    runtime = cuda.runtime_of(0)
    runtime.prepare("sign")
    assert asked == [{"path": str(tmp_path / "fatbin" / "sign.fatbin")}]
    monkeypatch.setattr(cuda, "kernel_folder", lambda: folder)
    runtime.prepare("mx")
    assert asked[1]["options"] == (*cuda.OPTIONS, "-DHC_MX=1")
    assert asked[1]["code"] == cuda.source_of("mx")


# -- machines --------------------------------------------------------------------------------------------------


def refused(monkeypatch: pytest.MonkeyPatch, cupy: Any, ordinal: int = 0) -> str:
    """What is said of a device, if this is the module of CuPy."""
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(hc.CudaUnavailableError) as caught:
        cuda.runtime_of(ordinal)
    return str(caught.value)


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(monkeypatch, None)  # importing it is an ImportError
    assert said.startswith("CuPy is not installed")
    assert "pip install 'hybridcomp[cuda12]' or 'hybridcomp[cuda13]'" in said
    assert not cuda.available()


@pytest.mark.parametrize("version", ["12.3.0", "13.3.0", "9.6.0rc1"])
def test_cupy_too_old(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    said = refused(monkeypatch, fake_cupy.make(emulated(), version=version))
    assert said == f"CuPy {version} is too old; at least 13.4"
    assert not cuda.available()


@pytest.mark.parametrize("version", ["13.4.0", "14.0.0b1"])
def test_cupy_new_enough(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy.make(emulated(), version=version))
    assert cuda.available()


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_cupy.make(emulated())

    def missing() -> int:
        raise fake.cuda.runtime.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    fake.cuda.runtime.getDeviceCount = missing
    said = refused(monkeypatch, fake)
    assert said.startswith("the CUDA driver is missing or finds no device: cudaErrorNoDevice")
    assert not cuda.available()


@pytest.mark.parametrize("ordinal", [1, -1])
def test_no_such_device(monkeypatch: pytest.MonkeyPatch, ordinal: int) -> None:
    said = refused(monkeypatch, fake_cupy.make(emulated()), ordinal)
    assert said == f"there is no CUDA device {ordinal}; this machine has 1"
    assert cuda.available()


@pytest.mark.parametrize("capability", [(7, 2), (6, 1)])
def test_device_too_old(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    said = refused(monkeypatch, fake_cupy.make(emulated(), capability=capability))
    assert said.startswith(f"CUDA device 0 has compute capability {capability[0]}.{capability[1]};")
    assert "7.5 (Turing, 2018) or newer" in said


def test_the_oldest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy.make(emulated(), capability=(7, 5)))
    runtime = cuda.runtime_of(0)
    assert (runtime.name, runtime.multiprocessors, runtime.ordinal) == ("fake", 2, 0)

"""The kernels' sources as CuPy is given them, and what a machine without a usable GPU is told."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hybridcomp as hc
from hybridcomp import cuda, nvrtc, variables
from tests.cuda import common, fake_cupy
from tests.emulation.runtime import emulated

pytestmark = pytest.mark.skipif(common.ON_GPU, reason="the real CuPy is under test there")
INSTALLED = {"cuda": (".cu", ".cuh"), "include": (".hpp",)}  # as kernels/cuda/CMakeLists.txt installs them


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
    """Every source is installed, too: each file that a module pastes has one of the endings that CMake looks for."""
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
    assert not fake.cuda.nvrtc.compiled
    monkeypatch.setattr(cuda, "kernel_folder", lambda: folder)
    monkeypatch.setenv(variables.CACHE_DIR.name, str(tmp_path / "cache"))
    runtime.prepare("mx")
    code = json.loads(Path(asked[1]["path"]).read_text(encoding="utf-8"))
    assert code["options"] == [*cuda.OPTIONS, "-DHC_MX=1", "--gpu-architecture=sm_90"]
    assert code["source"] == cuda.source_of("mx")


# -- compiled kernels ------------------------------------------------------------------------------------------

SOURCE, OPTIONS = "__global__ void nothing() {}", ("--ftz=false",)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(variables.CACHE_DIR.name, str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def test_kernels_are_compiled_once_and_kept(cache: Path) -> None:
    library = fake_cupy.NVRTC()
    first = nvrtc.compiled(library, "a", SOURCE, OPTIONS, 90)
    assert first.parent == cache
    assert nvrtc.compiled(library, "a", SOURCE, OPTIONS, 90) == first
    assert library.compiled == ["a.cu"]
    assert cache.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in cache.iterdir()] == [first.name], "nothing else is left"
    others = {
        nvrtc.compiled(library, "a", SOURCE + " ", OPTIONS, 90),
        nvrtc.compiled(library, "a", SOURCE, (), 90),
        nvrtc.compiled(library, "a", SOURCE, OPTIONS, 80),
        nvrtc.compiled(library, "b", SOURCE, OPTIONS, 90),
    }
    assert len(others | {first}) == 5


def test_a_device_newer_than_the_compiler_gets_intermediate_code(cache: Path) -> None:
    path = nvrtc.compiled(fake_cupy.NVRTC(), "a", SOURCE, OPTIONS, 120)
    assert path.suffix == ".ptx"
    assert json.loads(path.read_text(encoding="utf-8"))["options"][-1] == "--gpu-architecture=compute_90"


def test_what_does_not_compile_is_said(cache: Path) -> None:
    with pytest.raises(
        hc.CudaUnavailableError, match=r"does not compile the kernels 'a': .*\na\.cu\(1\): error"
    ):
        nvrtc.compiled(fake_cupy.NVRTC(), "a", "#error", OPTIONS, 90)
    assert not list(cache.iterdir())


def test_without_a_folder_to_keep_them_kernels_are_compiled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(variables.CACHE_DIR.name, str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = nvrtc.compiled(fake_cupy.NVRTC(), "a", SOURCE, OPTIONS, 90)
    assert path.parent.parent == tmp_path
    assert json.loads(path.read_text(encoding="utf-8"))["source"] == SOURCE


def test_the_usual_folder_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variables.CACHE_DIR.name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert nvrtc.cache_folder() == tmp_path / "hybridcomp" / "kernels"


# -- machines --------------------------------------------------------------------------------------------------


def refused(monkeypatch: pytest.MonkeyPatch, cupy: Any, ordinal: int = 0) -> str:
    """Return the error about a device where this is the module of CuPy."""
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(hc.CudaUnavailableError) as caught:
        cuda.runtime_of(ordinal)
    return str(caught.value)


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(monkeypatch, None)  # importing it is an ImportError
    assert said.startswith("CuPy is not installed")
    assert "pip install cupy-cuda12x or cupy-cuda13x" in said
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

"""Load the compiled CPU kernels on first use."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType

from hybridcomp import variables
from hybridcomp.errors import NativeUnavailableError

ISAS = variables.ISA.names


@functools.cache
def kernels() -> ModuleType:
    """Return the extension module, with the instruction set that ``HYBRIDCOMP_ISA`` names or the best one.

    Raises:
        NativeUnavailableError: the extension was not built for this Python, or the CPU lacks the named set.
        ConfigError: ``HYBRIDCOMP_ISA`` names no set, or ``HYBRIDCOMP_NUM_THREADS`` is no such number.
    """
    module = extension()
    wanted, threads = variables.ISA.read(), variables.NUM_THREADS.read()
    if wanted:
        force_isa(module, wanted)
    if threads is not None:
        module.set_threads(threads)
    return module


def extension() -> ModuleType:
    """Return the extension module as it is loaded, whatever the variables say.

    Raises:
        NativeUnavailableError: the extension was not built for this Python.
    """
    try:
        return importlib.import_module("hybridcomp._kernels")
    except ModuleNotFoundError as error:
        raise NativeUnavailableError(
            "the compiled kernels are missing: install hybridcomp by pip, with a C++ compiler present"
        ) from error
    except ImportError as error:
        raise NativeUnavailableError(f"the compiled kernels cannot be loaded: {error}") from error


def force_isa(module: ModuleType, name: str) -> None:
    """Use the kernels compiled for ``name`` ("portable", "avx2", "avx512") from now on, in this process."""
    available = module.available_isas()
    if name not in available:
        raise NativeUnavailableError(f"{variables.ISA}={name!r}: this machine runs {', '.join(available)}")
    module.set_isa(name)


@contextlib.contextmanager
def using_isa(name: str) -> Iterator[None]:
    """Use the kernels of one of this machine's instruction sets in a block."""
    before = kernels().isa()
    kernels().set_isa(name)
    try:
        yield
    finally:
        kernels().set_isa(before)


def set_num_threads(count: int) -> None:
    """Set the number of threads that each encode and decode of this process may use from now on.

    It is 1 unless set, here or by ``HYBRIDCOMP_NUM_THREADS``: ranks usually share a machine. Messages do not depend
    on it.

    Args:
        count: number of threads, from 1 to 64.

    Raises:
        ValueError: ``count`` is out of range.
    """
    most = variables.MAX_THREADS
    if isinstance(count, bool) or not str(count).isdecimal() or not 1 <= int(count) <= most:
        raise ValueError(f"threads must be an integer from 1 to {most}, not {count!r}")
    kernels().set_threads(int(count))


def get_num_threads() -> int:
    """Return the number of threads that an encode or decode may use."""
    return int(kernels().threads())

"""The compiled CPU kernels, loaded on first use."""

from __future__ import annotations

import functools
import os
from types import ModuleType

from hybridcomp.errors import NativeUnavailableError

ISAS = ("portable", "avx2", "avx512")


@functools.cache
def kernels() -> ModuleType:
    """Return the extension module, with the instruction set that ``HYBRIDCOMP_ISA`` names or the best one.

    Raises:
        NativeUnavailableError: the extension was not built for this Python, or the CPU lacks the named set.
    """
    try:
        from hybridcomp import _kernels  # noqa: PLC0415  (loading is this function's purpose)
    except ImportError as error:
        raise NativeUnavailableError(
            f"the compiled kernels are missing ({error}); install hybridcomp with a C++ compiler present"
        ) from error
    wanted = os.environ.get("HYBRIDCOMP_ISA")
    if wanted:
        force_isa(_kernels, wanted)
    module: ModuleType = _kernels
    return module


def force_isa(module: ModuleType, name: str) -> None:
    """Use the kernels compiled for ``name`` ("portable", "avx2", "avx512") from now on, in this process."""
    available = module.available_isas()
    if name not in available:
        raise NativeUnavailableError(f"HYBRIDCOMP_ISA={name!r}: this machine runs {', '.join(available)}")
    module.set_isa(name)

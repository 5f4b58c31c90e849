"""Load the codecs of device arrays, which few programs need and which need the codecs of host arrays."""

from __future__ import annotations

import functools
import importlib
from typing import Any


@functools.cache
def device_codecs(module: str = "") -> Any:
    """Return :mod:`hybridcomp.codecs.device`, or the module of that name in it, loaded at the first call.

    The import is by name and late: only an array in device memory shows that the package is needed, and its drivers
    import the codecs that ask for it here.
    """
    return importlib.import_module(f"hybridcomp.codecs.device{module and '.' + module}")

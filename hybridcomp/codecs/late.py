"""Load the codecs of device arrays, which few programs need and which need the codecs of host arrays."""

from __future__ import annotations

import functools
import importlib
from typing import Any


@functools.cache
def device_codecs(module: str = "") -> Any:
    """Return :mod:`hybridcomp.codecs.device`, or the module of that name in it, loaded at the first call.

    By name and late: an array in device memory is what shows that it is needed, and its drivers are made of the codecs
    that ask for it here.
    """
    return importlib.import_module(f"hybridcomp.codecs.device{module and '.' + module}")

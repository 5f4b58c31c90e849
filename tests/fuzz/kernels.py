"""Load kernels that were built apart, with sanitizers, in place of the installed ones."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ExtensionFileLoader

VARIABLE = "HYBRIDCOMP_FUZZ_KERNELS"


def load() -> None:
    """Make the extension that ``HYBRIDCOMP_FUZZ_KERNELS`` names hybridcomp's; call before it is used."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    name = "hybridcomp._kernels"
    loader = ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise ImportError(f"{VARIABLE}={path} is no extension module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module
    print(f"kernels: {path}", file=sys.stderr)

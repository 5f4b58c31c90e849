"""Patch a module of torch's when a program imports it: some take a second, and few programs need them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


def when_imported(name: str, do: Callable[[Any], None]) -> None:
    """Call ``do(module)`` after a module has been executed, or now if it has been."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Finder(name, do))
    else:
        do(module)


class _Finder(MetaPathFinder):
    """An importer's finder that finds one module as everybody else would, once."""

    def __init__(self, name: str, do: Callable[[Any], None]) -> None:
        self._name = name
        self._do = do

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_do(module: Any) -> None:
                execute(module)
                self._do(module)

            spec.loader.exec_module = execute_and_do  # type: ignore[method-assign]
        return spec

"""Call functions when modules are imported, to patch those of other libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any


def when_imported(name: str, do: Callable[[Any], None]) -> None:
    """Call ``do(module)`` after a module has been executed, or now if it has been.

    Modules of other libraries are patched so: some take a second to import, and few programs need them.
    """
    module = sys.modules.get(name)
    if module is None:
        _finder.wanted.setdefault(name, []).append(do)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    else:
        do(module)


class _Finder(MetaPathFinder):
    """Finder of imports that finds the wanted modules as other finders would, each once."""

    def __init__(self) -> None:
        self.wanted: dict[str, list[Callable[[Any], None]]] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find a module as :class:`importlib.abc.MetaPathFinder` describes."""
        if fullname not in self.wanted:
            return None
        calls = self.wanted.pop(fullname)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_do(module: Any) -> None:
                execute(module)
                for do in calls:
                    do(module)

            spec.loader.exec_module = execute_and_do  # type: ignore[method-assign]
        return spec


_finder = _Finder()

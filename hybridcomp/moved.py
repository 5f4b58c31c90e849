"""Import modules that have moved by the names that they had, for one release."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# Rooms, and where they are now.
MOVED = {
    "hybridcomp.demo": "hybridcomp_lab.demo",
    "hybridcomp.lab": "hybridcomp.net",
    "hybridcomp.planner": "hybridcomp_lab.planner",
    "hybridcomp.study": "hybridcomp_lab.study",
    "hybridcomp.train": "hybridcomp_lab.train",
}


class _Finder:
    """Finder of Python's imports, and the loader of what it finds."""

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        if not name.startswith("hybridcomp.") or _room(name) not in MOVED:
            return None
        from importlib.machinery import ModuleSpec  # noqa: PLC0415  (the package's import takes a millisecond)

        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # Python asks for the methods alone

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        room = _room(name)
        sys.modules[name] = importlib.import_module(MOVED[room] + name.removeprefix(room))
        if name == room:  # once, not for each module in it
            import warnings  # noqa: PLC0415

            said = f"{name} has moved to {MOVED[room]}; the old name goes with the next release"
            warnings.warn(said, FutureWarning, stacklevel=2)


def _room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def find_moved() -> None:
    """Have imports find what has moved."""
    # First: a room that was imported by its old name has a folder, and Python would load the modules in it once more.
    sys.meta_path.insert(0, _Finder())

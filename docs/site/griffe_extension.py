"""Have griffe, which reads the package for the API's pages, take docstrings as :mod:`docstrings` makes them.

Functions that a class's body lists, such as ``Allreduce = reductions.Allreduce``, are methods of the class there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from docstrings import markdown  # hooks.py has loaded it: griffe does not look for modules here
from griffe import (
    AliasResolutionError,
    Attribute,
    Class,
    ExprAttribute,
    Extension,
    Function,
    Module,
    NameResolutionError,
    Object,
    Parameters,
)


class Markdown(Extension):
    """Extension that rewrites every docstring that griffe finds."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Make methods of the functions that classes list, before docstrings are rewritten in the scope of each."""
        for kind in _classes(pkg):
            for name, member in list(kind.members.items()):
                if isinstance(member, Attribute) and isinstance(member.value, ExprAttribute):
                    found = _function(pkg, member.value.canonical_path)
                    if found is not None:
                        kind.set_member(name, _method(found, member))

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of a module, a class, a function or an attribute."""

        def resolve(name: str) -> str:
            try:
                return obj.resolve(name)
            except (NameResolutionError, AliasResolutionError):
                return name

        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value, resolve)


def _classes(module: Module) -> Iterator[Class]:
    """Yield the classes of a module and of those in it."""
    for member in module.members.values():
        if isinstance(member, Module):
            yield from _classes(member)
        elif isinstance(member, Class):
            yield member


def _function(package: Module, path: str) -> Function | None:
    """Return the function of a package at a path, if there is one."""
    inside = path.removeprefix(f"{package.path}.")
    try:
        found = package.get_member(inside) if inside != path else None
    except KeyError:
        return None
    return found if isinstance(found, Function) else None


def _method(function: Function, listed: Attribute) -> Function:
    """Return a function as a method in the place where a class lists it, without its first argument, the object."""
    made = copy.copy(function)
    made.name, made.lineno, made.endlineno = listed.name, listed.lineno, listed.endlineno
    made.aliases = {}
    made.parameters = Parameters(*list(function.parameters)[1:])
    if function.docstring is not None:
        made.docstring = copy.copy(function.docstring)
        made.docstring.parent = made
    return made

"""Keep torch's compiler out of what torch calls while compiled code runs.

The methods of a process group, of its works and of hooks are Python, where those of torch's own backends are C++.
Dynamo compiles each Python frame that begins while compiled code runs, so it would try to compile these, and fails at
the first attribute of a process group that torch's own ones lack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from hybridcomp.imports import when_imported

_Class = TypeVar("_Class", bound=type)


def untraced(cls: _Class) -> _Class:
    """Exclude the methods and properties that a class defines from compilation; a decorator of classes.

    Nothing is wrapped until the program loads the compiler: a call then takes half a microsecond more.
    """
    when_imported("torch._dynamo", functools.partial(_exclude, cls))
    return cls


def _exclude(cls: type, dynamo: Any) -> None:
    for name, member in list(vars(cls).items()):
        if isinstance(member, FunctionType) and not name.startswith("__"):
            setattr(cls, name, _disabled(dynamo, member))
        elif isinstance(member, property) and isinstance(member.fget, FunctionType):
            setattr(cls, name, property(_disabled(dynamo, member.fget), member.fset, member.fdel))


def _disabled(dynamo: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    return dynamo.disable(function)  # type: ignore[no-any-return]

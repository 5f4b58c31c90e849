"""Have griffe, which reads the package for the API's pages, take docstrings as :mod:`docstrings` makes them."""

from __future__ import annotations

from typing import Any

from docstrings import markdown  # hooks.py has loaded it: griffe does not look for modules here
from griffe import AliasResolutionError, Extension, NameResolutionError, Object


class Markdown(Extension):
    """Extension that rewrites every docstring that griffe finds."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of a module, a class, a function or an attribute."""

        def resolve(name: str) -> str:
            try:
                return obj.resolve(name)
            except (NameResolutionError, AliasResolutionError):
                return name

        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value, resolve)

"""Read docstrings as Markdown: their few marks of reStructuredText become links and code (an extension of griffe)."""

from __future__ import annotations

import re
from typing import Any

from griffe import Docstring, Extension, Object

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`(?P<short>~?)(?P<name>[^`]+)`")
_LITERAL = re.compile(
    r"^(?P<indent>[ ]*)\.\. code-block:: (?P<language>\w+)\n\n(?P<code>(?:(?P=indent)[ ]+\S.*\n|[ ]*\n)+)",
    re.M,
)

_SEVERAL = re.compile(
    r"^(?P<indent>[ ]{4})(?P<names>[a-z_]+(?:, [a-z_]+)+): (?P<text>.*(?:\n[ ]{5,}\S.*)*)", re.M
)


class Markdown(Extension):  # type: ignore[misc]
    """Turns Sphinx's roles into references, its code blocks into fenced ones; gives every argument a line."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of a class, a function, an attribute or a module."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring, obj)


def markdown(docstring: Docstring, obj: Object) -> str:
    """Return a docstring's text in Markdown."""

    def role(found: re.Match[str]) -> str:
        name = found["name"].lstrip(".")
        shown = name.rpartition(".")[2] if found["short"] else name
        path = obj.resolve(name) if _resolves(obj, name) else name
        return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'

    def block(found: re.Match[str]) -> str:
        indent = found["indent"]
        code = re.sub(rf"^{indent}    ", indent, found["code"].rstrip("\n"), flags=re.M)
        return f"{indent}```{found['language']}\n{code}\n{indent}```\n\n"

    def each(found: re.Match[str]) -> str:
        return "\n".join(f"{found['indent']}{name}: {found['text']}" for name in found["names"].split(", "))

    return _SEVERAL.sub(each, _LITERAL.sub(block, _ROLE.sub(role, docstring.value)))


def _resolves(obj: Object, name: str) -> bool:
    try:
        obj.resolve(name)
    except Exception:  # griffe's own errors of names, of several kinds
        return False
    return True

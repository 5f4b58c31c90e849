"""Turn the reStructuredText in docstrings into Markdown: roles, code blocks, arguments named together."""

from __future__ import annotations

import re
from collections.abc import Callable

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`(?P<short>~?)(?P<name>[^`]+)`")
_BLOCK = re.compile(
    r"^(?P<indent>[ ]*)\.\. code-block:: (?P<language>\w+)\n\n(?P<code>(?:(?P=indent)[ ]+\S.*(?:\n|\Z)|[ ]*\n)+)",
    re.M,
)
_SEVERAL = re.compile(
    r"^(?P<indent>[ ]{4})(?P<names>[a-z_]+(?:, [a-z_]+)+): (?P<text>.*(?:\n[ ]{5,}\S.*)*)", re.M
)


def markdown(text: str, resolve: Callable[[str], str]) -> str:
    """Return a docstring in Markdown.

    Args:
        text: text of the docstring, without its indentation.
        resolve: function from a name, as the module of the docstring has it, to its full path.

    Returns:
        The text; a role is a reference that the site need not have, a code block is fenced, and each of several
        arguments that share a description has it on a line of its own.
    """

    def role(found: re.Match[str]) -> str:
        name = found["name"].lstrip(".")
        shown = name.rpartition(".")[2] if found["short"] else name
        return f'<autoref identifier="{resolve(name)}" optional><code>{shown}</code></autoref>'

    def block(found: re.Match[str]) -> str:
        indent = found["indent"]
        code = re.sub(rf"^{indent}    ", indent, found["code"].strip("\n"), flags=re.M)
        return f"{indent}```{found['language']}\n{code}\n{indent}```\n\n"

    def each(found: re.Match[str]) -> str:
        return "\n".join(f"{found['indent']}{name}: {found['text']}" for name in found["names"].split(", "))

    return _SEVERAL.sub(each, _BLOCK.sub(block, _ROLE.sub(role, text)))

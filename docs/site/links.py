"""Follow the guides' links to files outside ``docs``, so that one text is right on GitHub and on the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

# Matches code, in which nothing is a link, or the target of a link. A link's text may hold code.
_PARTS = re.compile(
    r"^(?P<fence>[ ]*(?:`{3,}|~{3,})).*?^\s*(?P=fence)[ ]*$"
    r"|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)"
    r"|\]\((?P<target>[^()\s]+)\)",
    re.MULTILINE | re.DOTALL,
)
_ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:|#|/")  # leads to another host, or stays on the page
_RAW = {".png", ".svg", ".json", ".html"}  # files that a browser shows; others become a page with their text
OUTSIDE = "repository"  # the site's folder of files outside docs


def links(text: str) -> Iterator[str]:
    """Yield the targets of Markdown's links to other files."""
    for found in _PARTS.finditer(text):
        target = found["target"]
        if target is not None and not _ELSEWHERE.match(target):
            yield target


def linked(target: str, page: str) -> str:
    """Return the file or folder that a link leads to.

    Args:
        target: target of the link, maybe with an anchor.
        page: the file that has the link.

    Returns:
        A path from the repository's root, as ``page`` is.
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target.partition("#")[0]))
    return path.removesuffix("/")


def site_path(path: str, root: Path) -> str | None:
    """Return where the site has a file or folder of the repository.

    Args:
        path: from the repository's root.
        root: root of the repository.

    Returns:
        A path from the root of the site's sources; it ends in ``.md`` for files that become pages, and for folders,
        whose pages list their files. None if there is no such file.
    """
    if path.startswith("..") or not (root / path).exists():
        return None
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (root / path).is_dir():
        return f"{OUTSIDE}/{path}/index.md"
    suffix = posixpath.splitext(path)[1]
    if suffix == ".md":
        return f"{OUTSIDE}/{path.lower()}"  # README.md would be the page of its folder
    return f"{OUTSIDE}/{path}" if suffix in _RAW else f"{OUTSIDE}/{path}.md"


def rewrite(text: str, page: str, root: Path) -> str:
    """Return a page's text with links that are right on the site.

    A link to a file that is not there stays as it is: the build, which is strict, reports it.

    Args:
        text: Markdown.
        page: the file that holds it, from the repository's root.
        root: root of the repository.
    """
    here = site_path(page, root)

    def replace(found: re.Match[str]) -> str:
        target = found["target"]
        if here is None or target is None or _ELSEWHERE.match(target):
            return found[0]
        there = site_path(linked(target, page), root)
        if there is None:
            return found[0]
        hash_, anchor = target.partition("#")[1:]
        return f"]({posixpath.relpath(there, posixpath.dirname(here))}{hash_}{anchor})"

    return _PARTS.sub(replace, text)

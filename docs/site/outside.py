"""Make pages of files and folders outside ``docs``: text with its colours, a folder's list of files."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable
from pathlib import Path

from links import OUTSIDE, linked, links, site_path

_LANGUAGES = {
    ".py": "python", ".toml": "toml", ".yml": "yaml", ".sh": "bash", ".sbatch": "bash",
    ".hpp": "cpp", ".cpp": "cpp", ".cu": "cuda", ".cuh": "cuda",
}  # fmt: skip
_WHOLE = "benchmarks/results/"  # its subfolders have pages, too; other folders' pages only name theirs
_HEAD = "---\nsearch:\n  exclude: true\n---\n\n"


def reached(pages: Iterable[str], root: Path) -> list[str]:
    """Return the files and folders outside ``docs`` to which pages link, and those to which these link.

    Args:
        pages: Markdown files, from the repository's root.
        root: root of the repository.
    """
    found: dict[str, None] = {}
    waiting = list(pages)
    while waiting:
        page = waiting.pop()
        for path in _next(page, root):
            if path not in found and not path.startswith("docs/") and site_path(path, root) is not None:
                found[path] = None
                waiting.append(path)
    return sorted(found)


def _next(path: str, root: Path) -> list[str]:
    if (root / path).is_dir():
        inside = [posixpath.join(path, name) for name in _names(root / path)]
        return [one for one in inside if one.startswith(_WHOLE) or not (root / one).is_dir()]
    if not path.endswith(".md"):
        return []
    return [linked(target, path) for target in links((root / path).read_text(encoding="utf-8"))]


def _names(folder: Path) -> list[str]:
    """Return the names in a folder, without those that running programs left there."""
    return sorted(
        one.name for one in folder.iterdir() if one.name[0] not in "._" or one.name == "__init__.py"
    )


def page(path: str, root: Path, known: Collection[str]) -> str:
    """Return a page of Markdown for a folder or another kind of file, with links that are right on the site.

    Args:
        path: from the repository's root.
        root: root of the repository.
        known: files and folders that the site has, as :func:`reached` returns them.
    """
    if (root / path).is_dir():
        lines = []
        for name in _names(root / path):
            inside = posixpath.join(path, name)
            there = site_path(inside, root) if inside in known else None
            link = f"[{name}]({posixpath.relpath(there, f'{OUTSIDE}/{path}')})" if there else name
            lines.append(f"- {link}\n")
        return f"{_HEAD}# {path}/\n\n{''.join(lines)}"
    language = _LANGUAGES.get(posixpath.splitext(path)[1], "text")
    text = (root / path).read_text(encoding="utf-8")
    return f"{_HEAD}# {path}\n\n~~~~~~ {language}\n{text.rstrip()}\n~~~~~~\n"

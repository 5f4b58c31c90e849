"""Build the site from the guides as they are: MkDocs calls these functions (``hooks`` of mkdocs.yml)."""

from __future__ import annotations

import posixpath
import re
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import docstrings  # noqa: F401  griffe_extension.py takes it from here
import figures
import links
import outside
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from hybridcomp import style

ROOT = Path(__file__).parents[2]
_PROJECT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
_PLACE = re.compile(r'<div class="plot" data-figure="([\w-]+)"')
_PICTURE = re.compile(r'<p>(<img [^>]*src="([^"]+)"[^>]*/?>)</p>')
_STYLE, _PLOTLY, _SCRIPT = "assets/hybridcomp.css", "assets/plotly.min.js", "assets/figures.js"

_sources: dict[str, str] = {}  # the repository's file that is a page, by its path on the site


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside ``docs`` that the guides link to, and the site's own style and scripts."""
    _sources.clear()
    guides = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    paths = dict.fromkeys([*_PROJECT, *outside.reached([*guides, *_PROJECT], ROOT)])
    _sources.update({guide.removeprefix("docs/"): guide for guide in guides})
    for path in paths:
        uri = links.site_path(path, ROOT)
        if uri is None:
            raise PluginError(f"docs/site/hooks.py: {path} is not there")
        if path.endswith(".md"):
            _sources[uri] = path
        if uri.endswith(".md") and not path.endswith(".md"):
            files.append(File.generated(config, uri, content=outside.page(path, ROOT, paths)))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    sheet = style.variables() + (Path(__file__).parent / "site.css").read_text(encoding="utf-8")
    files.append(File.generated(config, _STYLE, content=sheet))
    plotly = str(resources("plotly") / "package_data" / "plotly.min.js")
    files.append(File.generated(config, _PLOTLY, abs_src_path=plotly))
    drawing = (Path(__file__).parent / "figures.js").read_text(encoding="utf-8")
    script = f'"use strict";\n{style.COLOUR_FUNCTION}{drawing}'
    files.append(File.generated(config, _SCRIPT, content=script))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links that leave ``docs`` to lead to the place of their files on the site."""
    source = _sources.get(page.file.src_uri)
    return markdown if source is None else links.rewrite(markdown, source, ROOT)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Give a page the data of the figures that it has a place for, and a way to see its pictures in full size."""
    html = _PICTURE.sub(r'<p class="picture"><a href="\2">\1</a></p>', html)
    names = dict.fromkeys(_PLACE.findall(html))
    if unknown := [name for name in names if name not in figures.FIGURES]:
        raise PluginError(
            f"{page.file.src_uri}: no figure {unknown[0]}: it is one of {', '.join(figures.FIGURES)}"
        )
    if not names:
        return html
    up = posixpath.relpath(".", posixpath.dirname(page.file.dest_uri) or ".")
    return html + "".join(
        [
            *(_data(name) for name in names),
            *(f'<script src="{up}/{script}" defer></script>\n' for script in (_PLOTLY, _SCRIPT)),
        ]
    )


def _data(name: str) -> str:
    figure = figures.FIGURES[name](ROOT / "benchmarks" / "results")
    if not figure.plots:
        raise PluginError(f"figure {name}: benchmarks/results has no files for it")
    made = figure.json()
    return f'<script type="application/json" id="figure-{name}">{made}</script>\n'

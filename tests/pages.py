"""Pages as a browser reads them: their tags, their pictures, and what they would load from elsewhere."""

from __future__ import annotations

import io
from base64 import b64decode
from html.parser import HTMLParser
from typing import Any

from matplotlib.colors import to_rgb
from matplotlib.image import imread

from hybridcomp.style import DARK, LIGHT

_INLINE = "data:image/png;base64,"


class Page(HTMLParser):
    """Parser that collects the pictures and the links out, and checks that tags are closed in order.

    Attributes:
        open: tags that are not closed.
        pictures: each picture's PNG, for light screens and for dark ones.
        outside: addresses of what is not in the page.
    """

    VOID = frozenset({"meta", "img", "link", "br", "source"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.pictures: list[tuple[bytes, bytes]] = []
        self.outside: list[str] = []
        self._on_dark: bytes | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        given = {name: value or "" for name, value in attrs}
        for name in {"src", "href", "srcset"} & set(given):
            if not given[name].startswith(_INLINE):
                self.outside.append(given[name])
        if tag == "source":
            assert given["media"] == "(prefers-color-scheme: dark)"
            self._on_dark = b64decode(given["srcset"].removeprefix(_INLINE))
        elif tag == "img":
            assert self.open[-1] == "picture", "a picture for light screens alone"
            assert self._on_dark is not None
            assert given["alt"]
            self.pictures.append((b64decode(given["src"].removeprefix(_INLINE)), self._on_dark))
            self._on_dark = None

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_pictures(text: str, count: int) -> list[bytes]:
    """Check that a page has so many pictures, each for light and for dark screens, and return the light ones."""
    page = Page(text)
    assert page.open == []
    assert page.outside == []  # it needs no other file
    assert len(page.pictures) == count
    for pair in page.pictures:
        light, dark = (imread(io.BytesIO(png))[..., :3] for png in pair)
        assert light.shape == dark.shape
        for drawn, scheme in ((light, LIGHT), (dark, DARK)):
            assert _near(drawn, scheme.paper) > 0.3  # of the pixels
            assert _near(drawn, scheme.ink) > 0.001
            assert any(_near(drawn, colour) > 0.0005 for colour in scheme.series)
    return [light for light, _ in page.pictures]


def _near(drawn: Any, colour: str) -> float:
    """Return the share of a picture's pixels that have a colour."""
    return float((abs(drawn - to_rgb(colour)).max(-1) < 0.02).mean())

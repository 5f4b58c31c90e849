"""Packages with entry points, made in a folder as pip leaves them; tables that forget them afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from hybridcomp.codecs import table
from hybridcomp.schedules.registry import ALGORITHMS

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "own_package"
POINTS = """[hybridcomp.codecs]
example.ternary = hybridcomp_example.ternary:TernaryCodec

[hybridcomp.algorithms]
example.star = hybridcomp_example.star:STAR
"""

CODEC = """
import numpy as np
from hybridcomp.codecs import NumpyCodec

class {cls}(NumpyCodec):
    name = {name!r}
    wire_id = {wire_id}
    lossless = False

    @property
    def params(self):
        return {{}}

    def payload_bytes(self, n, dtype):
        return 4 * n

    def pack(self, values):
        return values.astype("<f4").view(np.uint8)

    @classmethod
    def check(cls, payload, n, dtype):
        return None if payload.size == 4 * n else "wrong length"

    @classmethod
    def unpack(cls, payload, n, dtype):
        return payload.copy().view("<f4")
"""


def install(
    folder: Path, package: str, version: str, points: str, modules: dict[str, str] | None = None
) -> Path:
    """Write a package's metadata, with these entry points, and modules to a folder for ``sys.path``; return it."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(points)
    for name, text in (modules or {}).items():
        (folder / f"{name}.py").write_text(text)
    return folder


def codec_package(folder: Path, package: str, name: str, wire_id: int, version: str = "1.0") -> Path:
    """Install a package with a codec that sends float32; its module is named as the package."""
    module = package.replace("-", "_")
    points = f"[hybridcomp.codecs]\n{name} = {module}:Plain\n"
    return install(
        folder, package, version, points, {module: CODEC.format(cls="Plain", name=name, wire_id=wire_id)}
    )


@contextmanager
def installed(*folders: Path) -> Iterator[None]:
    """Have packages of these folders within the block, and nothing of them after it."""
    before = set(sys.modules)
    tables: tuple[dict[Any, Any], ...] = (table._BY_NAME, table._BY_WIRE_ID, *ALGORITHMS.values())
    kept = [dict(known) for known in tables]
    with mock.patch.object(sys, "path", [*map(str, folders), *sys.path]):
        try:
            yield
        finally:
            for known, old in zip(tables, kept, strict=True):
                known.clear()
                known.update(old)
            for name in set(sys.modules) - before:
                home = getattr(sys.modules[name], "__file__", None) or ""
                if any(home.startswith(str(folder)) for folder in folders):
                    del sys.modules[name]

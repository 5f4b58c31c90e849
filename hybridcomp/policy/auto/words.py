"""Write sizes and times as people read them."""

from __future__ import annotations


def size_label(nbytes: float) -> str:
    """Return bytes in a unit that suits them: ``1.25 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


def time_label(seconds: float) -> str:
    """Return seconds in a unit that suits them: ``3.81 ms``."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"

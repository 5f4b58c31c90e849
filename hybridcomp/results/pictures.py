"""Draw what pictures of several runs share: colours, smoothed losses, files."""

from __future__ import annotations

import io
import math

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hybridcomp.style import Scheme

_MARKERS = "os^Dv"  # they repeat the distinction that colours make
SMOOTHING = 0.75


def run_styles(scheme: Scheme) -> list[tuple[str, str]]:
    """Return colours and markers of runs, in the order in which they are taken."""
    return list(zip(scheme.series, _MARKERS, strict=False))


def png(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def smoothed(values: list[float]) -> list[float]:
    """Return the exponential moving average, unbiased at its start, up to the first non-finite value."""
    mean, weight, result = 0.0, 0.0, []
    for value in values:
        if not math.isfinite(value):
            break
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        result.append(mean / weight)
    return result

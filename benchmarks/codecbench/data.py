"""The arrays that codecs are measured on: four distributions, and gradients of the repository's own trainer."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

CHANNELS = 4096
OUTLIERS = 6  # channels of 4096 that are 20 to 100 times as large as the rest


@dataclass(frozen=True)
class DataSet:
    """Values to compress.

    Attributes:
        name: short name, for tables.
        says: description in words.
        values: 1-D float32.
        tensors: start and shape of each tensor in the values; empty where they are no tensors.
    """

    name: str
    says: str
    values: Floats
    tensors: tuple[tuple[int, tuple[int, ...]], ...] = ()


def gaussian(n: int) -> DataSet:
    values = np.random.default_rng(1).standard_normal(n, dtype=np.float32)
    return DataSet("Gaussian", "independent normal values", values)


def laplace(n: int) -> DataSet:
    rng = np.random.default_rng(2)
    values = rng.standard_exponential(n, dtype=np.float32)
    np.negative(values, out=values, where=rng.integers(0, 2, n, dtype=np.uint8).astype(bool))
    return DataSet("Laplace", "independent two-sided exponential values", values)


def student(n: int) -> DataSet:
    values = np.random.default_rng(3).standard_t(3, n).astype(np.float32)
    return DataSet("Student-t(3)", "independent values of Student's t with 3 degrees of freedom", values)


def activations(n: int) -> DataSet:
    """Draw rows of 4096 channels, a few of them large throughout, as in large language models (LLM.int8())."""
    rng = np.random.default_rng(4)
    rows = math.ceil(n / CHANNELS)
    values = rng.standard_normal((rows, CHANNELS), dtype=np.float32)
    large = rng.choice(CHANNELS, OUTLIERS, replace=False)
    values[:, large] *= np.linspace(20, 100, OUTLIERS, dtype=np.float32)
    says = f"normal values in rows of {CHANNELS} channels, {OUTLIERS} of them 20 to 100 times as large"
    return DataSet("activations", says, values.reshape(-1)[:n])


def gradients(n: int, *, small: bool) -> DataSet | None:
    """Return the gradients that :mod:`.gradients` collects; None where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    from . import gradients as trainer  # noqa: PLC0415  (torch is optional here)

    return DataSet("gradients", *trainer.collect(n, small=small))


def every(n: int, *, small: bool = False) -> list[DataSet]:
    """Return all data sets of ``n`` elements; ``small``: gradients of a smaller model."""
    made = [gaussian(n), laplace(n), student(n), activations(n)]
    real = gradients(n, small=small)
    return made if real is None else [*made, real]

"""Error feedback: what a lossy codec dropped is added to what it encodes next.

Form ``ef`` (Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., arXiv:1901.09847)::

    corrected = x + residual;  msg = encode(corrected);  residual = corrected - decode(msg)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp import arrays, native
from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.registry import get_codec

Key = tuple[str | int, ...]
FORMS = ("ef",)


class ErrorFeedback:
    """Residuals of a lossy codec, by key: (axis, parameter or bucket name, ...).

    Residuals are float32 (float64 for float64 data), zero at first and zero again when the count or dtype
    under a key changes.

    Args:
        codec: what :meth:`encode` encodes with, a codec or its spec; None if only :meth:`residual` is used.
        form: ``"ef"``.
    """

    def __init__(self, codec: Codec | str | None = None, form: str = "ef") -> None:
        if form not in FORMS:
            raise ValueError(f"unknown form of error feedback {form!r}; known: {', '.join(FORMS)}")
        self.codec = None if codec is None else get_codec(codec)
        self.form = form
        self._residuals: dict[Key, npt.NDArray[Any]] = {}

    def residual(self, key: Key, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> npt.NDArray[Any]:
        """The residual under ``key``, to be changed in place.

        Args:
            key: a tuple of str and int.
            n: elements.
            dtype: of the data; the residual has its accumulator's dtype.

        Returns:
            1-D float32 or float64 of ``n`` elements.
        """
        storage = arrays.as_dtype(dtype).accumulator.storage
        found = self._residuals.get(_checked(key))
        if found is None or found.size != n or found.dtype != storage:
            found = np.zeros(n, storage)
            self._residuals[key] = found
        return found

    def encode(self, x: Any, key: Key) -> Any:
        """Encode ``x`` plus its residual, and keep what that lost.

        If what was lost is not finite everywhere (a gradient overflowed), the residual stays as it was, so
        that a step which a gradient scaler skips does not spoil those after it.

        Returns:
            The message, in ``x``'s library. It holds float32 (float64 for float64 data).

        Raises:
            ValueError: this object has no codec.
            CodecMismatchError: the codec cannot carry ``x``.
        """
        if self.codec is None:
            raise ValueError("this ErrorFeedback was made without a codec: it keeps residuals only")
        src = arrays.flatten(x)
        kind = src.dtype.accumulator
        if not src.dtype.is_float:
            return self.codec.encode(x)
        residual = self.residual(key, src.size, src.dtype)
        corrected = residual.copy()
        kernels = native.kernels()
        kernels.convert(src.data, src.dtype, corrected, kind, True)
        msg = self.codec.encode(corrected.reshape(src.shape))
        decoded = self.codec.decode(msg)
        np.subtract(corrected, decoded, out=corrected)
        if np.isfinite(corrected).all():
            residual[...] = corrected
        return arrays.like(msg, src)

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of all residuals, by keys in JSON: ``{'["dp", "layer.0.weight"]': array}``."""
        return {json.dumps(list(key)): value.copy() for key, value in self._residuals.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all residuals by those that :meth:`state_dict` gave (NumPy arrays or torch tensors).

        Raises:
            ValueError: a key or a dtype that no state has.
        """
        loaded: dict[Key, npt.NDArray[Any]] = {}
        for text, value in state.items():
            flat: Flat = arrays.flatten(value)
            if flat.dtype not in (DType.FLOAT32, DType.FLOAT64):
                raise ValueError(f"residual {text} is {flat.dtype.label}, not float32 or float64")
            loaded[_key_of(text)] = flat.data.copy()
        self._residuals = loaded

    def clear(self) -> None:
        """Forget all residuals."""
        self._residuals.clear()

    def __len__(self) -> int:
        return len(self._residuals)


def _checked(key: Key) -> Key:
    if not isinstance(key, tuple) or not all(isinstance(part, str | int) for part in key):
        raise TypeError(f"a key is a tuple of str and int, not {key!r}")
    return key


def _key_of(text: str) -> Key:
    try:
        parts = json.loads(text)
    except ValueError:
        parts = None
    if not isinstance(parts, list) or not all(isinstance(part, str | int) for part in parts):
        raise ValueError(f"malformed residual key {text!r}: not a JSON list of strings and integers")
    return tuple(parts)

"""Process several messages for :class:`~hybridcomp.codecs.base.Codec` where no kernel does so in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridcomp import native, wire
from hybridcomp.arrays import ByteArray, DType, Flat, widen
from hybridcomp.codecs.table import codec_for
from hybridcomp.errors import WireError


def trimmed(msg: ByteArray, n: int, dtype: DType) -> tuple[ByteArray, wire.Header]:
    """Return an opened message without the bytes after it, and its header.

    Raises:
        WireError: it is not a message of ``n`` elements, or its values cannot become elements of ``dtype``: floats
            become any floats, all else what it is.
    """
    header = wire.peek(msg)
    if header.count != n:
        raise WireError(f"a message of {header.count} elements where {n} were expected")
    if header.dtype is not dtype and not (header.dtype.is_float and dtype.is_float):
        raise WireError(f"a message of {header.dtype.label} where {dtype.label} was expected")
    return msg[: wire.HEADER_BYTES + header.payload], header


def summed(own: Flat, messages: Sequence[ByteArray], ranks: int, dtype: DType) -> np.ndarray[Any, Any]:
    """Add opened messages to ``own`` in its accumulator's type, divide by ``ranks``, and round to ``dtype``.

    Returns:
        A new array of ``own.size`` elements of ``dtype.storage``.

    Raises:
        WireError: a message of another count or of a dtype with another accumulator, or a malformed payload.
    """
    wide = own.dtype.accumulator
    total = widen(own.data, own.dtype)
    for msg in messages:
        raw, header = trimmed(msg, own.size, wide)
        if header.dtype.accumulator is not wide:
            raise WireError(f"a message of {header.dtype.label}, which does not add to {wide.label}")
        codec_for(header).decode_add_flat(raw, header, total)
    if ranks != 1:
        total /= ranks
    if dtype is wide:
        return total
    narrow = np.empty(own.size, dtype.storage)
    native.kernels().convert(total, wide, narrow, dtype, False)
    return narrow

"""A NumPy model of bounded, and its messages with other bytes in them."""

from __future__ import annotations

import numpy as np

import hybridcomp as hc
from tests.codecs import common

BLOCK = 64
RAW, CONSTANT, DELTA = 64, 65, 32


def model_step(bound: float, dtype: np.dtype) -> tuple[float, float]:
    """Return the limit and the step; 0 and 0 where blocks are only kept."""
    if dtype == np.float64:
        if bound < 2.0**-900:
            return 0.0, 0.0
        limit = min(bound, 2.0**1000)
        return limit, 2 * limit * (1 - 2.0**-8)
    if bound < 2.0**-100:
        return 0.0, 0.0
    limit = np.float32(min(bound, 2.0**120))
    if float(limit) > bound:
        limit = np.nextafter(limit, np.float32(0))
    if dtype == np.float16:
        return limit, np.float32(2.0 ** np.floor(np.log2(float(limit) * 2)))
    return limit, np.float32(2) * limit * np.float32(1 - 2.0**-8)


def width(q: np.ndarray) -> int:
    """Return the bits of the widest integer in two's complement; 0 if all are 0."""
    return max((0 if v == 0 else (v if v > 0 else ~v).bit_length() + 1) for v in map(int, q))


def planes(q: np.ndarray, count: int) -> bytes:
    """Return the lowest `count` bit planes."""
    rows = (q.astype(np.int64)[None, :] >> np.arange(count)[:, None]) & 1
    return np.packbits(rows.astype(np.uint8), axis=1, bitorder="little").tobytes()


def model_block(part: np.ndarray, limit: float, step: float) -> tuple[int, bytes, np.ndarray]:
    """Return the code, bytes and decoded values of one block."""
    kind = np.float64 if part.dtype == np.float64 else np.float32
    if step:
        x = np.concatenate([part, np.repeat(part[-1:], BLOCK - part.size)]).astype(kind)
        scaled = x * (kind(1) / kind(step))
        most = 30 if kind is np.float64 else 22
        if np.all(np.abs(scaled) < 2.0**30):
            q = np.rint(scaled).astype(np.int64)
            y = (q.astype(kind) * kind(step)).astype(part.dtype)
            d = np.diff(q, prepend=q[:1])
            w, v = width(q), width(d)
            tried = width(d[:16]) + 1 < w
            code, size = (DELTA + v, 4 + 8 * v) if tried and v + 1 < w else (w, 8 * w)
            fits = w <= most and size < part.nbytes
            if fits and np.all(np.abs(x - y.astype(kind)) <= limit):
                data = planes(q, w)
                if code >= DELTA:
                    data = np.int32(q[0]).tobytes() + planes(d, v)
                return code, data, y[: part.size]
    if not part.any():
        return 0, b"", np.zeros_like(part)
    raw = part.tobytes()
    if raw == raw[: part.itemsize] * part.size:
        return CONSTANT, raw[: part.itemsize], part
    return RAW, raw, part


def model(x: np.ndarray, spec: str) -> tuple[bytes, np.ndarray]:
    """Return the payload and the decoded values."""
    codec = hc.get_codec(spec)
    if codec.abs is not None:
        bound = codec.abs
    else:
        numbers = x[np.isfinite(x)].astype(np.float64)
        bound = codec.rel * (numbers.max() - numbers.min()) if numbers.size else 0.0
    limit, step = model_step(bound, x.dtype)
    blocks = [model_block(x[at : at + BLOCK], limit, step) for at in range(0, x.size, BLOCK)]
    payload = np.float64(bound).tobytes() + (64).to_bytes(8, "little")
    payload += bytes(code for code, _, _ in blocks) + b"".join(data for _, data, _ in blocks)
    return payload, np.concatenate([y for _, _, y in blocks])


def forged(msg: np.ndarray, at: int, data: bytes) -> np.ndarray:
    """Return the message with other bytes at a place, and a CRC that fits."""
    bad = msg.copy()
    bad[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return common.reseal(bad)

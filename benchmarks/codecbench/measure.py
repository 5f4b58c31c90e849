"""Errors, promises and speeds of one way to compress, ours or a peer's.

A speed is the input's bytes over the median time, and its ratio to memcpy of the same bytes: in each repetition a
memcpy into a buffer of its own is timed, then the operation, so that both see the same machine. All buffers exist
and have been touched before. Errors are relative: the ratio of the L2 norms, and that of the largest error to the
largest magnitude.

Small arrays are measured as training meets them: not in the cache. Codec and memcpy go through so many copies of
their buffers (:func:`copies_of`) that none is still there when its turn comes again.
"""

from __future__ import annotations

import abc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import hybridcomp as hc
from hybridcomp.arrays import byte_view, flatten
from hybridcomp.codecs import Codec

from .data import DataSet
from .peers import Peer
from .specs import Entry

OPERATIONS = ("encode", "decode", "decode_add")
_COLD_BYTES = 128 << 20  # several times a large cache
_AT_ONCE = 1 << 18  # elements whose errors are summed at once, which stay in the cache


class CheckFailed(Exception):  # noqa: N818  (it is not the program's error)
    """A codec does not hold what it promises, so that its speed means nothing."""


# -- errors ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """Errors of decoded values against the input.

    Attributes:
        l2: norm of the difference over the norm of the input (0/0 is 0).
        peak: largest difference over the largest magnitude.
        absolute: largest difference.
    """

    l2: float
    peak: float
    absolute: float


def errors(x: Any, y: Any) -> Errors:
    """Return the errors of ``y`` for ``x``: flat arrays or tensors of float32, float16 or bfloat16.

    They are NaN where ``y`` has one.
    """
    squares = norm = largest = magnitude = 0.0
    for start in range(0, len(x), _AT_ONCE):
        a = wide(x[start : start + _AT_ONCE])
        d = np.abs(a - wide(y[start : start + _AT_ONCE]))
        squares += float(d @ d)
        norm += float(a @ a)
        largest = float(np.maximum(largest, d.max()))  # keeps NaN
        magnitude = max(magnitude, float(np.abs(a).max()))
    return Errors(_over(squares, norm) ** 0.5, _over(largest, magnitude), largest)


def wide(x: Any) -> npt.NDArray[np.float64]:
    """Return flat floats of any kind as float64."""
    flat = flatten(x)
    if flat.dtype.label == "bfloat16":
        return (flat.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return flat.data.astype(np.float64)


def _over(part: float, whole: float) -> float:
    return part / whole if whole else (0.0 if part == 0 else float("inf"))


# -- one face for ours and theirs --------------------------------------------------------------------------


class Subject(abc.ABC):
    """Something that encodes ``x`` again and again, with buffers made beforehand.

    Attributes:
        x: array or tensor to encode.
        acc: float32 array that :meth:`decode_add` adds to.
    """

    def __init__(self, x: Any) -> None:
        self.x = x
        self.acc = np.ones(len(x), np.float32)

    @abc.abstractmethod
    def encode(self) -> None: ...

    @abc.abstractmethod
    def decode(self) -> None: ...

    @abc.abstractmethod
    def decode_add(self) -> None: ...

    @property
    @abc.abstractmethod
    def values(self) -> Any:
        """Values that :meth:`decode` gave."""

    @abc.abstractmethod
    def floats(self) -> npt.NDArray[np.float32]:
        """Return the decoded values in float32, not rounded to the input's type."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of the message that :meth:`encode` made."""


def copies_of(n: int) -> int:
    """Return how many copies of an array of ``n`` float32 no cache holds; 1 for an array that itself is so long."""
    return max(1, -(-_COLD_BYTES // (4 * n)) if 8 * n < _COLD_BYTES else 1)


class Ours(Subject):
    """A codec of this package, with the caller's buffers: ``copies`` of each, taken in turn."""

    def __init__(self, codec: Codec, x: Any, copies: int = 1) -> None:
        super().__init__(x)
        flat = flatten(x)
        self._codec = codec
        self._xs = [x] + [clone(x) for _ in range(copies - 1)]
        self._outs = [np.zeros(codec.bound(flat.size, flat.dtype), np.uint8) for _ in range(copies)]
        self._decoded = [
            hc.decode(hc.get_codec("none").encode(x)) for _ in range(copies)
        ]  # like x, and touched
        self._accs = [self.acc] + [self.acc.copy() for _ in range(copies - 1)]
        self._msgs = [codec.encode(one, out=out) for one, out in zip(self._xs, self._outs, strict=True)]
        self._turn = 0

    def _next(self) -> int:
        self._turn = (self._turn + 1) % len(self._xs)
        return self._turn

    def encode(self) -> None:
        i = self._next()
        self._codec.encode(self._xs[i], out=self._outs[i])

    def decode(self) -> None:
        i = self._next()
        hc.decode(self._msgs[i], out=self._decoded[i])

    def decode_add(self) -> None:
        i = self._next()
        hc.decode_add(self._msgs[i], self._accs[i])

    @property
    def values(self) -> Any:
        return self._decoded[self._turn]

    def floats(self) -> npt.NDArray[np.float32]:
        return self._codec.decode(self._msgs[0], out=np.empty(len(self.x), np.float32))

    @property
    def nbytes(self) -> int:
        return len(self._msgs[0])


def clone(x: Any) -> Any:
    """Return another array or tensor of the same values."""
    return x.copy() if isinstance(x, np.ndarray) else x.clone()


class Theirs(Subject):
    """A peer, whose decode_add decodes and then adds."""

    def __init__(self, peer: Peer, x: Any) -> None:
        super().__init__(x)
        self._peer = peer
        self._coded: Any = None
        self._values: Any = None

    def encode(self) -> None:
        self._coded = self._peer.encode(self.x)

    def decode(self) -> None:
        self._values = self._peer.decode(self._coded, self.x.size)

    def decode_add(self) -> None:
        np.add(self.acc, self._peer.decode(self._coded, self.x.size), out=self.acc)

    @property
    def values(self) -> Any:
        return self._values

    def floats(self) -> npt.NDArray[np.float32]:
        return self._values

    @property
    def nbytes(self) -> int:
        return self._peer.nbytes(self._coded)


# -- quality -----------------------------------------------------------------------------------------------


def quality(subject: Subject) -> dict[str, float]:
    """Encode and decode once; return bits per value and errors."""
    subject.encode()
    subject.decode()
    found = errors(subject.x, subject.values)
    return {"bits": subject.nbytes * 8 / len(subject.x), "l2": found.l2, "peak": found.peak}


def quality_by_tensor(codec: Codec, data: DataSet) -> dict[str, float]:
    """Return the same, each tensor encoded by itself in its shape; those that the codec cannot carry go as they are."""
    decoded, total = data.values.copy(), 0
    for start, shape in data.tensors:
        span = slice(start, start + int(np.prod(shape)))
        tensor = data.values[span].reshape(shape)
        if codec.can_carry(flatten(tensor).dtype, shape) is not None:
            total += tensor.nbytes
            continue
        msg = codec.encode(tensor)
        total += msg.size
        codec.decode(msg, out=decoded[span])
    found = errors(data.values, decoded)
    return {"bits": total * 8 / data.values.size, "l2": found.l2, "peak": found.peak}


def check_promise(entry: Entry, data: DataSet, subject: Subject) -> None:
    """Check what the entry promises of ``subject``, which has just encoded and decoded ``data``.

    Raises:
        CheckFailed: a promise does not hold.
    """
    expect, x, y = entry.expect, subject.x, subject.values
    where = f"{entry.spec} on {data.name}"
    found = errors(x, y)
    if not np.isfinite(found.absolute):
        raise CheckFailed(f"{where}: finite values decode to {found.absolute}")
    if expect.exact and not np.array_equal(byte_view(x), byte_view(y)):
        raise CheckFailed(f"{where}: not the same bits")
    if expect.l2 is not None and data.name == "Gaussian" and found.l2 > expect.l2:
        raise CheckFailed(f"{where}: relative L2 error {found.l2:.3e}, promised {expect.l2:.3e}")
    if expect.peak is not None and found.peak > expect.peak:
        raise CheckFailed(f"{where}: an error of {found.peak:.3e} of the largest, promised {expect.peak:.3e}")
    if expect.absolute is not None and found.absolute > expect.absolute:
        raise CheckFailed(f"{where}: an error of {found.absolute:.3e}, promised {expect.absolute:.3e}")
    if expect.span is not None and found.absolute > expect.span * (wide(x).max() - wide(x).min()):
        raise CheckFailed(f"{where}: an element off by more than {expect.span:.3e} of the range")
    if expect.kept and not np.all((y == 0) | (y == x)):
        raise CheckFailed(f"{where}: an element that is neither zero nor the input's")
    if expect.ratio is not None:
        times = np.count_nonzero(y) / (expect.ratio * len(x))
        if not 0.8 <= times <= 1.25:
            raise CheckFailed(f"{where}: {times:.2f} times the share asked for")


def check_sum(name: str, subject: Subject) -> None:
    """Check that decode_add is decode, then one addition. ``subject`` has one copy of its buffers.

    Raises:
        CheckFailed: decode_add gives other values.
    """
    subject.acc[:] = np.linspace(-1, 1, subject.acc.size, dtype=np.float32)
    expected = subject.acc + subject.floats()
    subject.decode_add()
    if not np.array_equal(subject.acc, expected):
        raise CheckFailed(f"{name}: decode_add is not decode and an addition")
    subject.acc[:] = 1


def keeps_non_finite(make: Callable[[Any], Subject]) -> bool:
    """Tell whether NaN and the infinities decode to something that is not finite, wherever they are."""
    for value in (np.nan, np.inf, -np.inf):
        for at in (0, 2500, 4999):
            x = np.random.default_rng(5).standard_normal(5000, dtype=np.float32)
            x[at] = value
            subject = make(x)
            subject.encode()
            with np.errstate(all="ignore"):
                subject.decode()
            if np.isfinite(subject.values[at]):
                return False
    return True


# -- speed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Time and repetitions for measuring an operation.

    Attributes:
        seconds: approximate time in all, memcpy included.
        least: least number of repetitions.
        most: largest number of repetitions.
    """

    seconds: float
    least: int = 3
    most: int = 3000


@dataclass(frozen=True)
class Speed:
    """Speed of one operation, in input bytes as float32: 4 for each element, whatever the input's type.

    Attributes:
        gb_s: GB/s at the median time.
        memcpy_gb_s: GB/s of a memcpy of as many float32, timed in turn with the operation.
        ratio: ``gb_s`` over ``memcpy_gb_s``.
        repetitions: number of timings behind each median.
    """

    gb_s: float
    memcpy_gb_s: float
    ratio: float
    repetitions: int


class Memcpy:
    """The yardstick: a copy of ``n`` float32 from one buffer to another, with ``copies`` of both taken in turn."""

    def __init__(self, source: npt.NDArray[np.float32], copies: int = 1) -> None:
        self._sources = [source] + [source.copy() for _ in range(copies - 1)]
        self._targets = [np.ones_like(source) for _ in range(copies)]
        self._turn = 0

    def __call__(self) -> None:
        self._turn = (self._turn + 1) % len(self._sources)
        np.copyto(self._targets[self._turn], self._sources[self._turn])


def speeds(subject: Subject, memcpy: Memcpy, timing: Timing) -> dict[str, Speed]:
    """Time each operation in turn with memcpy; ``subject`` has encoded once before."""
    nbytes = 4 * len(subject.x)
    return {name: _speed(getattr(subject, name), memcpy, nbytes, timing) for name in OPERATIONS}


def _speed(operation: Callable[[], None], memcpy: Memcpy, nbytes: int, timing: Timing) -> Speed:
    memcpy()
    once = _seconds(operation) + _seconds(memcpy)  # also warms both up
    count = min(timing.most, max(timing.least, int(timing.seconds / once)))
    copies, times = [], []
    for _ in range(count):
        copies.append(_seconds(memcpy))
        times.append(_seconds(operation))
    copy, own = statistics.median(copies), statistics.median(times)
    return Speed(nbytes / own / 1e9, nbytes / copy / 1e9, copy / own, count)


def _seconds(operation: Callable[[], None]) -> float:
    began = time.perf_counter()
    operation()
    return time.perf_counter() - began

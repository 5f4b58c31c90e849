"""The contract of a codec.

A codec is a stateless, immutable function from an array to a message and back.

*   ``encode(x)`` makes a message: a 1-D uint8 array, header and payload (:mod:`hybridcomp.wire`), that
    decodes without any other knowledge. ``encode_into`` writes it to the caller's buffer and allocates
    nothing of the size of the data.
*   ``decode(msg)`` gives the values back as a 1-D array; ``decode_add(msg, acc)`` adds them to an fp32
    accumulator (fp64 for fp64).
*   ``bound(n, dtype)`` is the largest message, header included, that ``n`` elements can make. It is exact
    where ``fixed_size`` is true.
*   A codec's parameters are its public read-only attributes, in ``params``; they are its config, its
    spec string, its equality and its hash.
*   Any element count from 0 up, any alignment. Non-finite values decode to non-finite values.
*   Decoders are handed hostile bytes: they check before they read, and raise
    :class:`~hybridcomp.errors.WireError`.
"""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks, steps
from hybridcomp.codecs.late import device_codecs
from hybridcomp.errors import CodecMismatchError, WireError


@functools.cache
def parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a codec's constructor."""
    return inspect.signature(cls).parameters


class Codec(abc.ABC):
    """Base class of codecs.

    A subclass gives ``name``, ``wire_id`` and the abstract methods.

    Attributes:
        name: name of the codec in spec strings.
        wire_id: the header's codec byte; also selects the decoder.
        fixed_size: whether every message of n elements is exactly ``bound(n, dtype)`` bytes.
        lossless: whether decode(encode(x)) == x bit for bit.
        carries_values: whether a sparse codec may send its values through it (``values=``).
        linear: whether it sums in the compressed domain (see :mod:`~hybridcomp.codecs.linear.base`).
        partial: whether messages leave most of the input out, which error feedback has to send in later steps.
        safe: whether its error is so small that ``auto:also=`` may use it without error feedback, as bf16's and int8's.
        speed: speed on one thread, for the cost model where nothing was measured: encode, decode and decode_add in GB/s
            of fp32, a call's overhead in microseconds, and a message's bytes over those it encodes; None: not known.
        host_only: whether it has no kernels for a GPU, so that arrays of a device's memory go by way of the host's.
        examples: specs that the shared checks (:mod:`hybridcomp.testing`) take; none: the codec's name alone.
        seldom: parameters that the spec string leaves out while they have their defaults.
        bounds: parameters of which a policy must give one, each with an example: a policy says what error it allows.
    """

    name: ClassVar[str]
    wire_id: ClassVar[int]
    fixed_size: ClassVar[bool] = True
    lossless: ClassVar[bool] = False
    carries_values: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    partial: ClassVar[bool] = False
    safe: ClassVar[bool] = False
    speed: ClassVar[tuple[float, float, float, float, float] | None] = None
    host_only: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = ()
    seldom: ClassVar[frozenset[str]] = frozenset()
    bounds: ClassVar[Mapping[str, str]] = {}

    # -- what a subclass implements ------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def params(self) -> dict[str, Any]:
        """Return the parameters by name, in the order of the spec string, defaults included."""

    @abc.abstractmethod
    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        """Return the size of the largest message of ``n`` elements in bytes, header included."""

    @abc.abstractmethod
    def encode_flat(self, src: Flat, out: ByteArray) -> int:
        """Write the message of ``src`` into ``out`` (at least ``bound`` bytes); return its bytes."""

    @classmethod
    @abc.abstractmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        """Write the values of a message to ``out``: ``header.count`` elements of ``dtype.storage``."""

    @classmethod
    @abc.abstractmethod
    def decode_add_flat(cls, msg: ByteArray, header: wire.Header, acc: np.ndarray[Any, Any]) -> None:
        """Add the values of a message to ``acc``: ``header.count`` float32 (float64 if the message is)."""

    @classmethod
    def decode_sum_flat(
        cls, messages: Sequence[tuple[ByteArray, wire.Header]], out: np.ndarray[Any, Any]
    ) -> None:
        """Write the sum of messages' values, added to zero in this order, to ``out``: as :meth:`decode_add_flat`.

        Args:
            messages: opened messages, each with its header.
            out: array of ``header.count`` float32 (float64 if the messages are).
        """
        out.fill(0)
        for raw, header in messages:
            cls.decode_add_flat(raw, header, out)

    @classmethod
    @abc.abstractmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        """Raise WireError unless the payload's lengths fit the header's count.

        Called before memory for a message's values is allocated; the decoders check for themselves.
        """

    def can_carry(self, dtype: DType, shape: tuple[int, ...]) -> str | None:
        """Return None if this codec can carry such an array, else the reason why not."""
        if not (dtype.is_float or self.lossless):
            allowed = ", ".join(d.label for d in DType if d.is_float)
            return f"{dtype.label} is not floating-point; allowed: {allowed}"
        return None

    def refuses(self, src: Flat) -> str | None:
        """Return None if :meth:`encode` takes this array, else the reason. Policies ask :meth:`can_carry`."""
        return self.can_carry(src.dtype, src.shape)

    def at_step(self, step: int) -> Codec:
        """Return the codec to use at ``step`` (0, 1, ...): another seed if it draws random numbers, else itself."""
        return self

    def sharing(self, encodings: Fraction) -> Codec:
        """Return the codec to use where a result has the errors of so many encodings; itself, unless it bounds theirs.

        Its messages are this codec's: any codec of the same spec decodes them.
        """
        return self

    @property
    def on_device(self) -> bool:
        """Tell whether this form of the codec has device kernels, given that its name has some."""
        return True

    @property
    def integer_blocks(self) -> tuple[int, int] | None:
        """Return (bits, block) if a message holds only scales and the nearest integers of :mod:`.quantize`.

        Kernels of error feedback write such messages themselves. None for every other codec.
        """
        return None

    @property
    def encoder(self) -> Any:
        """Return the kernels' ``Encoder`` that writes this codec's messages of float arrays by itself, or None."""
        return None

    # -- what a subclass inherits --------------------------------------------------------------------

    def encode(self, x: Any, out: Any = None) -> Any:
        """Encode ``x``: any shape; fp32, fp64, fp16 or bf16; NumPy or CuPy array, or torch tensor.

        Args:
            x: the values, flattened in C order.
            out: optional 1-D uint8 buffer of at least ``bound(x.size, x.dtype)`` bytes.

        Returns:
            The message: 1-D uint8, a view of ``out`` when given, of the same library as ``x``.

        Arrays on a device are encoded there, on the stream that their library is using.

        Raises:
            CodecMismatchError: this codec cannot carry ``x``.
            CudaUnavailableError: ``x`` is on a device that cannot be used.
            ValueError: ``out`` is too small.
        """
        if out is not None and self.encoder is not None:
            size = self.encoder.encode_plain(x, out)
            if size:  # nearly always; unusual or wrong arguments go the long way
                return out[:size]
        src = arrays.flatten(x, device=True)
        reason = self.refuses(src)
        if reason is not None:
            raise CodecMismatchError(f"codec {self.spec!r} cannot carry this array: {reason}")
        if arrays.on_device(x):
            return device_codecs().encode_array(self, src, x, out)
        need = self.bound(src.size, src.dtype)
        if out is None:
            buf: ByteArray = np.empty(need, np.uint8)
        else:
            flat = arrays.flatten(out, writable=True)
            if flat.dtype is not DType.UINT8 or flat.size < need:
                raise ValueError(
                    f"out must be uint8 of at least {need} bytes, not {flat.dtype.label}[{flat.size}]"
                )
            buf = flat.data
        n = self.encode_flat(src, buf)
        return arrays.like(buf[:n], src)

    def decode(self, msg: Any, out: Any = None, *, max_bytes: int | None = None) -> Any:
        """Decode a message of this codec; see :func:`hybridcomp.decode`."""
        if arrays.on_device(msg):
            return device_codecs().decode_array(msg, out, self._check_mine, max_bytes=max_bytes)
        raw, header = wire.open_message(msg)
        self._check_mine(header)
        return decode_message(
            type(self), raw, header, out, torch_out=arrays.is_torch(msg), max_bytes=max_bytes
        )

    def decode_add(self, msg: Any, acc: Any) -> None:
        """Add the decoded values to ``acc``: contiguous float32 (float64 for a float64 message)."""
        if arrays.on_device(msg):
            device_codecs().add_array(msg, acc, self._check_mine)
            return
        raw, header = wire.open_message(msg)
        self._check_mine(header)
        add_message(type(self), raw, header, acc)

    # -- several messages at once ----------------------------------------------------------------------

    def decode_many(
        self,
        messages: Sequence[ByteArray],
        outs: Sequence[np.ndarray[Any, Any]],
        dtype: DType,
        *,
        stream: bool = False,
    ) -> None:
        """Write the values of opened messages (:func:`hybridcomp.wire.first_fault`) of this codec.

        Args:
            messages: opened messages, each of as many elements as its output.
            outs: 1-D contiguous arrays of ``dtype.storage``.
            dtype: dtype of the outputs' elements.
            stream: whether to write past the caches where possible: for arrays that are not read soon, such as parts
                of one that no cache holds.

        Raises:
            WireError: a malformed payload. Outputs may have been written.
        """
        done = 0
        if dtype.is_float:
            done = native.kernels().decode_many(list(messages), list(outs), dtype, stream)
        for msg, out in zip(messages[done:], outs[done:], strict=True):  # the rest; raises if malformed
            self.decode_flat(*steps.trimmed(msg, out.size, dtype), out, dtype)

    def sum_encode(
        self,
        own: Flat,
        messages: Sequence[ByteArray],
        ranks: int,
        dtype: DType,
        out: ByteArray,
        *,
        result: np.ndarray[Any, Any] | None = None,
        stream: bool = False,
    ) -> int:
        """Add opened messages to an array, divide, and encode the sum; where possible in one pass over memory.

        The message encodes, bit for bit, ``own`` in its accumulator's type, plus each message in this order, divided
        by ``ranks`` in that type, rounded to ``dtype``.

        Args:
            own: the first addend, of a floating-point type.
            messages: opened messages of any codecs, ``own.size`` elements of ``own.dtype`` or its accumulator's type.
            ranks: divisor of the sum: 1 for a plain sum.
            dtype: dtype of the message: the accumulator's type, or ``own``'s.
            out: a buffer of at least ``bound(own.size, dtype)`` bytes.
            result: array for the values that a receiver of the message decodes: ``own.size`` elements of
                ``own.dtype.storage``; may be ``own``'s memory.
            stream: whether to write ``result`` past the caches where possible.

        Returns:
            The message's bytes.

        Raises:
            WireError: a malformed payload. Nothing has been written to ``out`` or ``result``.
        """
        if self.encoder is not None:
            size: int = native.kernels().sum_encode(
                self.encoder,
                own.data,
                own.dtype,
                list(messages),
                ranks,
                dtype,
                out,
                result,
                own.dtype,
                stream,
            )
            if size:
                return size
        total = steps.summed(own, messages, ranks, dtype)
        size = self.encode_flat(Flat(total, dtype, total.shape, True, False), out)
        if result is not None:
            self.decode_many([out[:size]], [result], own.dtype, stream=stream)
        return size

    def sum_into(
        self,
        own: Flat,
        messages: Sequence[ByteArray],
        ranks: int,
        out: np.ndarray[Any, Any],
        *,
        stream: bool = False,
    ) -> None:
        """Add opened messages to an array as :meth:`sum_encode` does; write the sum to ``out``.

        Args:
            own, messages, ranks: as in :meth:`sum_encode`.
            out: array of ``own.size`` elements of ``own.dtype.storage``; may be ``own``'s memory.
            stream: whether to write past the caches where possible.

        Raises:
            WireError: a malformed payload. Nothing has been written.
        """
        kernels = native.kernels()
        if not kernels.sum_into(own.data, own.dtype, list(messages), ranks, out, own.dtype, stream):
            out[:] = steps.summed(own, messages, ranks, own.dtype)

    def ratio(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> float:
        """Return uncompressed bytes over message bytes for ``n`` elements (a lower bound unless ``fixed_size``)."""
        return n * arrays.as_dtype(dtype).itemsize / self.bound(n, dtype)

    @functools.cached_property
    def spec(self) -> str:
        """Return the spec string that makes this codec: ``int8:block=128``.

        Parameters of :attr:`seldom` appear in it only where they differ from their defaults.
        """
        words = [self.name]
        defaults = parameters(type(self))
        for key, value in self.params.items():
            if key in self.seldom and value == defaults[key].default:
                continue
            text = str(value).lower() if isinstance(value, bool) else str(value)
            words.append(f"{key}=({text})" if ":" in text or "," in text else f"{key}={text}")
        return ":".join(words)

    @functools.cached_property
    def params_hash(self) -> int:
        """Return the CRC-32C of :attr:`spec`: the header's parameter hash."""
        return wire.params_hash(self.spec)

    def _check_mine(self, header: wire.Header) -> None:
        if header.codec != self.wire_id or header.params != self.params_hash:
            raise WireError(
                f"message of codec id {header.codec} with parameter hash {header.params:#010x} is not "
                f"{self.spec!r} (id {self.wire_id}, hash {self.params_hash:#010x})"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (type(self), self.params)  # cached values cannot be copied

    def __repr__(self) -> str:
        args = ", ".join(f"{k}={v!r}" for k, v in self.params.items())
        return f"{type(self).__name__}({args})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Codec) and other.params == self.params

    def __hash__(self) -> int:
        return hash(self.spec)


def _remake(cls: type[Codec], params: dict[str, Any]) -> Codec:
    return cls(**params)


def decode_message(
    cls: type[Codec],
    raw: ByteArray,
    header: wire.Header,
    out: Any,
    *,
    torch_out: bool,
    max_bytes: int | None = None,
) -> Any:
    """Decode an opened message with ``cls`` into ``out``, or into a new array of the message's own dtype."""
    if out is None:
        cls.check_payload(raw, header)
        checks.expansion(header, max_bytes)
        out = arrays.empty_like_dtype(header.count, header.dtype, torch_out=torch_out)
        storage = arrays.flatten(out).data
        cls.decode_flat(raw, header, storage, header.dtype)
        return out
    dst = arrays.flatten(out, writable=True)
    if dst.size != header.count:
        raise ValueError(f"out has {dst.size} elements, the message {header.count}")
    if dst.dtype is not header.dtype and not (dst.dtype.is_float and header.dtype.is_float):
        raise CodecMismatchError(f"a {header.dtype.label} message cannot be decoded into {dst.dtype.label}")
    cls.decode_flat(raw, header, dst.data, dst.dtype)
    return out


def add_message(cls: type[Codec], raw: ByteArray, header: wire.Header, acc: Any) -> None:
    """Add an opened message to an accumulator, checking its dtype and count."""
    dst = arrays.flatten(acc, writable=True)
    if dst.size != header.count:
        raise ValueError(f"acc has {dst.size} elements, the message {header.count}")
    if not header.dtype.is_float or dst.dtype is not header.dtype.accumulator:
        want = header.dtype.accumulator.label
        raise CodecMismatchError(f"a {header.dtype.label} message adds to {want}, not {dst.dtype.label}")
    cls.decode_add_flat(raw, header, dst.data)

"""``lossless``: split elements into planes of bytes, exactly; compress those of low entropy by zstd.

Floats compress because their exponents repeat; their signs and mantissas hardly do. So each word is rotated
left by one bit, which makes its highest byte the exponent (all of it in float32 and bfloat16), and the words
are split into planes of their bytes. A plane goes through zstd (RFC 8878) where a sample of its bytes says
that it will shrink, else it is stored as it is: on Gaussian data that is all but the exponents, and the limit
of what any lossless codec can do is 1.205 times for float32 and 1.52 times for bfloat16.

Exponents of noise follow no order. There zstd's search for repeated strings costs most of the time and makes
the frames larger, so they are Huffman-coded only; a trial on a part of every 16th chunk tells which it is.

Words are of 1, 2, 4 or 8 bytes, complex elements are two words, and only floats (complex ones too) are
rotated. Planes are cut into chunks of 131,072 words.

Payload: a uint32 for each plane of each chunk, chunk by chunk and from the lowest byte to the highest: the
number of its bytes in the lower 24 bits and its kind in the upper 8 (0 the bytes themselves, 1 a zstd frame
that tells its content's size); then the planes in the same order.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.table import register
from hybridcomp.errors import NativeUnavailableError, WireError
from hybridcomp.wire import HEADER_BYTES

CHUNK = 1 << 17  # words
MAX_LEVEL = 22
_HUFFMAN = 0  # in place of a level: no search for repeated strings
TRIAL_CHUNKS = 16  # chunks between two trials
_TRIAL_SHARE, _LEAST_TRIAL = 4, 1 << 12  # a trial takes one in so many bytes of a plane, and so many at least
_WORTH = 0.98  # share of the Huffman-coded size that the search must reach to be used
_RAW, _ZSTD = 0, 1
_NO_MEMORY = "not enough memory"  # in the text of zstd's error, which has no number in Python
_KIND_SHIFT = 24
_SIZE_MASK = (1 << _KIND_SHIFT) - 1
_Plane = ByteArray | bytes

_local = threading.local()  # zstd's contexts serve one thread at a time


@register
class LosslessCodec(Codec):
    """Codec of byte planes and zstd: exact for every dtype.

    Args:
        level: zstd's compression level, from 1 to 22: how hard it searches for repeated strings.
    """

    name = "lossless"
    wire_id = 12
    examples = (
        "lossless",
        "lossless:level=1",
    )
    fixed_size = False
    lossless = True

    def __init__(self, level: int = 3) -> None:
        self._level = checks.integer("level", level, 1, MAX_LEVEL)

    @property
    def level(self) -> int:
        """Return zstd's compression level."""
        return self._level

    @property
    def params(self) -> dict[str, Any]:
        return {"level": self._level}

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        kind = arrays.as_dtype(dtype)
        return HEADER_BYTES + 4 * plane_count(n, kind) + n * kind.itemsize

    def encode_flat(self, src: Flat, out: ByteArray) -> int:
        width = src.dtype.component_bytes
        table = np.empty(plane_count(src.size, src.dtype), "<u4")
        data = arrays.byte_view(src.data)
        scratch = np.empty((width, min(CHUNK, data.size // width)), np.uint8)
        levels: list[int | None] = [None] * width  # level of each plane, since the last trial
        at = HEADER_BYTES + table.nbytes
        for i, start in enumerate(range(0, data.size, CHUNK * width)):
            if i % TRIAL_CHUNKS == 0:
                levels = [None] * width
            chunk = data[start : start + CHUNK * width]
            entries = table[i * width : (i + 1) * width]
            at = self._encode_chunk(chunk, src.dtype, scratch, out, at, entries, levels)
        out[HEADER_BYTES : HEADER_BYTES + table.nbytes] = table.view(np.uint8)
        return wire.seal(
            out, self.wire_id, self.params_hash, dtype=src.dtype, count=src.size, payload=at - HEADER_BYTES
        )

    def _encode_chunk(
        self,
        chunk: ByteArray,
        dtype: DType,
        scratch: ByteArray,
        out: ByteArray,
        at: int,
        entries: npt.NDArray[np.uint32],
        levels: list[int | None],
    ) -> int:
        """Write a chunk's planes to ``out`` from ``at`` on, and their table entries; return where they end."""
        kernels, width, rotate = native.kernels(), dtype.component_bytes, rotates(dtype)
        m = chunk.size // width
        chosen = kernels.planes_compressible(chunk, width, rotate)
        # Planes before the first that is compressed are already where they belong.
        direct = next((k for k in range(width) if chosen >> k & 1), width)
        planes = [out[at + k * m : at + (k + 1) * m] if k < direct else scratch[k, :m] for k in range(width)]
        kernels.planes_split(chunk, width, rotate, planes)
        for k, plane in enumerate(planes):
            kind, stored = _RAW, plane
            if chosen >> k & 1:
                frame = self.frame(plane, levels, k)
                if len(frame) < m:
                    kind, stored = _ZSTD, np.frombuffer(frame, np.uint8)
            if k >= direct:
                out[at : at + stored.size] = stored
            entries[k] = kind << _KIND_SHIFT | stored.size
            at += stored.size
        return at

    def frame(self, plane: ByteArray, levels: list[int | None], k: int) -> bytes:
        """Compress a plane, plane ``k`` of its chunk; ``levels`` holds the level that the trial chose for each.

        Raises:
            MemoryError: there is no memory for zstd's tables.
        """
        level = levels[k]
        if level is None:
            level = levels[k] = self._trial(plane)
        return _compressed(plane, level)

    def _trial(self, plane: ByteArray) -> int:
        """Choose the level for a plane: the codec's if searching for repeated strings helps, else none."""
        part = plane[: max(_LEAST_TRIAL, plane.size // _TRIAL_SHARE)]
        searched, coded = (len(_compressed(part, level)) for level in (self._level, _HUFFMAN))
        return self._level if searched < _WORTH * coded else _HUFFMAN

    @classmethod
    def check_payload(cls, msg: ByteArray, header: wire.Header) -> None:
        _open(msg, header)

    @classmethod
    def decode_flat(
        cls, msg: ByteArray, header: wire.Header, out: np.ndarray[Any, Any], dtype: DType
    ) -> None:
        kernels, width, rotate = native.kernels(), header.dtype.component_bytes, rotates(header.dtype)
        table = _open(msg, header)
        if dtype is header.dtype:
            target = arrays.byte_view(out)
            for i, planes in _chunks(msg, header, table):
                piece = target[i * CHUNK * width : (i + 1) * CHUNK * width]
                kernels.planes_join(planes, width, rotate, piece)
        else:
            for i, planes in _chunks(msg, header, table):
                piece = out[i * CHUNK : (i + 1) * CHUNK]
                kernels.planes_join_as(planes, header.dtype, piece, dtype, False)

    @classmethod
    def decode_add_flat(cls, msg: ByteArray, header: wire.Header, acc: np.ndarray[Any, Any]) -> None:
        checks.floating(header, "added")
        table = _open(msg, header)
        for i, planes in _chunks(msg, header, table):
            piece = acc[i * CHUNK : (i + 1) * CHUNK]
            native.kernels().planes_join_as(planes, header.dtype, piece, header.dtype.accumulator, True)


def rotates(dtype: DType) -> bool:
    """Tell whether words are rotated before they are split."""
    return dtype.is_float or dtype in (DType.COMPLEX64, DType.COMPLEX128)


def plane_count(n: int, dtype: DType) -> int:
    """Return how many planes of chunks ``n`` elements make."""
    width = dtype.component_bytes
    return -(-n * (dtype.itemsize // width) // CHUNK) * width


def _open(msg: ByteArray, header: wire.Header) -> npt.NDArray[np.uint32]:
    """Check a message's table of planes, and the headers of its zstd frames; return the table."""
    check_table_bytes(header)
    table = np.frombuffer(msg, "<u4", plane_count(header.count, header.dtype), HEADER_BYTES)
    kinds, sizes, whole, begins = read_table(table, header)
    for k in np.flatnonzero(kinds).tolist():
        at = HEADER_BYTES + int(begins[k])
        check_frame(msg[at : at + int(sizes[k])], int(whole[k]), k)
    return table


def check_table_bytes(header: wire.Header) -> None:
    """Raise WireError unless the payload has room for its table."""
    planes = plane_count(header.count, header.dtype)
    if 4 * planes > header.payload:
        raise WireError(f"malformed lossless payload: {header.payload} bytes for a table of {planes} planes")


class Table(NamedTuple):
    """The table of a message, with an entry for each plane.

    Attributes:
        kinds: 0 for the bytes themselves, 1 for a zstd frame.
        sizes: bytes of the plane in the message.
        whole: bytes of the plane itself.
        begins: offset of the plane in the payload.
    """

    kinds: npt.NDArray[Any]
    sizes: npt.NDArray[Any]
    whole: npt.NDArray[np.uint32]
    begins: npt.NDArray[np.int64]


def read_table(table: npt.NDArray[np.uint32], header: wire.Header) -> Table:
    """Check a message's table.

    Raises:
        WireError: an impossible kind or size, or sizes that do not add up to the payload.
    """
    planes, nbytes = table.size, header.count * header.dtype.itemsize
    kinds, sizes = table >> _KIND_SHIFT, table & _SIZE_MASK
    whole = np.full(planes, CHUNK, np.uint32)
    width = header.dtype.component_bytes
    whole[planes - width :] = nbytes // width - max(planes // width - 1, 0) * CHUNK
    good = np.where(kinds == _RAW, sizes == whole, (kinds == _ZSTD) & (sizes < whole))
    if not good.all():
        first = int(np.argmin(good))
        raise WireError(
            f"malformed lossless payload: plane {first} is of kind {kinds[first]} and {sizes[first]} bytes "
            f"for {whole[first]}"
        )
    if 4 * planes + int(sizes.sum(dtype=np.uint64)) != header.payload:
        raise WireError(f"malformed lossless payload: {header.payload} bytes are not its planes' sum")
    begins = 4 * planes + np.cumsum(sizes, dtype=np.int64) - sizes
    return Table(kinds, sizes, whole, begins)


def check_frame(frame: ByteArray, size: int, k: int) -> Any:
    """Check the header of a frame, of at least its first 18 bytes; return zstandard's FrameParameters.

    Raises:
        WireError: it is no zstd frame, or one of another content than ``size`` bytes, those of plane ``k``.
    """
    zstd = _zstandard()
    try:
        told = zstd.get_frame_parameters(frame)
    except zstd.ZstdError as error:
        raise WireError(f"malformed lossless payload: plane {k}: {error}") from None
    if told.content_size != size:
        raise WireError(f"malformed lossless payload: plane {k} has {told.content_size} bytes, not {size}")
    return told


def _chunks(
    msg: ByteArray, header: wire.Header, table: npt.NDArray[np.uint32]
) -> Iterator[tuple[int, list[_Plane]]]:
    """Yield the planes of each chunk of a checked message, decompressed."""
    width = header.dtype.component_bytes
    words = header.count * (header.dtype.itemsize // width)
    at = HEADER_BYTES + table.nbytes
    for i, start in enumerate(range(0, words, CHUNK)):
        planes: list[_Plane] = []
        for entry in table[i * width : (i + 1) * width].tolist():
            end = at + (entry & _SIZE_MASK)
            stored = msg[at:end]
            planes.append(decompressed(stored, min(CHUNK, words - start)) if entry >> _KIND_SHIFT else stored)
            at = end
        yield i, planes


def decompressed(frame: ByteArray, size: int) -> bytes:
    """Decompress the ``size`` bytes of a zstd frame that claims as many.

    Raises:
        WireError: the frame is damaged, or holds another number of bytes.
        MemoryError: there is no memory for zstd's tables.
    """
    try:
        data: bytes = _decompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except _zstandard().ZstdError as error:
        if _NO_MEMORY in str(error):
            raise MemoryError(f"lossless: {error}") from None
        raise WireError(f"malformed lossless payload: {error}") from None
    if len(data) != size:
        raise WireError(f"malformed lossless payload: a plane of {len(data)} bytes, not {size}")
    return data


@functools.cache
def _zstandard() -> Any:
    """Load the zstandard library, on first use.

    It is Python's: no package that pip finds has libzstd with its headers, for the kernels to call.

    Raises:
        NativeUnavailableError: the library is not installed.
    """
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise NativeUnavailableError(
            f"codec 'lossless' needs the zstandard library ({error}); pip install zstandard"
        ) from error


def _compressed(plane: ByteArray, level: int) -> bytes:
    """Compress a plane by a level; raise MemoryError where there is no memory for zstd's tables."""
    compressor = _compressor(level)
    try:
        frame: bytes = compressor.compress(plane)
    except _zstandard().ZstdError as error:
        raise MemoryError(f"lossless: {error}") from None  # zstd takes any bytes
    return frame


def _compressor(level: int) -> Any:
    """Return this thread's context for a level, or for Huffman codes alone."""
    known: dict[int, Any] = _local.__dict__.setdefault("compressors", {})
    if level not in known:
        zstd = _zstandard()
        if level == _HUFFMAN:  # a table of 64 places finds next to nothing but runs
            parameters = zstd.ZstdCompressionParameters(
                strategy=zstd.STRATEGY_FAST,
                window_log=17,
                hash_log=6,
                chain_log=6,
                search_log=1,
                min_match=7,
                target_length=0,
                write_content_size=True,
            )
        else:
            parameters = zstd.ZstdCompressionParameters.from_level(
                level, source_size=CHUNK, write_content_size=True
            )
        known[level] = zstd.ZstdCompressor(compression_params=parameters)
    return known[level]


def _decompressor() -> Any:
    """Return this thread's context for decompression."""
    if not hasattr(_local, "decompressor"):
        _local.decompressor = _zstandard().ZstdDecompressor()
    return _local.decompressor

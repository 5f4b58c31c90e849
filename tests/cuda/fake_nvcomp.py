"""Stand-in for what :mod:`hybridcomp.nvcomp` uses of nvCOMP, on the emulation's memory, by the host's zstd.

Its frames are other bytes than the codec's own: another level, and one block of each frame after the other.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import zstandard

from tests.emulation.runtime import emulated


class BitstreamKind(enum.Enum):
    NVCOMP_NATIVE = 0
    RAW = 1


class Array:
    """Bytes of the emulated device."""

    def __init__(self, ptr: int, size: int, owner: object) -> None:
        self.buffer_size, self.owner = size, owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (ptr, False),
            "version": 3,
        }

    @property
    def bytes(self) -> bytes:
        return emulated().emulator.view(self.__cuda_array_interface__["data"][0], self.buffer_size).tobytes()


class Nvcomp:
    """Stand-in for the module. ``broken`` makes it go wrong in one of the ways that callers must bear."""

    BitstreamKind = BitstreamKind

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.calls: list[str] = []
        self.codecs: list[dict[str, Any]] = []

    def as_arrays(self, sources: list[Any], cuda_stream: int = 0) -> list[Array]:
        assert cuda_stream
        arrays = []
        for source in sources:
            told = source.__cuda_array_interface__
            assert told["stream"] == cuda_stream
            assert told["data"][0] % 16 == 0
            arrays.append(Array(told["data"][0], told["shape"][0], source))
        return arrays

    def Codec(self, **options: Any) -> Codec:
        self.codecs.append(options)
        return Codec(self, options)


class Codec:
    def __init__(self, library: Nvcomp, options: dict[str, Any]) -> None:
        assert options["algorithm"] == "Zstd"
        assert options["bitstream_kind"] is BitstreamKind.RAW
        self.library = library
        self.stream = 0 if options["cuda_stream"] == 1 else options["cuda_stream"]

    def encode(self, arrays: list[Array]) -> list[Array]:
        self.library.calls.append("encode")
        told = self.library.broken != "no size"
        compressor = zstandard.ZstdCompressor(level=1, write_content_size=told)
        return [self._put(compressor.compress(data)) for data in self._data(arrays)]

    def decode(self, arrays: list[Array]) -> list[Array]:
        self.library.calls.append("decode")
        if self.library.broken == "raises":
            raise RuntimeError("nvCOMP: cannot decompress")
        cut = 1 if self.library.broken == "short" else 0
        decompressor = zstandard.ZstdDecompressor()
        results = []
        for data in self._data(arrays):
            try:
                content = decompressor.decompress(data)
            except zstandard.ZstdError as error:
                raise RuntimeError(str(error)) from None
            results.append(self._put(content[: len(content) - cut]))
        return results

    def _data(self, arrays: list[Array]) -> list[bytes]:
        emulated().synchronize(self.stream)
        return [array.bytes for array in arrays]

    def _put(self, data: bytes) -> Array:
        ptr, owner = emulated().allocate(max(len(data), 1), self.stream)
        emulated().emulator.view(ptr, max(len(data), 1))[: len(data)] = np.frombuffer(data, np.uint8)
        return Array(ptr, len(data), owner)

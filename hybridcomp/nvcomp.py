"""Write zstd frames on a GPU by NVIDIA's nvCOMP, which any zstd reads, and read planes back from most of zstd's own.

nvCOMP is a package of its own (``nvidia-nvcomp-cu12`` or ``-cu13``), loaded when it is first needed. Its limits that
matter here: a frame that it writes has at most 16 MiB of content; frames that it reads must name no dictionary, and
checksums in them are ignored (:func:`reads`).

nvCOMP 6 promises nothing for frames that are not valid: one in a message whose CRC was forged over it may make the GPU
read or write where it must not. So frames are decompressed by the host's zstd, which checks all it reads, unless
``HYBRIDCOMP_NVCOMP=trust`` says that all senders are to be trusted. ``HYBRIDCOMP_NVCOMP=off`` leaves nvCOMP alone.
"""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any

from hybridcomp import variables
from hybridcomp.cuda import CupyRuntime
from hybridcomp.device import DeviceArray, Queue, Runtime
from hybridcomp.errors import CudaUnavailableError

ALIGNMENT = 16  # bytes to which everything that nvCOMP reads is aligned
MAX_CONTENT = 16 << 20  # bytes of one frame
_CHUNK = 1 << 17  # bytes of the longest plane of `lossless`; nvCOMP's own formats would be cut by it
_MAX_WINDOW = 8 << 20  # bytes of window that RFC 8878 asks of every decoder

_local = threading.local()  # nvCOMP's codecs, each of which serves one thread at a time


@functools.cache
def library() -> Any:
    """Load nvCOMP's Python module.

    Raises:
        CudaUnavailableError: nvCOMP is not installed, or does not load.
    """
    try:
        return importlib.import_module("nvidia.nvcomp")
    except (ImportError, OSError) as error:
        raise CudaUnavailableError(
            f"nvCOMP is not installed ({error}); pip install nvidia-nvcomp-cu12 or nvidia-nvcomp-cu13"
        ) from error


def compresses(runtime: Runtime) -> bool:
    """Tell whether nvCOMP is there, and is to compress messages on a device."""
    return variables.NVCOMP.read() != "off" and serves(runtime)


def decompresses(runtime: Runtime) -> bool:
    """Tell whether nvCOMP is there, and is to decompress messages on a device."""
    return variables.NVCOMP.read() == "trust" and serves(runtime)


def serves(runtime: Runtime) -> bool:
    """Tell whether nvCOMP is installed, and a device is a CUDA one."""
    if not isinstance(runtime, CupyRuntime):
        return False
    try:
        library()
    except CudaUnavailableError:
        return False
    return True


def reads(parameters: Any) -> bool:
    """Tell whether :func:`decompress` can read a frame of such parameters (zstandard's ``FrameParameters``)."""
    return (
        not parameters.dict_id
        and not parameters.has_checksum
        and parameters.window_size <= _MAX_WINDOW
        and parameters.content_size <= MAX_CONTENT
    )


def compress(queue: Queue, contents: list[DeviceArray]) -> list[DeviceArray]:
    """Compress each array of bytes to a zstd frame; waits for the device, to learn their sizes."""
    return _run(queue, "encode", contents)


def decompress(queue: Queue, frames: list[DeviceArray]) -> list[DeviceArray]:
    """Decompress zstd frames that :func:`reads`; waits for the device."""
    return _run(queue, "decode", frames)


class _Exported:
    """Bytes of a device in the form in which libraries exchange them."""

    def __init__(self, array: DeviceArray, stream: int) -> None:
        if array.ptr % ALIGNMENT:
            raise ValueError(f"nvCOMP needs addresses divisible by {ALIGNMENT}, not {array.ptr:#x}")
        self.owner = array
        self.__cuda_array_interface__ = {
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "data": (array.ptr, False),
            "strides": None,
            "version": 3,
            "stream": stream,
        }


def _run(queue: Queue, method: str, arrays: list[DeviceArray]) -> list[DeviceArray]:
    if not arrays:
        return []
    queue.start()
    stream = queue.stream or 1  # the default stream, by CUDA's name for it
    sources = library().as_arrays([_Exported(array, stream) for array in arrays], cuda_stream=stream)
    results = getattr(_codec(queue.runtime.ordinal, stream), method)(sources)
    found = []
    for i in range(len(arrays)):
        result = results[i]
        ptr = int(result.__cuda_array_interface__["data"][0])
        owner = (results, result, sources)  # a result is a view into all of them
        found.append(DeviceArray(queue.runtime, ptr, int(result.buffer_size), "uint8", owner))
    return found


def _codec(ordinal: int, stream: int) -> Any:
    """Return this thread's codec for a stream of a device: bare zstd frames, one for each array."""
    known: dict[tuple[int, int], Any] = _local.__dict__.setdefault("codecs", {})
    if (ordinal, stream) not in known:
        nvcomp = library()
        known[ordinal, stream] = nvcomp.Codec(
            algorithm="Zstd",
            device_id=ordinal,
            cuda_stream=stream,
            uncomp_chunk_size=_CHUNK,
            bitstream_kind=nvcomp.BitstreamKind.RAW,
        )
    return known[ordinal, stream]

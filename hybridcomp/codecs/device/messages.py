"""Encode, open and check whole messages in device memory: header, CRC, and the payload of a codec's driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridcomp import arrays, native, wire
from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.device.driver import HOLDERS, driver_of, suffix
from hybridcomp.codecs.table import codec_for
from hybridcomp.device import ALIGNMENT, DeviceArray, Queue, Runtime
from hybridcomp.errors import CodecMismatchError, WireError
from hybridcomp.wire import HEADER_BYTES, Header

HEAD_BYTES = 160  # first bytes of a message, which the host sees; kHeadBytes of message.cu
PAYLOAD_HEAD = HEAD_BYTES - HEADER_BYTES
OPENED_BYTES = 8 + 2 * HEAD_BYTES
_THREADS = 256
_ROW = 4096  # bytes that a block of the CRC's kernel reads at a time
_DAMAGED = 1  # kOpenedDamaged of message.cu; wire.peek sees a length that does not fit


@dataclass(slots=True)
class Encoded:
    """A message being written.

    Attributes:
        buffer: memory of the message; may be longer than it.
        size: the message's bytes, if the host knows them.
        total: otherwise one uint64 on the device that will hold the message's bytes.
    """

    buffer: DeviceArray
    size: int | None
    total: DeviceArray | None

    def nbytes(self, queue: Queue) -> int:
        """Return the message's bytes; waits for the device unless the host knew them."""
        if self.size is None:
            assert self.total is not None
            self.size = int(queue.read(self.total)[0])
        return self.size


# -- encode ----------------------------------------------------------------------------------------------------


def encode_into(codec: Codec, src: Flat, out: DeviceArray, queue: Queue) -> Encoded:
    """Start to encode a device array.

    Args:
        codec: codec that can carry ``src``.
        src: array in ``queue.runtime``'s memory.
        out: buffer of at least ``codec.bound(src.size, src.dtype)`` bytes.
        queue: queue to launch on; nothing waits for it.
    """
    data = aligned(queue, src.data, src.dtype.component_bytes)
    room = codec.bound(src.size, src.dtype)
    direct = out.ptr % ALIGNMENT == 0
    buffer = out[:room] if direct else queue.empty(room)
    driver = driver_of(codec.wire_id)
    size = driver.encode_shaped(codec, data, src.dtype, src.shape, buffer[HEADER_BYTES:], queue)
    encoded = seal(buffer, codec.wire_id, codec.params_hash, src.dtype, src.size, size, queue)
    if not direct:
        queue.copy(out, buffer)
        encoded.buffer = out[:room]
    return encoded


def seal(
    buffer: DeviceArray,
    wire_id: int,
    params: int,
    dtype: DType,
    count: int,
    payload: int | DeviceArray,
    queue: Queue,
) -> Encoded:
    """Write the header of a payload of ``payload`` bytes, which lies at ``buffer[32:]``."""
    known = isinstance(payload, int)
    total = None if known else queue.array(1, np.uint64)
    size = payload if isinstance(payload, int) else buffer.size - HEADER_BYTES
    queue.launch(
        "message",
        "message_seal",
        _grid(queue, size),
        _THREADS,
        buffer,
        wire_id,
        int(dtype),
        count,
        size,
        None if known else payload,
        params,
        queue.counters(),
        total,
    )
    return Encoded(buffer, HEADER_BYTES + size if known else None, total)


def encode_array(codec: Codec, src: Flat, x: Any, out: Any) -> Any:
    """Encode a device array as :meth:`Codec.encode` does; waits for the device only to learn a message's length."""
    runtime: Runtime = src.data.runtime
    queue = Queue(runtime, runtime.current_stream(x))
    out, room = output_for(codec.bound(src.size, src.dtype), x, out, queue)
    return out[: encode_into(codec, src, room, queue).nbytes(queue)]


def output_for(need: int, x: Any, out: Any, queue: Queue) -> tuple[Any, DeviceArray]:
    """Return ``out``, or a new buffer of the library of ``x``, for a message of ``need`` bytes; and its memory."""
    if out is None:
        out = queue.runtime.new_array(need, DType.UINT8, x)
    flat = arrays.flatten(out, writable=True, device=True)
    if flat.dtype is not DType.UINT8 or flat.size < need or not isinstance(flat.data, DeviceArray):
        raise ValueError(
            f"out must be uint8 of at least {need} bytes on the device, not {flat.dtype.label}[{flat.size}]"
        )
    return out, flat.data


# -- decode ----------------------------------------------------------------------------------------------------


def open_message(queue: Queue, msg: DeviceArray, opened: DeviceArray | None = None) -> DeviceArray:
    """Start to check a message's CRC; nothing waits.

    Damage sets ``queue.status``, so that decoders started after this do nothing. Returns what :func:`read_opened`
    reads: ``opened``, of :data:`OPENED_BYTES`, or new memory.
    """
    if opened is None:
        opened = queue.empty(OPENED_BYTES)
    queue.launch(
        "message",
        "message_open",
        _grid(queue, msg.size),
        _THREADS,
        msg,
        msg.size,
        queue.counters(),
        opened,
        queue.status,
    )
    return opened


def read_opened(queue: Queue, msg: DeviceArray, opened: DeviceArray) -> tuple[Header, bytes]:
    """Return the header of an opened message, and the part of its payload that :meth:`Driver.check` reads.

    Waits for the device.

    Raises:
        WireError: as :func:`hybridcomp.wire.open_message`.
    """
    return parse_opened(queue.read(opened), msg.size)


def parse_opened(raw: ByteArray, size: int) -> tuple[Header, bytes]:
    """Parse for :func:`read_opened` what :func:`open_message` wrote for a message in a buffer of ``size`` bytes."""
    status, crc = raw[:8].view(np.uint32)
    head = raw[8 : 8 + min(HEAD_BYTES, size)]
    header = wire.peek(head, size)
    if status == _DAMAGED:
        stored = head[28:32].view(np.uint32)[0]
        raise WireError(f"damaged message: CRC-32C is {crc:#010x}, the header says {stored:#010x}")
    inner = raw[8 + HEAD_BYTES : OPENED_BYTES] if header.codec in HOLDERS else raw[:0]
    return header, head[HEADER_BYTES : HEADER_BYTES + header.payload].tobytes() + inner.tobytes()


def head_of(header: Header, msg: ByteArray) -> bytes:
    """Return the part that :meth:`Driver.check` reads of the payload of a message in host memory."""
    payload = msg[HEADER_BYTES : HEADER_BYTES + header.payload]
    head = payload[:PAYLOAD_HEAD].tobytes()
    if header.codec not in HOLDERS:
        return head
    at = header.payload  # inner_at of message.cu
    if header.payload >= 16:
        at = min(at, 16 + int.from_bytes(head[8:16], "little"))
    return head + payload[at : at + HEAD_BYTES].tobytes().ljust(HEAD_BYTES, b"\0")


def decode_opened(
    header: Header,
    head: bytes,
    msg: DeviceArray,
    out: DeviceArray,
    dtype: DType,
    queue: Queue,
    *,
    add: bool = False,
) -> None:
    """Start to decode a message whose header the host has seen, to ``header.count`` elements of ``dtype``.

    Raises:
        WireError: a fault in the header or the payload's first bytes. Faults that only the device sees set
            ``queue.status``, which :func:`check_status` reads.
    """
    driver = driver_of(header.codec)
    driver.check(header, head)
    payload = msg[HEADER_BYTES : HEADER_BYTES + header.payload]
    target = out if out.ptr % dtype.component_bytes == 0 else queue.array(out.size, out.dtype)
    if add and target is not out:
        queue.copy(target, out)
    driver.decode(header, head, payload, target, dtype, add, queue)
    if target is not out:
        queue.copy(out, target)


def check_status(queue: Queue, what: str) -> None:
    """Raise WireError if a kernel of this queue found something wrong. Waits for the device."""
    code = int(queue.read(queue.status)[0])
    if code:
        raise WireError(f"malformed {what} payload: {native.kernels().status_text(code)}")


def decode_array(msg: Any, out: Any, mine: Any = None, *, max_bytes: int | None = None) -> Any:
    """Decode a message in device memory as :func:`hybridcomp.decode` does; waits for the device to read the header."""
    queue, raw, header, head = _open(msg, mine)
    if out is None:
        driver_of(header.codec).check(header, head)  # before memory is allocated for its count
        checks.expansion(header, max_bytes)
        out = queue.runtime.new_array(header.count, header.dtype, msg)
    dst = _target(out, header, "out")
    if dst.dtype is not header.dtype and not (dst.dtype.is_float and header.dtype.is_float):
        raise CodecMismatchError(f"a {header.dtype.label} message cannot be decoded into {dst.dtype.label}")
    decode_opened(header, head, raw, dst.data, dst.dtype, queue)
    if driver_of(header.codec).finds_faults():
        check_status(queue, f"codec {header.codec}")
    return out


def add_array(msg: Any, acc: Any, mine: Any = None) -> None:
    """Add a message in device memory as :func:`hybridcomp.decode_add` does; waits for the device to read the header."""
    queue, raw, header, head = _open(msg, mine)
    dst = _target(acc, header, "acc")
    if not header.dtype.is_float or dst.dtype is not header.dtype.accumulator:
        want = header.dtype.accumulator.label
        raise CodecMismatchError(f"a {header.dtype.label} message adds to {want}, not {dst.dtype.label}")
    decode_opened(header, head, raw, dst.data, dst.dtype, queue, add=True)
    if driver_of(header.codec).finds_faults():
        check_status(queue, f"codec {header.codec}")


def _open(msg: Any, mine: Any) -> tuple[Queue, DeviceArray, Header, bytes]:
    flat = arrays.flatten(msg, device=True)
    if flat.dtype is not DType.UINT8:
        raise WireError(f"a message is uint8, not {flat.dtype.label}")
    runtime: Runtime = flat.data.runtime
    queue = Queue(runtime, runtime.current_stream(msg))
    raw = aligned(queue, flat.data, ALIGNMENT)
    header, head = read_opened(queue, raw, open_message(queue, raw))
    codec_for(header)  # raises WireError for an unknown codec
    if mine is not None:
        mine(header)
    return queue, raw, header, head


def _target(out: Any, header: Header, name: str) -> Flat:
    dst = arrays.flatten(out, writable=True, device=True)
    if not isinstance(dst.data, DeviceArray):
        raise CodecMismatchError(f"the message is on a device, and {name} is not")
    if dst.size != header.count:
        raise ValueError(f"{name} has {dst.size} elements, the message {header.count}")
    return dst


# -- what both use ---------------------------------------------------------------------------------------------


def convert(
    queue: Queue,
    src: DeviceArray,
    src_dtype: DType,
    out: DeviceArray,
    out_dtype: DType,
    n: int,
    *,
    add: bool = False,
) -> None:
    """Write ``n`` elements as another type, rounded once to nearest even, or add them to float32 or float64."""
    if src_dtype is out_dtype and not add:
        copy_bytes(queue, src, out, n * src_dtype.itemsize)
        return
    name = f"convert_{suffix(src_dtype)}_{suffix(out_dtype)}{'_add' if add else ''}"
    queue.launch("convert", name, queue.blocks(n, _THREADS * 4), _THREADS, src, out, n, queue.status)


def copy_bytes(queue: Queue, src: DeviceArray, out: DeviceArray, nbytes: int) -> None:
    """Start to copy bytes by a kernel: unlike :meth:`Queue.copy`, it may be one launch with others."""
    blocks = queue.blocks(nbytes, _THREADS * 16)
    queue.launch("convert", "copy_bytes", blocks, _THREADS, src, out, nbytes, queue.status)


def divide(queue: Queue, values: DeviceArray, dtype: DType, ranks: int) -> None:
    """Divide float32 or float64 in place: a sum over ``ranks`` becomes their mean."""
    if ranks == 1:
        return
    bits = np.array([ranks], dtype.storage).view(np.uint64 if dtype is DType.FLOAT64 else np.uint32)
    blocks = queue.blocks(values.size, _THREADS * 4)
    queue.launch("sums", f"divide_{suffix(dtype)}", blocks, _THREADS, values, values.size, int(bits[0]))


def aligned(queue: Queue, data: DeviceArray, alignment: int) -> DeviceArray:
    """Return ``data``, or a copy of it at an address that kernels take."""
    if data.ptr % alignment == 0:
        return data
    copy = queue.empty(data.nbytes).view(data.dtype)
    queue.copy(copy, data)
    return copy


def _grid(queue: Queue, nbytes: int) -> int:
    return max(1, queue.blocks(nbytes, _ROW * 4, 4))

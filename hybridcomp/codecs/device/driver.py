"""The interface of a codec's encoder and decoder on a device."""

from __future__ import annotations

import abc
import functools
import importlib
from collections.abc import Sequence

from hybridcomp.arrays import DType
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.kernel_codec import check_head
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.errors import CudaUnavailableError
from hybridcomp.wire import Header

_SUFFIXES = {DType.FLOAT32: "f32", DType.FLOAT64: "f64", DType.FLOAT16: "f16", DType.BFLOAT16: "bf16"}

# The driver of each wire id: module of this package and class.
_DRIVERS = {
    0: ("convert", "NoneDriver"),
    1: ("convert", "Float16Driver"),
    2: ("convert", "BFloat16Driver"),
    10: ("bound", "ZfpDriver"),
    11: ("bound", "BoundedDriver"),
    12: ("lossless", "LosslessDriver"),
    13: ("mpc", "MPCDriver"),
    14: ("exponent", "ExponentDriver"),
    6: ("sign", "SignDriver"),
    7: ("minifloat", "Float8Driver"),
    8: ("minifloat", "MXFP8Driver"),
    9: ("minifloat", "MXFP4Driver"),
    3: ("block", "Int8Driver"),
    4: ("block", "Int4Driver"),
    5: ("block", "Int2Driver"),
    19: ("linear.randomblock", "RandomBlockDriver"),
    32: ("linear.powersgd", "PowerSGDDriver"),
    33: ("linear.lattice", "LatticeDriver"),
    34: ("linear.sketch", "SketchDriver"),
    16: ("sparse", "TopKDriver"),
    17: ("sparse", "ThresholdDriver"),
    18: ("sparse", "SIDCoDriver"),
}

# The modules of kernels that messages and sums need, whatever the codec is.
MODULES = ("message", "convert", "sums")

# Codecs whose payload holds another message at a place that it says itself (inner_at of message.cu).
HOLDERS = frozenset({16, 17, 18})


class Driver(abc.ABC):
    """The driver of one codec on a device: it launches the codec's kernels.

    Drivers are stateless. Payloads begin at an address divisible by 16; arrays of elements at a multiple of their size.
    Nothing here waits for the device, except where a method says so.
    """

    @abc.abstractmethod
    def modules(self) -> tuple[str, ...]:
        """Return the modules of kernels that it launches."""

    @abc.abstractmethod
    def encode(
        self, codec: Codec, src: DeviceArray, dtype: DType, payload: DeviceArray, queue: Queue
    ) -> int | DeviceArray:
        """Write the payload of ``src``, which has ``src.size`` elements of ``dtype``.

        Args:
            codec: codec with its parameters.
            src: the elements, in ``dtype.storage``.
            dtype: dtype of the elements.
            payload: buffer for ``codec.bound`` bytes less the header.
            queue: queue to launch on.

        Returns:
            Bytes of the payload; or, where only the device knows them, one uint64 of its memory.
        """

    def encode_shaped(
        self,
        codec: Codec,
        src: DeviceArray,
        dtype: DType,
        shape: tuple[int, ...],
        payload: DeviceArray,
        queue: Queue,
    ) -> int | DeviceArray:
        """Encode as :meth:`encode` does, for codecs to which the caller's shape matters."""
        return self.encode(codec, src, dtype, payload, queue)

    def check(self, header: Header, head: bytes) -> None:
        """Raise WireError unless the payload's length and prefix fit the header's count: as on the host.

        Args:
            header: header of the message; its CRC is checked on the device, in the order of the queue.
            head: the first 128 bytes of the payload, or all of them if they are fewer; then, for the codecs of
                :data:`HOLDERS`, the first 160 bytes of the message inside, with zeros after its end.
        """
        check_head(header, head)

    @abc.abstractmethod
    def decode(
        self,
        header: Header,
        head: bytes,
        payload: DeviceArray,
        out: DeviceArray,
        dtype: DType,
        add: bool,
        queue: Queue,
    ) -> None:
        """Write a checked message's values to ``out``, ``header.count`` elements of ``dtype``, or add them.

        Kernels do nothing if ``queue.status`` is set, and set it when they find something wrong. They read and write
        nothing outside ``payload`` and ``out`` whatever the bytes are.
        """

    def decode_sum(
        self,
        headers: Sequence[Header],
        heads: Sequence[bytes],
        payloads: Sequence[DeviceArray],
        acc: DeviceArray,
        dtype: DType,
        queue: Queue,
    ) -> None:
        """Add the values of checked messages, all of this driver's codec, to ``acc`` in their order.

        Gives the same bits as :meth:`decode` with ``add`` for one after the other, in fewer passes where there are
        kernels for it.

        Args:
            headers: headers of the messages; all have ``acc.size`` elements.
            heads: the first bytes of their payloads.
            payloads: payloads of the messages.
            acc: array to add to, float32 or float64 as ``dtype``.
            dtype: the accumulator of the messages' own types.
            queue: queue to launch on.
        """
        for header, head, payload in zip(headers, heads, payloads, strict=True):
            self.decode(header, head, payload, acc, dtype, True, queue)

    def head(self, codec: Codec) -> bytes | None:
        """Return what :meth:`decode` looks at of the beginning of a payload that this device writes by ``codec``.

        None if it must be read from the device.
        """
        return None

    def reads_lengths(self, codec: Codec) -> bool:
        """Tell whether kernels read the length of a payload that this device has written by ``codec``.

        A header that goes with its :meth:`head` may then say more bytes than there are.
        """
        return False

    def fills_bound(self, codec: Codec) -> bool:
        """Tell whether messages are hardly shorter than ``codec.bound``, so that as much may be copied at once."""
        return codec.fixed_size

    def on_host(self, head: bytes) -> bool:
        """Tell whether a payload with this beginning has no kernels for its form, and is decoded in host memory."""
        return False

    def finds_faults(self) -> bool:
        """Tell whether kernels of :meth:`decode` may set the queue's status: the host then looks at it."""
        return False


def suffix(dtype: DType) -> str:
    """Return the name that kernels give a dtype: ``f32``."""
    return _SUFFIXES[dtype]


@functools.cache
def driver_of(wire_id: int) -> Driver:
    """Return the driver of a codec.

    Raises:
        CudaUnavailableError: the codec has no driver.
    """
    if wire_id not in _DRIVERS:
        raise CudaUnavailableError(f"the codec of wire id {wire_id} takes no device arrays")
    module, name = _DRIVERS[wire_id]
    driver: Driver = getattr(importlib.import_module(f"hybridcomp.codecs.device.{module}"), name)()
    return driver


def has_driver(codec: Codec | type[Codec]) -> bool:
    """Tell whether a codec runs on devices; one that does not is carried through host memory."""
    inner = getattr(codec, "values", None)
    if isinstance(codec, Codec) and not (
        codec.on_device and (not isinstance(inner, Codec) or has_driver(inner))
    ):
        return False
    try:
        driver_of(codec.wire_id)
    except CudaUnavailableError:
        return False
    return True


def modules_of(codec: Codec | type[Codec]) -> tuple[str, ...]:
    """Return the modules of kernels that a codec launches, and the codec of its values, if it has one."""
    inner = getattr(codec, "values", None)
    return (*driver_of(codec.wire_id).modules(), *(modules_of(inner) if isinstance(inner, Codec) else ()))

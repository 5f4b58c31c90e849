"""Add several messages in one pass over their accumulator (:file:`kernels/cuda/common/chunks.cuh`)."""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.arrays import DType
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.wire import Header

_PREFIX_BYTES = 8
_PEERS = 8  # kMostPeers
_THREADS = 256
_ELEMENTS = 256  # elements of a warp at a time: kSumChunk
_WAVES = 16  # more blocks than fit at once: those that end early make room for others


def alike(headers: Sequence[Header], heads: Sequence[bytes], dtype: DType) -> bool:
    """Tell whether messages have one layout, and add to ``dtype``: their prefixes of block and format are the same."""
    return (
        len({head[:_PREFIX_BYTES] for head in heads}) == 1
        and len({header.count for header in headers}) == 1
        and all(header.dtype.accumulator is dtype for header in headers)
    )


def add_all(
    queue: Queue,
    module: str,
    kernel: str,
    form: tuple[int, ...],
    payloads: Sequence[DeviceArray],
    acc: DeviceArray,
) -> None:
    """Add the values of messages that are :func:`alike` to ``acc``, one after the other.

    Args:
        queue: queue to launch on.
        module, kernel: kernel of sums.
        form: what it has to know of the messages' layout.
        payloads: payloads of the messages.
        acc: array to add to.
    """
    blocks = queue.blocks(-(-acc.size // _ELEMENTS), _THREADS // 32, _WAVES)
    for at in range(0, len(payloads), _PEERS):
        some = payloads[at : at + _PEERS]
        messages = [*some, *[None] * (_PEERS - len(some))]
        queue.launch(
            module, kernel, blocks, _THREADS, acc, acc.size, *form, len(some), queue.status, *messages
        )

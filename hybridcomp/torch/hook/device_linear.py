"""Average a gradient in a device's memory by a linear codec: see :mod:`~hybridcomp.torch.hook.linear`.

The codec's kernels leave the rounds in pinned host memory, where they are summed as everything of the host.
"""

from __future__ import annotations

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import LinearCodec
from hybridcomp.codecs.device import DeviceMemory
from hybridcomp.codecs.device.messages import convert
from hybridcomp.codecs.linear.base import Array, Reduced
from hybridcomp.device import DeviceArray
from hybridcomp.torch.hook.device_staging import DeviceStaging
from hybridcomp.torch.hook.linear import Rounds
from hybridcomp.torch.hook.links import Link
from hybridcomp.torch.hook.plan import Piece


class DeviceLinear(Rounds):
    """The reduction of one parameter's gradient in a device's memory."""

    def __init__(
        self,
        piece: Piece,
        values: DeviceArray,
        dtype: DType,
        memory: DeviceMemory | None,
        factors: dict[str, Array],
        step: int,
        link: Link,
        staging: DeviceStaging,
    ) -> None:
        """Prepare to average a gradient.

        Args:
            piece: whose codec is linear.
            values: of ``dtype``'s storage, replaced by the result.
            dtype: of the gradient.
            memory: of the form ``ef`` and the same size; None for no feedback.
            factors: what the codec keeps between steps, by parameter name; updated.
            step: of training.
            link: to the other ranks.
            staging: of the batch.
        """
        codec = piece.choice.codec
        assert isinstance(codec, LinearCodec)
        self._values, self._dtype, self._memory, self._staging = values, dtype, memory, staging
        given = Flat(values, dtype, piece.shape, True, False)
        if memory is not None:
            corrected = memory.correct(given, staging.queue, slice(0, piece.size))
            given = Flat(corrected, memory.kind, piece.shape, True, False)
        self._given: DeviceArray = given.data
        reduction = codec.reduction(
            given,
            ranks=link.size,
            rank=link.rank,
            mean=True,
            own=memory is not None,
            step=step,
            warm=factors,
            name=piece.name,
            queue=staging.queue,
        )
        super().__init__(reduction, link.rank, link.size, staging.wait_for)

    def _end(self, result: Reduced) -> None:
        queue, n = self._staging.queue, self._values.size
        if self._memory is not None and result.own is not None:
            self._memory.keep(self._given, result.own, queue, slice(0, n))
        convert(queue, result.total, self._dtype.accumulator, self._values, self._dtype, n)
        self._staging.busy = True

"""The form of error feedback that keeps an estimate of the data: ``ef21``.

Richtarik, Sokolov and Fatkhullin, arXiv:2106.05203. Sender and receiver hold the same estimate g of x, and messages
bring it nearer; C is encode and decode. ::

    send C(x - g);  g = g + C(x - g)

A message stands for the new g, so a receiver keeps the sum of all senders' g: :meth:`EstimateMemory.add`.

In a reduction the owner of a shard keeps the sum of the other ranks' g, adds its own x as it is, and does with the
sum as the others did with x, so that all ranks hold the same estimate of the result (as in arXiv:2110.03294).
"""

from __future__ import annotations

from typing import Any

from hybridcomp import native
from hybridcomp.arrays import ByteArray, Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.feedback.memory import Array, Memory


class EstimateMemory(Memory):
    """The memory of ``ef21``.

    A sender's new estimate waits until it is known that all could use its message: until the result of that span
    is there and finite, or the next step begins. If the step of any rank overflowed, all ranks drop it.
    """

    name = "ef21"
    extras = ("total", "known")

    def _made(self, n: int, wide: bool, rooms: Any) -> Any:
        self._owns: dict[tuple[int, int], Flat] = {}  # data that the kernels' memory refers to, by span
        return native.kernels().EstimateMemory(n, wide, rooms)

    @property
    def sent(self) -> Array:
        """Return g, the estimate of this rank's array."""
        return self._main()

    @property
    def total(self) -> Array | None:
        """Return the sum of all ranks' g (:meth:`add`), or of the other ranks' in the spans that this rank owns.

        None until it is needed.
        """
        return self._state("total")

    @property
    def known(self) -> Array | None:
        """Return the estimate of a reduction's result, the same on all ranks; None until it is needed."""
        return self._state("known")

    def begin(self) -> int:
        step = super().begin()
        self._owns.clear()
        return step

    def own(self, codec: Codec, data: Flat, span: slice) -> Array:
        total = super().own(codec, data, span)
        self._owns[span.start, data.size] = data
        return total

    def encode_sum(self, codec: Codec, total: Array, out: ByteArray, span: slice, ranks: int = 1) -> int:
        nbytes = super().encode_sum(codec, total, out, span, ranks)
        self._owns.pop((span.start, total.size), None)
        return nbytes

    def add(self, decoded: Array) -> Array:
        """Add the sum of all ranks' decoded messages to the running sum of their estimates; return a copy of it.

        A sum that is not finite is returned added, but not kept, and this memory's last message is taken back.
        """
        estimate = self._take(self.n)
        self.native.add(decoded.astype(self.kind.storage, copy=False), estimate)
        return estimate

    def settle(self, good: bool = True) -> None:
        """End a step whose messages have arrived everywhere, or, if not ``good``, are used nowhere."""
        self.native.settle(good)

    def arrays(self) -> dict[str, Array]:
        self.settle()
        return super().arrays()

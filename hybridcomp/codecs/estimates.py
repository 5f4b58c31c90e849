"""The form of error feedback that keeps an estimate of the data: ``ef21``.

Richtarik, Sokolov and Fatkhullin, arXiv:2106.05203. Sender and receiver hold the same estimate g of x, and messages
bring it nearer; C is encode and decode. ::

    send C(x - g);  g = g + C(x - g)

What was meant is g, so a receiver keeps the sum of all senders' g: :meth:`EstimateMemory.add`.

In a reduction the owner of a shard keeps the sum of the other ranks' g, adds its own x as it is, and does with the
sum as the others did with x, so that all ranks hold the same estimate of the result (as in arXiv:2110.03294).
"""

from __future__ import annotations

import numpy as np

from hybridcomp.arrays import ByteArray, DType, Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.forms import Form
from hybridcomp.codecs.memories import main_array
from hybridcomp.codecs.memory import Array, Memory, Scratch


class EstimateMemory(Memory):
    """``ef21``.

    A sender's new estimate waits until it is known that all could use its message: until the result of that span
    is there and finite, or the next step begins. If the step of any rank overflowed, all ranks drop it.

    Attributes:
        sent: g.
        total: the sum of all ranks' g (:meth:`add`), or of the other ranks' in the span that this rank owns;
            None until it is needed.
        known: the estimate of a reduction's result, the same on all ranks; None until it is needed.
    """

    name = "ef21"
    adds_own = False
    tracks = True

    def __init__(self, form: Form, n: int, kind: DType, scratch: Scratch) -> None:
        super().__init__(form, n, kind, scratch)
        self.sent: Array = np.zeros(n, kind.storage)
        self.total: Array | None = None
        self.known: Array | None = None
        self._waiting: dict[tuple[int, int], Array] = {}  # by span: what `sent` will be
        self._summed: dict[tuple[int, int], Array] = {}  # by owned span: what `total` will be
        self._own: Flat | None = None

    def begin(self) -> int:
        self.settle()
        return super().begin()

    def correct(self, data: Flat, span: slice) -> Array:
        corrected = self._take(data.size)
        self._kernels.feedback_add(data.data, data.dtype, self.sent[span], corrected, True)
        return corrected

    def keep(self, corrected: Array, decoded: Array, span: slice, weight: float = 1.0) -> None:
        finite = self._kernels.feedback_add(decoded, self.kind, self.sent[span], decoded, False)
        self._scratch.give(corrected)
        if finite:
            self._waiting[span.start, span.stop] = decoded
        else:
            self._scratch.give(decoded)

    def own(self, codec: Codec, data: Flat, span: slice) -> Array:
        if self.total is None:
            self.total = np.zeros(self.n, self.kind.storage)
        mine = self.sent[span]
        if mine.any():  # other ranks owned this before: the sum has what this rank sent then
            self.total[span] -= mine
            mine[:] = 0
        self._own = data
        return self.total[span].copy()

    def encode_sum(self, codec: Codec, total: Array, out: ByteArray, span: slice, ranks: int = 1) -> int:
        own, self._own = self._own, None
        assert own is not None
        self._summed[span.start, span.stop] = total.copy()
        self._kernels.feedback_add(own.data, own.dtype, total, total, False)
        if ranks > 1:
            total /= ranks
        self._kernels.feedback_add(total, self.kind, self._result()[span], total, True)
        return self._write(codec, total, total.shape, out)

    def result(self, values: Array, span: slice) -> None:
        known = self._result()[span]
        finite = self._kernels.feedback_add(values, self.kind, known, values, False)
        if finite:
            known[:] = values
        self._settle((span.start, span.stop), finite)

    def _result(self) -> Array:
        if self.known is None:
            self.known = np.zeros(self.n, self.kind.storage)
        return self.known

    def add(self, decoded: Array) -> Array:
        """Add the sum of all ranks' decoded messages to the running sum of their estimates; return a copy of it.

        A sum that is not finite is returned added, but not kept, and what this memory sent last is taken back.
        """
        if self.total is None:
            self.total = np.zeros(self.n, self.kind.storage)
        estimate = np.empty_like(self.total)
        finite = self._kernels.feedback_add(
            decoded.astype(self.kind.storage, copy=False), self.kind, self.total, estimate, False
        )
        if finite:
            self.total[:] = estimate
        self.settle(finite)
        return estimate

    def settle(self, good: bool = True) -> None:
        """What was sent in this step has arrived everywhere, or, if not ``good``, is used nowhere."""
        for span in list(self._waiting):
            self._settle(span, good)
        self._summed.clear()

    def _settle(self, span: tuple[int, int], good: bool) -> None:
        fresh = self._waiting.pop(span, None)
        if fresh is not None:
            if good:
                self.sent = self._replaced(self.sent, fresh, slice(*span))
            else:
                self._scratch.give(fresh)
        total = self._summed.pop(span, None)
        if total is not None and good:
            assert self.total is not None
            self.total[slice(*span)] = total

    def arrays(self) -> dict[str, Array]:
        self.settle()
        saved = {"": self.sent, "total": self.total, "known": self.known}
        return {name: array.copy() for name, array in saved.items() if array is not None}

    @classmethod
    def restore(cls, form: Form, arrays: dict[str, Array], scratch: Scratch) -> EstimateMemory:
        main, kind = main_array(arrays, ("total", "known"))
        memory = cls(form, 0, kind, scratch)
        memory.n, memory.sent = main.size, main.copy()
        memory.total = arrays["total"].copy() if "total" in arrays else None
        memory.known = arrays["known"].copy() if "known" in arrays else None
        return memory

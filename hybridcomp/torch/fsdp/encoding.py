"""Encode and decode tensors of the CPU or of a CUDA device, with error feedback, without sending them."""

from __future__ import annotations

from typing import Any

import torch

from hybridcomp import arrays
from hybridcomp.codecs import Codec, ErrorFeedback
from hybridcomp.codecs.feedback.error_feedback import Key
from hybridcomp.policy import Choice

Tensor = torch.Tensor


class Encoder:
    """An encoder of spans of one array in one step of its error feedback.

    Attributes:
        codec: of this step.
        dtype: that messages are of.
    """

    def __init__(self, choice: Choice, feedback: ErrorFeedback, key: Key, n: int, like: Tensor) -> None:
        """Begin a step.

        Args:
            choice: codec and form of feedback.
            feedback: where states are kept.
            key: of the array.
            n: its elements.
            like: a tensor of its dtype and device.
        """
        self.codec: Codec = choice.codec
        self.dtype = like.dtype
        self._memory: Any = None
        self._queue: Any = None
        self._form = choice.feedback
        if choice.feedback is None:
            return
        kind = arrays.as_dtype(like.dtype)
        if like.dtype is not torch.float64:
            self.dtype = torch.float32
        if like.is_cuda:
            from hybridcomp.device import Queue  # noqa: PLC0415  (for who has such tensors)

            runtime = arrays.flatten(like, device=True).data.runtime
            self._queue = Queue(runtime, runtime.current_stream(like))
            self._memory = feedback.device_memory(key, n, kind, self._queue, choice.feedback)
            self._memory.follow(self._queue)
            self.codec = self.codec.at_step(self._memory.begin(self._queue))
        else:
            self._memory = feedback.memory(key, n, kind, choice.feedback)
            self.codec = self.codec.at_step(self._memory.begin())

    def encode(self, values: Tensor, out: Tensor, span: slice) -> None:
        """Write the message of a span of the array to ``out``, of at least ``codec.bound`` bytes."""
        if self._memory is None:
            self.codec.encode(values, out=out)
            return
        flat = arrays.flatten(values, device=True)
        room = arrays.flatten(out, writable=True, device=True).data
        if self._queue is None:
            self._memory.encode(self.codec, flat, room, span)
        else:
            self._memory.encode(self.codec, flat, room, self._queue, span)

    def own(self, values: Tensor, span: slice) -> Tensor:
        """Return an accumulator with the span's own values in it, as this rank's part of a sum."""
        wide = torch.float64 if values.dtype is torch.float64 else torch.float32
        total = values.to(wide, copy=True)
        if (
            self._memory is not None and self._memory.name == "dgc"
        ):  # all parts of its sum are decoded messages
            room = torch.empty(
                self.codec.bound(values.numel(), arrays.as_dtype(wide)),
                dtype=torch.uint8,
                device=values.device,
            )
            self.encode(values, room, span)
            self.codec.decode(room, out=total)
        return total

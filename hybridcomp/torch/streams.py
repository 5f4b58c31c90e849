"""Record and use the CUDA streams of the thread that starts an operation.

Results are copied to their tensors, and futures completed, in the thread that sees the operation end. That may be the
background thread, which has streams of its own; the work belongs in the order of the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch


class CallerStreams:
    """The streams that this thread is using now, on the devices of some tensors; nothing where none is on CUDA."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._streams = [torch.cuda.current_stream(device) for device in devices]
        self._events: list[tuple[torch.device, torch.cuda.Event]] = []

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make them the current ones of the thread that runs this."""
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def mark(self) -> None:
        """Record events behind all work that has been put on them up to now."""
        self._events = [(stream.device, stream.record_event()) for stream in self._streams]

    def join(self) -> None:
        """Make the current streams of this thread wait for the marked work; the host does not wait."""
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)

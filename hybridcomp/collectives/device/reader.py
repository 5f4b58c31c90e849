"""Read the messages of an operation on a device's memory; see :mod:`~hybridcomp.collectives.device.data_path`.

The host reads a message's header and the first bytes of its payload, compares them and names the differences; the
device checks the CRC and the rest, and the operation's end reports the outcome.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Self

from hybridcomp import wire
from hybridcomp.arrays import ByteArray, DType
from hybridcomp.codecs import Codec
from hybridcomp.codecs.device.driver import MODULES, driver_of, has_driver, modules_of
from hybridcomp.codecs.device.messages import open_message
from hybridcomp.collectives.data_path.carrier import Carrier
from hybridcomp.collectives.device.joint import pair_for
from hybridcomp.collectives.device.mailbox import Arriving, DeviceMailbox
from hybridcomp.collectives.device.streams import StreamPair, callers_events
from hybridcomp.collectives.stats import Call
from hybridcomp.collectives.transport.transport import Transport
from hybridcomp.cuda import prepare_in_turn
from hybridcomp.device import DeviceArray, Queue
from hybridcomp.errors import WireError
from hybridcomp.wire import HEADER_BYTES, Header

Opened = tuple[Header, bytes, DeviceArray]


class DeviceReader(Carrier):
    """Stream pair, mailbox and opened messages of an operation on a device's memory."""

    def __init__(
        self,
        transport: Transport,
        codec: Codec,
        dtype: DType,
        call: Call,
        buffers: Iterable[DeviceArray],
        *,
        direct: bool | None = None,
        others: Sequence[Codec] = (),
    ) -> None:
        """Make a data path for the caller's ``buffers``.

        Compiles the kernels, or loads them, where that has not been done.

        Args:
            transport, codec, dtype, call: as in a carrier.
            buffers: arrays on the device, whose owners' streams the operation follows.
            direct: whether to hand device pointers to the transport; None to do as the transport says.
            others: codecs of messages that may come besides its own.
        """
        super().__init__(transport, codec, dtype, call)
        self._buffers = list(buffers)
        self._direct = transport.direct if direct is None else direct
        self._runtime = self._buffers[0].runtime
        self._after = callers_events(self._buffers)
        self._streams: StreamPair | None = None
        self._mail: DeviceMailbox | None = None
        for each in (codec, *filter(has_driver, others)):
            self._prepare(each)

    def _prepare(self, codec: Codec) -> None:
        prepare_in_turn((*MODULES, *modules_of(codec)), self._runtime)

    def alike(self, *, codec: Codec | None = None, dtype: DType | None = None) -> Self:
        """Return a data path of the same operation, mailbox and stream pair for another codec or dtype."""
        if codec is not None:
            self._prepare(codec)
        return super().alike(codec=codec, dtype=dtype)

    @property
    def _head(self) -> bytes | None:
        """Return the beginning of every payload of the codec, if they are alike; else None."""
        return driver_of(self.codec.wire_id).head(self.codec)

    @property
    def streams(self) -> StreamPair:
        """Return the operation's stream pair; its work follows the callers' streams' work of when this was made."""
        if self._streams is None:
            self._streams = pair_for(self.transport.joint, self._runtime, self._after)
        return self._streams

    @property
    def queue(self) -> Queue:
        """Return the queue of the operation's stream pair."""
        return self.streams.queue

    def mailbox(self) -> DeviceMailbox:
        """Make the mailbox for the messages of the operation."""
        self._mail = DeviceMailbox(self.transport, self.call, self.streams, direct=self._direct)
        return self._mail

    @property
    def _mailbox(self) -> DeviceMailbox:
        assert isinstance(self._mail, DeviceMailbox)
        return self._mail

    def foresee(self, message: Arriving, n: int, kind: DType) -> None:
        """See :meth:`.Carrier.foresee`: then its values need not wait for the host to have read its header.

        It is so where messages are of one length, and come with those of others, which look at what was foreseen before
        the next ones leave.
        """
        codec, head = self.codec, self._head
        if self.transport.joint is None or not self._direct or not codec.fixed_size or head is None:
            return
        payload = codec.bound(n, kind) - HEADER_BYTES
        message.foreseen = Header(codec.wire_id, kind, n, payload, codec.params_hash), head
        message.compare = partial(self._compare_foreseen, message, n, kind)

    def _compare_foreseen(self, message: Arriving, n: int, kind: DType) -> None:
        assert message.foreseen is not None
        expected, beginning = message.foreseen
        message.foreseen = None
        with self._naming(message):
            header, head = self._seen(message, n, kind)
            driver_of(self.codec.wire_id).check(header, head)
            if header != expected or not head.startswith(beginning):
                raise WireError(
                    f"{header.payload} bytes of payload that begin with {head[: len(beginning)].hex()}, where "
                    f"{expected.payload} with {beginning.hex()} are expected"
                )

    def _used(self, messages: Sequence[Arriving]) -> None:
        for message in messages:
            self._mailbox.used(message)

    def _open(self, message: Arriving, n: int, kind: DType, queue: Queue) -> Opened:
        header, head = self._see(message, n, kind)
        return header, head, self._raw(message, header, queue)

    def _raw(self, message: Arriving, header: Header, queue: Queue) -> DeviceArray:
        """Return a message in the device's memory, where its CRC is checked, by work of a queue."""
        size = HEADER_BYTES + header.payload
        if isinstance(message.buffer, DeviceArray):
            if message.opening is not None:  # kernels that read it do nothing where it is damaged
                queue.after(message.opening)
            return message.buffer[:size]
        raw = queue.uploaded(message.buffer[:size])
        open_message(queue, raw)
        return raw

    def _see(self, message: Arriving, n: int, kind: DType) -> tuple[Header, bytes]:
        message.come(self.transport)
        return self._seen(message, n, kind)

    def _seen(self, message: Arriving, n: int, kind: DType) -> tuple[Header, bytes]:
        header, head = message.see()
        try:
            self.compare(header, n, message.peer, kind)
        except Exception:
            self._blame_damage(message)
            raise
        return header, head

    def _fits(self, message: Arriving, header: Header, room: int) -> None:
        try:
            self.fits(header, message.peer, room)
        except Exception:
            self._blame_damage(message)
            raise

    @contextmanager
    def _naming(self, message: Arriving) -> Iterator[None]:
        """Add operation, axis and ranks to a WireError."""
        try:
            yield
        except WireError as error:
            raise WireError(
                f"{self.call.op} on axis {self.call.axis!r}: rank {self.transport.rank} got a damaged message "
                f"from rank {message.peer}: {error}"
            ) from error

    def _blame_damage(self, message: Arriving) -> None:
        """Raise WireError if a header is unexpected because it is damaged."""
        wire.open_message(self._host_bytes(message))

    def _host_bytes(self, message: Arriving) -> ByteArray:
        """Return a message in host memory.

        Where MPI received in the device's memory, this waits for the device; it is called for unexpected messages only.
        """
        raw = message.buffer
        bytes_: ByteArray = self.streams.queue.read(raw) if isinstance(raw, DeviceArray) else raw
        return bytes_

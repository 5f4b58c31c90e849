"""Send and receive of flat buffers."""

from __future__ import annotations

from mpi4py import MPI

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import get_codec
from hybridcomp.collectives import p2p
from hybridcomp.collectives.base import NONE, Base, CodecLike
from hybridcomp.collectives.buffers import together
from hybridcomp.collectives.carry import Carrier
from hybridcomp.collectives.device_carry import DeviceCarrier, has_driver
from hybridcomp.collectives.engine import Request
from hybridcomp.policy import Choice


class Sends(Base):
    """A communicator's point-to-point operations, all non-blocking."""

    def send(
        self, data: Flat, dest: int, tag: int, name: str | None, phase: str | None, codec: CodecLike
    ) -> Request:
        """Start a send."""
        self._check_rank(dest, "dest")
        device = together(data)
        choice = self._choose("send", data, name, phase, codec)
        framed = self._framed(data.dtype, codec)
        if not framed and choice.compresses:
            choice = Choice(NONE, None, f"sends of {data.dtype.label} are not compressed")
        call = self._call("send", choice, data.nbytes, data.nbytes)
        t = self._p2p_transport
        if not framed:
            return self._native(
                lambda s, _, turn, events: p2p.send_bytes(t.comm, s, dest, tag, turn, events),
                call,
                data,
                None,
                device,
                direct=t.direct,
                transport=t,
            )
        carrier = Carrier(t, choice.codec, data.dtype, call)
        encodes = bool(device) and has_driver(choice.codec)
        if encodes:
            carrier = DeviceCarrier(t, choice.codec, data.dtype, call, device)
        return self._native(
            lambda s, _, turn, _events: p2p.send_message(carrier, s, dest, tag, turn),
            call,
            data,
            None,
            device,
            direct=encodes,
            transport=t,
            exact=False,
        )

    def recv(self, out: Flat, source: int, tag: int, codec: CodecLike) -> Request:
        """Start a receive; the request's ``status`` says from whom."""
        if source != MPI.ANY_SOURCE:
            self._check_rank(source, "source")
        status = MPI.Status()
        call = self._plain_call("recv", out.nbytes, 0)
        t = self._p2p_transport
        device = together(out)
        if not self._framed(out.dtype, codec):
            return self._native(
                lambda _, r, turn, events: p2p.receive_bytes(t.comm, r, source, tag, status, turn, events),
                call,
                None,
                out,
                device,
                direct=t.direct,
                transport=t,
                status=status,
                written=lambda: [(0, status.Get_count(MPI.BYTE))],
            )
        codecs = (get_codec(codec),) if codec is not None else self.policy.codecs(self.axis, "send")
        capacity = max(c.bound(out.size, out.dtype) for c in (NONE, *codecs))
        carrier = Carrier(t, NONE, out.dtype, call)
        if device:
            direct = t.direct and all(map(has_driver, codecs))
            carrier = DeviceCarrier(t, NONE, out.dtype, call, device, direct=direct, others=codecs)
        return self._native(
            lambda _, r, turn, _events: p2p.receive_message(carrier, r, capacity, source, tag, status, turn),
            call,
            None,
            out,
            device,
            direct=True,
            transport=t,
            exact=False,
            status=status,
        )

    def _framed(self, dtype: DType, codec: CodecLike) -> bool:
        """Whether sends of a dtype carry headers here: the same answer at both ends, whatever the size."""
        if not dtype.is_float:
            return False
        if codec is not None:
            return get_codec(codec).name != "none"
        return bool(self.policy.codecs(self.axis, "send"))

"""Define the terms of the model's formulas: a setting, and the seconds of a part of an algorithm in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec, TopKCodec
from hybridcomp.codecs.sparse.base import RatioCodec, SparseCodec
from hybridcomp.perfmodel.profile import Profile

_KINDS = {1: DType.UINT8, 2: DType.FLOAT16, 4: DType.FLOAT32, 8: DType.FLOAT64, 16: DType.COMPLEX128}
FP32 = 4  # bytes; speeds are of fp32
# Seconds of a core in the compiled engine: for a message inside a host or to another one, all its
# work included, and for a codec's call.
_COMPILED_NEAR = 1e-6
_COMPILED_FAR = 16e-6
_COMPILED_CALL = 0.2e-6
_SWITCH = 2e-6  # added for a message to a rank of the same host that has to be given the core first
_OF_BURST = 0.25  # share of an idle link's burst that counts: the link may have been used just before


@dataclass(frozen=True, slots=True)
class Setting:
    """Operation whose cost is asked for.

    It is equal on all ranks, so that all choose alike.

    Attributes:
        op: ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``broadcast`` or ``reduce``.
        nbytes: uncompressed bytes of the array that is summed or sent; for ``reduce_scatter`` and ``all_gather`` of all
            ranks' blocks together.
        itemsize: bytes of an element.
        codec: codec that encodes it.
        ranks: number of ranks of the communicator.
        hosts: number of hosts that they are on.
        ranks_per_host: most ranks on any host.
        compiled: whether the compiled engine runs it, which needs less of a core for a message.
    """

    op: str
    nbytes: int
    itemsize: int
    codec: Codec
    ranks: int
    hosts: int
    ranks_per_host: int
    compiled: bool = False

    @property
    def tiered(self) -> bool:
        """Tell whether there are several hosts, one of which has several ranks."""
        return self.hosts > 1 and self.ranks_per_host > 1

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise ValueError(f"nbytes must be at least 0, not {self.nbytes}")
        if self.itemsize not in _KINDS:
            raise ValueError(f"itemsize must be one of {', '.join(map(str, _KINDS))}, not {self.itemsize}")
        if not 1 <= self.hosts <= self.ranks:
            raise ValueError(f"hosts must be from 1 to {self.ranks}, the number of ranks, not {self.hosts}")
        least, most = -(-self.ranks // self.hosts), self.ranks - self.hosts + 1
        if not least <= self.ranks_per_host <= most:
            raise ValueError(
                f"{self.ranks} ranks on {self.hosts} hosts have {least} to {most} on one, not {self.ranks_per_host}"
            )

    @property
    def sparse(self) -> bool:
        """Tell whether the codec sends some elements only, the rest being zero."""
        return isinstance(self.codec, SparseCodec)


class Phase:
    """Part of an algorithm with pipelined chunks: seconds of the busiest rank, and of the busiest host's link.

    The methods add to it. Elements are counted as numbers, not as whole ones, so that the costs are smooth.

    Attributes:
        latency: seconds on the longest chain of messages during which nothing else goes on.
        cpu: seconds in which a rank computes, copies and hands messages to MPI.
        sent: bytes that leave a host.
        chunks: number of chunks in the pipeline.
        depth: chunks that the pipeline takes in before the first one comes out.
        rested: share of a link's burst that this part may use; the rest is for the algorithm's other parts.
    """

    def __init__(self, profile: Profile, setting: Setting, chunk: int) -> None:
        """Begin a part whose messages encode at most ``chunk`` bytes."""
        self._profile = profile
        self._setting = setting
        self._speed = profile.speed(setting.codec)
        self._chunk = chunk / setting.itemsize
        self.latency = self.cpu = self.sent = 0.0
        self.chunks = 1.0
        self.depth = 1.0
        self.rested = 1.0

    @property
    def link(self) -> float:
        """Return the seconds that a host's link is busy, without the bytes that it passes at once after a rest."""
        network = self._profile.network
        return max(0.0, self.sent - self.rested * _OF_BURST * network.burst) / network.bandwidth

    def seconds(self) -> float:
        """Return the part's seconds.

        The busier of rank and link counts in full, the other for ``depth`` chunks, which overlap with nothing. While a
        rank waits, the ranks that share its cores compute: so the part takes no less than the work of all of them.
        """
        busy, idle = max(self.cpu, self.link), min(self.cpu, self.link)
        alone = self.latency + busy + idle * min(1.0, self.depth / self.chunks)
        return max(alone, self.cpu / self._profile.cores)

    def pieces(self, n: float) -> float:
        """Return the number of messages for ``n`` elements."""
        return max(1.0, n / self._chunk)

    def encode(self, n: float, times: float = 1) -> None:
        """Encode ``n`` elements, ``times`` over."""
        self._compute(n, times, self._speed.encode)

    def decode(self, n: float, times: float = 1) -> None:
        """Decode ``times`` messages of ``n`` elements."""
        self._compute(n, times, self._speed.decode)

    def add(self, n: float, times: float = 1) -> None:
        """Decode ``times`` messages of ``n`` elements and add them up."""
        self._compute(n, times, self._speed.add)

    def copy(self, n: float) -> None:
        """Pass over ``n`` elements in memory."""
        self.cpu += n * FP32 / self._profile.memory

    def chain(self, rounds: float, *, network: bool) -> None:
        """Wait ``rounds`` times for a message that could not be sent before the previous one had arrived."""
        tier = self._profile.network if network else self._profile.host
        self.latency += rounds * tier.latency

    def send(self, n: float, *, near: float, far: float, own: float, peers: int = 1) -> None:
        """Send messages of ``n`` elements.

        Args:
            n: elements of a message, before it is cut into chunks.
            near: messages that a rank sends to ranks of its host.
            far: messages that leave a host, of all its ranks.
            own: messages that a rank sends, near and far.
            peers: ranks that each get a message of their own: the engine sends one while it encodes the next.
        """
        pieces = self.pieces(n)
        nbytes = pieces * self.message_bytes(n / pieces)
        each = across = self._profile.message
        if self._setting.compiled:
            switch = _SWITCH if self._profile.cores < 1 else 0.0
            each, across = min(each, _COMPILED_NEAR + switch), min(across, _COMPILED_FAR)
        away = far / self._setting.ranks_per_host
        self.cpu += pieces * ((own - away) * each + away * across)
        self.cpu += near * nbytes / self._profile.host.bandwidth
        self.cpu += 2 * away * nbytes * self._profile.wire  # both sent and received
        self.sent += far * nbytes
        self.chunks = max(self.chunks, pieces + (peers - 1 if self._setting.compiled else 0))

    def hop(self, n: float, times: float, *, network: bool) -> None:
        """Wait ``times`` for one chunk of ``n`` elements to be passed on whole."""
        tier = self._profile.network if network else self._profile.host
        self.latency += times * self.message_bytes(n / self.pieces(n)) / tier.bandwidth

    def message_bytes(self, n: float) -> float:
        """Return about the bytes of a message of ``n`` elements: exact where they do not depend on the data."""
        return message_size(self._setting.codec, self._speed.size, self._setting.itemsize, math.ceil(n))

    def _compute(self, n: float, times: float, speed: float) -> None:
        overhead = self._speed.overhead
        if self._setting.compiled:
            overhead = min(overhead, _COMPILED_CALL)
        self.cpu += times * (n * FP32 / speed + self.pieces(n) * overhead)


def message_size(codec: Codec, size: float, itemsize: int, count: int) -> float:
    """Return about the bytes of a message of ``count`` elements: exact where they do not depend on the data.

    Args:
        codec: codec that encodes it.
        size: message bytes over encoded bytes, as measured.
        itemsize: bytes of an element.
        count: number of elements.
    """
    kind = _KINDS[itemsize]
    if isinstance(codec, RatioCodec):  # topk sends as much as its bound; others aim at as much
        codec = TopKCodec(codec.ratio_kept, codec.values)
    elif not codec.fixed_size:
        return min(codec.bound(count, kind), 64 + size * count * kind.itemsize)
    return codec.bound(count, kind)

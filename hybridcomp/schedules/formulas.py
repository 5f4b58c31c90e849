"""Compute the seconds of each algorithm: formulas for :mod:`.registry`.

The model is the usual one of latency and bandwidth (Thakur, Rabenseifner, Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005) with three more terms: computing, links that the ranks of a host share, and
pipelines, in which the busiest stage counts in full and the others for one chunk.

In the formulas p ranks are on h hosts, at most l on one; n elements are reduced or sent, s = n / p is a shard; E(x),
D(x), A(x) are the seconds to encode x elements, decode them, decode and add them; C(x) those of a copy in memory; W(x)
those of their message on a host's link; a is a message's latency, o a core's work for a message however short it is.
``a || b`` is a pipeline of two stages: max(a, b) + min(a, b) / chunks, or 1.5 times as much of the second in a
hierarchical all-reduce; the compiled engine also overlaps the messages to different ranks, which count as chunks.
The formulas leave out a core's work for each byte to or from another host: it counts as computing.
"""

from __future__ import annotations

from typing import Any, Protocol


class Phase(Protocol):
    """Part of an algorithm, to which a formula adds: :class:`hybridcomp.perfmodel.terms.Phase`."""

    cpu: float
    chunks: float
    depth: float
    rested: float

    def encode(self, n: float, times: float = 1) -> None:
        """Encode ``n`` elements, ``times`` over."""

    def decode(self, n: float, times: float = 1) -> None:
        """Decode ``times`` messages of ``n`` elements."""

    def add(self, n: float, times: float = 1) -> None:
        """Decode ``times`` messages of ``n`` elements and add them up."""

    def copy(self, n: float) -> None:
        """Pass over ``n`` elements in memory."""

    def chain(self, rounds: float, *, network: bool) -> None:
        """Wait ``rounds`` times for a message that could not be sent before the previous one had arrived."""

    def send(self, n: float, *, near: float, far: float, own: float, peers: int = 1) -> None:
        """Send messages of ``n`` elements."""

    def hop(self, n: float, times: float, *, network: bool) -> None:
        """Wait ``times`` for one chunk of ``n`` elements to be passed on whole."""

    def seconds(self) -> float:
        """Return the part's seconds."""


class Case(Protocol):
    """Setting whose cost a formula says: :class:`hybridcomp.perfmodel.case.Case`."""

    @property
    def setting(self) -> Any:
        """Return the operation, its bytes, codec and ranks: :class:`hybridcomp.perfmodel.terms.Setting`."""

    @property
    def n(self) -> float:
        """Return the number of elements."""

    @property
    def p(self) -> int:
        """Return the number of ranks."""

    @property
    def h(self) -> int:
        """Return the number of hosts."""

    @property
    def l(self) -> int:  # noqa: E743  (its name in the formulas)
        """Return the number of ranks on the fullest host."""

    @property
    def network(self) -> bool:
        """Tell whether any message leaves a host."""

    def phase(self, *, whole: bool = False) -> Phase:
        """Return an empty part of the algorithm, cut into chunks or ``whole``."""

    def to_all(self, phase: Phase, n: float) -> None:
        """Add the sends of ``n`` elements from every rank to every other rank at once, different ones for each."""

    def own_result(self, phase: Phase, n: float) -> None:
        """Add the decoding and copy of a rank's own sum; the compiled engine's encoder makes them in passing."""

    def around(self, phase: Phase, n: float) -> None:
        """Add every rank's ``n`` elements around a ring: of a host's ranks only the last one sends to another host."""


_DEPTH = (
    1.5  # chunks that fill a hierarchy, inside hosts and between them; fitted to 8 ranks on 4 hosts at 1 Gb/s
)


# -- all-reduce --------------------------------------------------------------------------------------------------


def allreduce_direct(c: Case) -> float:
    """Return 2 a + [E(n) + (p - 1) A(s) + D(n) + C(s) + 2 (p - 1) o || 2 l (p - l) W(s)]; compiled: no D(s) + C(s)."""
    phase, s = c.phase(), c.n / c.p
    phase.encode(s, c.p)  # p - 1 parts and a result
    phase.add(s, c.p - 1)
    phase.decode(s, c.p - 1)
    c.own_result(phase, s)
    c.to_all(phase, s)
    c.to_all(phase, s)
    return phase.seconds()


def allreduce_one_shot(c: Case) -> float:
    """Return a + E(n) + D(n) + (p - 1) (A(n) + o) + l (p - l) W(n): every message whole to everyone, who sums all."""
    phase = c.phase(whole=True)
    phase.encode(c.n)
    phase.decode(c.n)
    phase.add(c.n, c.p - 1)
    c.to_all(phase, c.n)
    phase.chunks = 1.0  # one message for all, and a sum of all of them
    return phase.seconds()


def allreduce_ring(c: Case) -> float:
    """Return 2 (p - 1) a + [as direct || (l (p - l) + p - 1) W(s)]: pairwise exchange, then results around the ring."""
    phase, s = c.phase(), c.n / c.p
    phase.encode(s, c.p)
    phase.add(s, c.p - 1)
    phase.decode(s, c.p - 1)
    c.own_result(phase, s)
    phase.chain(c.p - 2, network=c.network)  # and the chain of to_all
    c.to_all(phase, s)
    c.around(phase, s)
    return phase.seconds()


def allreduce_halving(c: Case) -> float:
    """Return the time of a reduce-scatter by halving, + log2 p a + [E(s) + D(n) || l W(n - s)] for the way back.

    Plain values are also copied into messages, C(n - 2 s). Ranks beyond a power of two hand their values to a partner
    first, and get the result from it: 2 (a + E(n) || W(n)).
    """
    return _halving(c, rested=0.5) + _doubling(c, rested=0.5)


def allreduce_hierarchical(c: Case, *, twice: bool = False) -> float:
    """Return 2 a + [2 C(n) + h E(x) + (h - 1) A(x) + D(n) + m o || 2 l (h - 1) W(x)], x = n / l h, m messages.

    Each rank hands its parts to the ranks of its host that lead their shards across, and reads as much; m are h (l - 1)
    such parts, as many results handed on, and 2 (h - 1) messages across. ``twice``: see :func:`_hand_over`.
    """
    phase, x = c.phase(), c.n / c.l / c.h
    phase.depth = _DEPTH
    _hand_over(c, phase, twice=twice)
    phase.encode(x, c.h)
    phase.add(x, c.h - 1)
    phase.decode(c.n / c.p, c.p)
    phase.chain(2, network=c.network)
    phase.send(x, near=0, far=2 * c.l * (c.h - 1), own=2 * (c.h - 1) + 2 * c.h * (c.l - 1), peers=c.h - 1)
    return phase.seconds()


def allreduce_sparse(c: Case) -> float:
    """Return a + [E(n) + D(n) + (p - 1) (A(n) / 4 + o) || l (p - l) W(n)]: every message to everyone.

    The sum is made block by block, in the cache: each message after the first took a sixth of D(n) at a density of 1 %.
    """
    phase = c.phase()
    phase.encode(c.n)
    phase.decode(c.n)
    phase.add(c.n / 4, c.p - 1)
    c.to_all(phase, c.n)
    return phase.seconds()


def allreduce_oktopk(c: Case) -> float:
    """Return 3 a + [E(n) + C(s) + (p - 1) A(s) + E(s) + D(n) || 2 l (p - l) W(s)]: shards of as many entries each."""
    phase, s = c.phase(), c.n / c.p
    c.to_all(phase, 0)  # the counts
    phase.encode(c.n)
    phase.copy(s)
    phase.add(s, c.p - 1)
    phase.encode(s)
    phase.decode(s, c.p)
    c.to_all(phase, s)
    c.to_all(phase, s)
    return phase.seconds()


# -- reduce-scatter and all-gather -------------------------------------------------------------------------------


def scatter_direct(c: Case) -> float:
    """Return A + [(p - 1) (E(s) + A(s) + o) + C(s) || l (p - l) W(s)], A being a."""
    return _scatter(c, 1)


def scatter_ring(c: Case) -> float:
    """Return the time of :func:`scatter_direct` with A = (p - 1) a: pairwise exchange."""
    return _scatter(c, c.p - 1)


def scatter_halving(c: Case) -> float:
    """Return C(n / 2) (not compiled) + sum over i = 1 .. log2 p of a + [E(n / 2^i) + A(n / 2^i) || l W(n / 2^i)]."""
    return _halving(c)


def scatter_hierarchical(c: Case, *, twice: bool = False) -> float:
    """Return a + [2 C(n) + (h - 1) (E(x) + A(x)) + (h (l - 1) + h - 1) o || l (h - 1) W(x)], x = n / l h."""
    phase, x = c.phase(), c.n / c.l / c.h
    _hand_over(c, phase, twice=twice)
    phase.encode(x, c.h - 1)
    phase.add(x, c.h - 1)
    phase.chain(1, network=c.network)
    phase.send(x, near=0, far=c.l * (c.h - 1), own=c.h - 1 + c.h * (c.l - 1))
    return phase.seconds()


def gather_direct(c: Case) -> float:
    """Return A + [E(s) + p D(s) + (p - 1) o || l (p - l) W(s)]."""
    phase, s = c.phase(), c.n / c.p
    phase.encode(s)
    phase.decode(s, c.p)
    c.to_all(phase, s)
    return phase.seconds()


def gather_ring(c: Case) -> float:
    """Return (p - 1) a + [E(s) + p D(s) + (p - 1) o || (p - 1) W(s)]."""
    phase, s = c.phase(), c.n / c.p
    phase.encode(s)
    phase.decode(s, c.p)
    c.around(phase, s)
    return phase.seconds()


def gather_doubling(c: Case) -> float:
    """Return E(s) + p D(s) || sum over h = 1, 2, 4 .. below p of a + l W(min(h, p - h) s): Bruck's order."""
    phase, s = c.phase(), c.n / c.p
    phase.encode(s)
    phase.decode(s, c.p)
    for i in range(_log2(c.p)):
        _one_exchange(c, phase, s * min(1 << i, c.p - (1 << i)), c.network)
    return phase.seconds()


def gather_hierarchical(c: Case) -> float:
    """Return a + [E(s) + p D(s) + (h - 1 + h (l - 1)) o || l (h - 1) W(s)]: across once, handed on inside."""
    phase, s = c.phase(), c.n / c.p
    phase.encode(s)
    phase.decode(s, c.p)
    phase.chain(1, network=c.network)
    phase.send(s, near=0, far=c.l * (c.h - 1), own=c.h - 1 + c.h * (c.l - 1))
    return phase.seconds()


# -- broadcast and reduce ----------------------------------------------------------------------------------------


def broadcast_tree(c: Case) -> float:
    """Return d a + [max(E(n), D(n)) + d o || log2 h W(n)], d = log2 p, and d - 1 chunks that are passed on."""
    phase = c.phase()
    _root_or_leaf(phase, c.n)
    _tree(c, phase)
    return phase.seconds()


def broadcast_direct(c: Case) -> float:
    """Return A + [max(E(n), D(n)) + (p - 1) o || (p - l) W(n)]."""
    phase = c.phase()
    _root_or_leaf(phase, c.n)
    _star(c, phase)
    return phase.seconds()


def broadcast_scatter(c: Case) -> float:
    """Return 2 a + [max(E(n), D(n)) + 2 (p - 1) o || (l + 1) (p - l) W(s)]: van de Geijn's."""
    phase, s = c.phase(), c.n / c.p
    _root_or_leaf(phase, c.n)
    phase.chain(1, network=c.network)
    phase.send(s, near=c.l - 1, far=c.p - c.l, own=c.p - 1)
    c.to_all(phase, s)
    return phase.seconds()


def reduce_tree(c: Case) -> float:
    """Return d a + [max(d A(n), (d - 1) A(n) + E(n)) + d o || log2 h W(n)], d = log2 p, and d - 1 chunks passed on."""
    phase, depth = c.phase(), _log2(c.p)
    _busier(c, phase, adds=depth, other=depth - 1)
    _tree(c, phase)
    return phase.seconds()


def reduce_direct(c: Case) -> float:
    """Return A + [max((p - 1) A(n), E(n)) + (p - 1) o || (p - l) W(n)]."""
    phase = c.phase()
    _busier(c, phase, adds=c.p - 1, other=0)
    _star(c, phase)
    return phase.seconds()


# -- shared parts ------------------------------------------------------------------------------------------------


def _hand_over(c: Case, phase: Phase, *, twice: bool) -> None:
    """Add 2 C(n): parts are handed over inside a host, and read; or, ``twice``, (l - 1) (E(n / l) + A(n / l))."""
    if not twice:
        phase.copy(2 * c.n)
        return
    phase.encode(c.n / c.l, c.l - 1)
    phase.add(c.n / c.l, c.l - 1)


def _log2(n: int) -> int:
    return (n - 1).bit_length()


def _scatter(c: Case, rounds: int) -> float:
    phase, s = c.phase(), c.n / c.p
    phase.encode(s, c.p - 1)
    phase.add(s, c.p - 1)
    phase.copy(s)
    phase.chain(rounds - 1, network=c.network)
    c.to_all(phase, s)
    return phase.seconds()


def _exchanges(c: Case) -> list[tuple[float, bool]]:
    """Return each rank's elements in each step of halving, and whether they leave the host; largest first."""
    steps = c.p.bit_length() - 1
    return [(c.n / 2**i, c.network and (c.p >> i) >= c.l) for i in range(1, steps + 1)]


def _one_exchange(c: Case, phase: Phase, n: float, away: bool) -> None:
    phase.chain(1, network=away)
    phase.send(n, near=0 if away else 1, far=c.l if away else 0, own=1)


def _halving(c: Case, rested: float = 1.0) -> float:
    """Return the time of recursive halving, each step's sums encoded for the next; other ranks are folded in before."""
    total = 0.0
    exchanges = _exchanges(c)
    if c.p != 1 << len(exchanges):
        exchanges = [(c.n, c.network and c.l == 1), *exchanges]
    # The first step adds to a copy of its values, which the compiled engine makes as it adds.
    kept = exchanges[0][0] if exchanges and not c.setting.compiled else 0.0
    sent = sum(n for n, _ in exchanges) or 1.0
    for n, away in exchanges:
        phase = c.phase()
        phase.rested = rested * n / sent
        phase.copy(kept)
        kept = 0.0
        phase.encode(n)
        phase.add(n)
        _one_exchange(c, phase, n, away)
        total += phase.seconds()
    return total


def _doubling(c: Case, rested: float) -> float:
    """Return the time of recursive doubling of results, decoded by all; ranks folded in get theirs after."""
    phase = c.phase()
    phase.rested = rested
    exchanges = _exchanges(c)
    phase.decode(c.n)
    own = c.n / (1 << len(exchanges))
    phase.encode(own)
    for n, away in exchanges:
        if c.setting.codec.name == "none" and n > own:  # a rank's blocks are copied into one message
            phase.copy(n)
        _one_exchange(c, phase, n, away)
    if c.p != 1 << len(exchanges):
        _one_exchange(c, phase, c.n, c.network and c.l == 1)
    return phase.seconds()


def _root_or_leaf(phase: Phase, n: float) -> None:
    """Add the slower of two at the same time: the root encodes, the others decode."""
    phase.encode(n)
    encode, phase.cpu = phase.cpu, 0.0
    phase.decode(n)
    phase.cpu = max(phase.cpu, encode)


def _busier(c: Case, phase: Phase, *, adds: int, other: int) -> None:
    """Add the slower of two: the root adds ``adds`` messages; another rank adds ``other`` and encodes the sum."""
    phase.add(c.n, adds)
    root, phase.cpu = phase.cpu, 0.0
    phase.add(c.n, other)
    phase.encode(c.n)
    phase.cpu = max(phase.cpu, root)


def _tree(c: Case, phase: Phase) -> None:
    depth, across = _log2(c.p), _log2(c.h)
    phase.chain(depth, network=c.network)
    phase.send(c.n, near=max(0, depth - across), far=across, own=depth)
    phase.hop(c.n, max(0, depth - 1), network=c.network)


def _star(c: Case, phase: Phase) -> None:
    phase.chain(1, network=c.network)
    phase.send(c.n, near=c.l - 1, far=c.p - c.l, own=c.p - 1)

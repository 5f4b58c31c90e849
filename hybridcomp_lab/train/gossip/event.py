"""Put a tensor to the neighbours, one-sidedly, only when it has changed by enough: EventGraD."""

from __future__ import annotations

import numpy as np

from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.stats import Call
from hybridcomp_lab.train.gossip.neighbours import HEADER, Neighbours
from hybridcomp_lab.train.gossip.rules import Array, Rule, Tensors, differences
from hybridcomp_lab.train.gossip.window import Window

Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


class EventGossip(Rule):
    """Event-triggered gossip.

    Ghosh, Aquino, Gupta: "EventGraD: Event-Triggered Communication in Parallel Machine Learning" (arXiv 2103.07454).
    For each tensor w, in every mixing:

    1.  The threshold is multiplied by ``horizon``.
    2.  If ||w - w_sent|| has reached it, or in the first ``warmup`` mixings, w is put into all neighbours' memory. The
        slope is that norm over the mixings since the last put, and the threshold becomes ``reach`` times the mean
        of the last two slopes.
    3.  w += sum over neighbours j of W_ij (w_j - w), with w_j as last received; with ``stale="skip"`` only over the
        neighbours whose w_j was received in this mixing. With ``stale="pair"`` w += sum of W_ij (w_j - w_sent) over the
        pairs of which one has put w in this mixing: both ends move equally far towards each other, so that the mean of
        all stays where it is, unless ``ordered`` is false.
        Differences of sent values are from SPARQ-SGD (Singh, Data, George, Diggavi, arXiv 1910.14280), which adds
        them in every mixing, times a factor that is to be tuned.

    The authors' code compares norms, | ||w|| - ||w_sent|| |, which ignores a tensor that turns, and reads memory
    that is being written to. Here the norm is of the difference, and a record that is not whole is not taken: see
    :mod:`.window`.

    Attributes:
        messages: int64 [2], numbers of tensors that this rank might have put to its neighbours so far, and has put.
    """

    def __init__(
        self,
        tensors: Tensors,
        neighbours: Neighbours,
        window: Window,
        *,
        horizon: float,
        warmup: int,
        reach: float = 1.0,
        stale: str = "mix",
        ordered: bool = True,
    ) -> None:
        """Begin as if the neighbours had this rank's tensors.

        Args:
            tensors, neighbours: see :class:`~hybridcomp_lab.train.gossip.rules.Rule`.
            window: window of the graph's neighbours, for these tensors in order.
            horizon: factor of a threshold in each mixing; 0 sends always.
            warmup: number of mixings in which all tensors are sent.
            reach: slopes by which a tensor changes before it is sent.
            stale: use of tensors received earlier. ``mix``: they are mixed with again, which pulls this rank back to
                where others were; ``skip``: they are not; ``pair``: they are where this rank's own tensor is new, and
                are compared with the one that this rank has sent last.
            ordered: whether neighbours tell each other in each mixing which tensors they have put, and wait for these:
                results do not depend on which rank is faster. Else a rank does not wait, and takes what has arrived.
        """
        super().__init__(tensors, neighbours)
        self._window = window
        self._stale = stale
        self._new: dict[int, Flags] = {}
        self._horizon, self._warmup, self._reach, self._ordered = horizon, warmup, reach, ordered
        self._sent = np.zeros(self.size, self.dtype)
        self._known = {other: np.zeros(self.size, self.dtype) for other in neighbours.weights}
        for flat in (self._sent, *self._known.values()):
            for name, part in self.views(flat).items():
                part[...] = tensors[name]
        self._sent_parts = list(self.views(self._sent).values())
        self._memory: dict[int, list[ByteArray]] = {
            other: [part.reshape(-1).view(np.uint8) for part in self.views(flat).values()]
            for other, flat in self._known.items()
        }
        count = len(tensors)
        self.messages = np.zeros(2, np.int64)
        self._round = np.zeros(1, np.int64)
        self._thresholds = np.zeros(count)
        self._slopes = np.zeros((count, 2))  # the newer one last
        self._last = np.full(count, -1, np.int64)  # mixing of the last put
        # Step of each known tensor, by neighbour.
        self._steps = {other: np.full(count, -1, np.int64) for other in neighbours.weights}

    def mix(self, step: int) -> None:
        """Mix as :meth:`Rule.mix` does; steps grow from one mixing to the next.

        Raises:
            CollectiveTimeoutError: a neighbour is late, or its put is.
            MismatchError: a neighbour is at another step.
        """
        call = self.neighbours.begin("none", self.nbytes)
        chosen = self._choose()
        degree = len(self.neighbours.weights)
        for number, tensor in enumerate(self.tensors.values()):
            if chosen[number]:
                values = tensor.reshape(-1).view(np.uint8)
                call.wire_bytes += degree * self._window.put(number, values, step, self.neighbours.weights)
                self._sent_parts[number][...] = tensor
        self._new = {other: np.zeros(chosen.size, np.bool_) for other in self._known}
        self._read(step, chosen, call)
        self.neighbours.end(call)
        self.messages += [degree * chosen.size, degree * chosen.sum()]
        self._round += 1
        pair = self._stale == "pair"
        own = self._sent if pair else np.concatenate([tensor.reshape(-1) for tensor in self.tensors.values()])
        heard = self._known
        if self._stale != "mix":  # tensors that are not mixed count as equal to this rank's
            mixed = {other: new | chosen if pair else new for other, new in self._new.items()}
            heard = {other: np.where(self._each(mixed[other]), flat, own) for other, flat in heard.items()}
        self.add(differences(own, heard, self.neighbours))

    def _each(self, of_tensors: Flags) -> Flags:
        """Return each tensor's flag for each of its elements."""
        return np.repeat(of_tensors, [tensor.size for tensor in self.tensors.values()])

    def _choose(self) -> Flags:
        """Choose the tensors to send, and set their thresholds anew."""
        now = int(self._round[0])
        self._thresholds *= self._horizon
        parts = zip(self.tensors.values(), self._sent_parts, strict=True)
        moved = np.array([np.linalg.norm(tensor - sent) for tensor, sent in parts], np.float64)
        chosen = ~(moved < self._thresholds)  # also tensors that are not finite
        if now < self._warmup:
            chosen[:] = True
        slopes = moved / (now - self._last)
        self._slopes[chosen, 0] = self._slopes[chosen, 1]
        self._slopes[chosen, 1] = slopes[chosen]
        self._thresholds[chosen] = self._reach * self._slopes[chosen].mean(1)
        self._last[chosen] = now
        return np.asarray(chosen)

    def _read(self, step: int, chosen: Flags, call: Call) -> None:
        """Copy the tensors that neighbours have put."""
        if not self._ordered:
            self._window.puts_done(step)
            for other in self._known:
                for number in range(len(self.tensors)):
                    self._take(number, other, None)
            return
        notice = np.concatenate([np.zeros(HEADER, np.uint8), np.packbits(chosen)])
        messages = {other: notice.copy() for other in self.neighbours.weights}
        told = self.neighbours.exchange(step, messages, notice.size - HEADER, call)
        due = [
            (number, other)
            for other, notice in told.items()
            for number in np.flatnonzero(np.unpackbits(notice, count=chosen.size)).tolist()
        ]

        def done() -> bool:
            due[:] = [(number, other) for number, other in due if not self._take(number, other, step)]
            return self._window.puts_done(step) and not due

        def what() -> str:
            if not due:
                return f"putting tensors of step {step}"
            number, other = due[0]
            return f"the put of {list(self.tensors)[number]!r} of step {step} by rank {other}, which has announced it,"

        self._window.progress_until(done, what)

    def _take(self, number: int, other: int, only: int | None) -> bool:
        """Copy a tensor of a neighbour if there is a newer one; return whether there was."""
        before = int(self._steps[other][number])
        found = self._window.newest(number, other, before, self._memory[other][number], only=only)
        self._steps[other][number] = found
        self._new[other][number] = found > before
        return found > before

    def state(self) -> dict[str, Array]:
        """Return the state, see :meth:`Rule.state`: sent and known tensors, thresholds and counts."""
        found = {
            "round": self._round,
            "messages": self.messages,
            "sent": self._sent,
            "thresholds": self._thresholds,
            "slopes": self._slopes,
            "last": self._last,
        }
        for other, flat in self._known.items():
            found |= {f"known{other}": flat, f"steps{other}": self._steps[other]}
        return found

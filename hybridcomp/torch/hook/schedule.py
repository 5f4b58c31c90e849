"""Schedule the transfers of several batches: while one is on the wire, another is encoded or decoded.

Over a link whose exchanges may start in any order, each batch goes on as soon as its bytes are here. Over one that
wants the same order on all ranks, the order is fixed: a new batch starts, then each older one goes on by one transfer;
when the last batch of a step has started, the older ones go on in turn until all have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridcomp.torch.hook.links import Link, Transfer
from hybridcomp.torch.hook.summing import Summing
from hybridcomp.torch.hook.worker import Tasks

Done = Callable[[Exception | None], None]


@dataclass(slots=True)
class _Flight:
    """A batch in flight: its generator, the transfer that it waits for, the future to complete."""

    run: Summing
    transfer: Transfer
    done: Done


class Schedule:
    """A schedule of batches over a link; every method is called by the worker's thread."""

    def __init__(self, link: Link, tasks: Tasks) -> None:
        self._link = link
        self._tasks = tasks
        self._flying: list[_Flight] = []
        if not link.ordered:
            tasks.idle = self._attend

    def start(self, run: Summing, done: Done) -> None:
        """Start a batch; ``done`` is called when it has ended, with its error if it had one."""
        try:
            flight = _Flight(run, next(run), done)
        except StopIteration:
            done(None)
            return
        except Exception as error:
            done(error)
            return
        older = list(self._flying)
        self._flying.append(flight)
        if self._link.ordered:
            for each in older:
                self._advance(each)
        else:
            self._when_there(flight)

    def flush(self) -> None:
        """End all batches of an ordered link; called where no further batch will start for a while."""
        while self._link.ordered and self._flying:
            for each in list(self._flying):
                self._advance(each)

    def _when_there(self, flight: _Flight) -> None:
        flight.transfer.when_done(lambda: self._tasks.put(lambda: self._go_on(flight)))

    def _go_on(self, flight: _Flight) -> None:
        if self._advance(flight):
            self._when_there(flight)

    def _advance(self, flight: _Flight) -> bool:
        """Pass a transfer's result on, and start the next one, if there is one; tell whether there is."""
        try:
            try:
                arrived = flight.transfer.wait()
            except Exception as error:
                flight.transfer = flight.run.throw(error)  # it may have others to tell
            else:
                flight.transfer = flight.run.send(arrived)
        except StopIteration:
            self._end(flight, None)
            return False
        except Exception as error:
            self._end(flight, error)
            return False
        return True

    def _end(self, flight: _Flight, error: Exception | None) -> None:
        self._flying.remove(flight)
        flight.done(error)

    def _attend(self, until: Callable[[], bool]) -> None:
        if self._flying:
            self._link.attend(until)

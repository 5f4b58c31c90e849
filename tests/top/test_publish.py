"""Snapshots that a process writes of itself, and when it does."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hybridcomp.collectives.stats import StatRow
from hybridcomp.steps import StepTotals, clock
from hybridcomp.top import publish
from hybridcomp.top.publish import Activity, Entry, Publisher
from hybridcomp.top.read import read_jobs, watch
from hybridcomp.top.snapshot import InFlight, Snapshot, from_bytes, to_bytes
from tests.top import flying

DEADLINE = 20.0


class Communicator:
    def __init__(
        self, rows: Sequence[StatRow] = (), in_flight: Sequence[InFlight] = (), key: int = 7
    ) -> None:
        self.state = Activity(key, "dp", 2, 5, rows, in_flight)

    def activity(self) -> Activity:
        return self.state


def row(op: str = "all_reduce", axis: str = "dp", wire: int = 10) -> StatRow:
    return StatRow(axis, op, "int8", "policy", 1, 80, 40, wire, 4, 0.5, 2.0, 0.25)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRIDCOMP_TOP", str(tmp_path / "top"))
    monkeypatch.setattr(publish, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(publish, "_WRITE_SECONDS", 0.02)
    return tmp_path / "top"


@pytest.fixture
def publisher(folder: Path) -> Iterator[Publisher]:
    made = Publisher(1, 2)
    yield made
    made.stop()


def only(folder: Path) -> Snapshot:
    ((found,),) = [job.ranks for job in read_jobs([folder], shared=True)]
    return found.says


def there(folder: Path) -> bool:
    return bool(read_jobs([folder], shared=True))


def test_it_says_what_communicators_have_carried(publisher: Publisher) -> None:
    one = Communicator([row(), row("send")], [flying(3.0)])
    other = Communicator([row(wire=5), row(axis="tp")], key=8)
    for each in (one, other):
        publisher.add(Entry(each, lambda: []))
    says = publisher.snapshot()
    assert from_bytes(to_bytes(says)) == says
    dp, tp = says.axes
    assert (dp.axis, dp.calls, dp.plain_bytes, dp.wire_bytes, dp.shared_bytes) == ("dp", 3, 120, 25, 12)
    assert (dp.encode_seconds, dp.wire_seconds, dp.decode_seconds) == (1.5, 6.0, 0.75)
    assert (tp.axis, tp.calls) == ("tp", 1)
    first, _ = says.groups
    assert (first.key, first.axis, first.size, first.latest) == ("7", "dp", 2, 5)
    assert first.waited == 2.0  # in its collective, not in its send
    assert says.in_flight == (flying(3.0),)
    assert (says.rank, says.size, says.pid) == (1, 2, os.getpid())


def test_it_says_how_many_steps_there_were_and_what_went_between_hosts(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(), row(axis="pp"), row()]
    for one in rows[1:]:
        one.between_bytes = 4
    one = Communicator(rows)
    publisher.add(Entry(one, lambda: []))
    monkeypatch.setattr(clock, "totals", StepTotals(7, 6, 1, 3.5, 0.5))
    says = publisher.snapshot()
    assert says.steps == StepTotals(7, 6, 1, 3.5, 0.5)
    assert {axis.axis: axis.between_bytes for axis in says.axes} == {"dp": 4, "pp": 4}


def test_what_a_communicator_carried_stays_when_it_is_gone(publisher: Publisher) -> None:
    kept, dropped = Communicator([row()]), Communicator([row()])
    first, second = Entry(kept, lambda: [row()]), Entry(dropped, lambda: [row()])
    publisher.add(first)
    publisher.add(second)
    assert publisher.snapshot().axes[0].calls == 2
    publisher.remove(first)
    publisher.remove(first)
    del dropped
    gc.collect()
    for _ in range(2):
        says = publisher.snapshot()
        assert says.axes[0].calls == 2
        assert says.groups == ()


def test_one_that_cannot_say_anything_hides_no_other(publisher: Publisher) -> None:
    broken = Communicator()
    broken.activity = lambda: 1 / 0  # type: ignore[method-assign]
    good = Communicator([row()])
    for each in (broken, good):
        publisher.add(Entry(each, lambda: []))
    assert publisher.snapshot().axes[0].calls == 1


def test_of_very_much_the_oldest_operations_and_those_busy_are_said(publisher: Publisher) -> None:
    many = [Communicator([row(axis=f"{i}" * 99)], [], key=i) for i in range(300)]
    many[0].state = many[0].state._replace(in_flight=[flying(1000.0 - i, key="0") for i in range(99)])
    for each in many:
        publisher.add(Entry(each, lambda: []))
    says = publisher.snapshot()
    assert from_bytes(to_bytes(says)) == says
    assert len(says.in_flight) == 64
    assert says.unlisted == 35
    assert says.in_flight[0].since == 902.0
    assert {"0", "12b"} <= {group.key for group in says.groups}


def test_it_writes_while_somebody_watches_and_only_then(publisher: Publisher, folder: Path) -> None:
    one = Communicator([row()])
    publisher.add(Entry(one, lambda: []))
    publisher.start()
    until(lambda: there(folder))
    first = only(folder).at
    time.sleep(0.3)
    assert only(folder).at == first
    watch(folder)
    until(lambda: only(folder).at > first)
    second = only(folder).at
    until(lambda: only(folder).at > second)
    (path,) = folder.glob("rank.*")
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()  # as systems do with what is old
    until(lambda: there(folder))
    publisher.stop()
    assert [path.name for path in folder.iterdir()] == ["watched"]


def test_a_disk_without_room_is_passed_over(
    publisher: Publisher, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, full = os.pwrite, True

    def write(file: int, data: bytes, at: int) -> int:
        if full:
            real(file, data[:9], at)
            raise OSError(28, "No space left on device")
        return real(file, data, at)

    monkeypatch.setattr(os, "pwrite", write)
    publisher.start()
    until(lambda: bool(list(folder.glob("rank.*"))))
    assert not there(folder)
    full = False

    def watched() -> bool:
        watch(folder)
        return there(folder)

    until(watched)


def test_it_writes_to_no_file_but_its_own(publisher: Publisher, folder: Path) -> None:
    publisher.start()
    until(lambda: there(folder))
    (path,) = folder.glob("rank.*")
    other = folder / "other"
    other.write_text("precious")
    path.unlink()
    os.link(other, path)
    for _ in range(20):
        watch(folder)
        time.sleep(0.02)
    assert other.read_text() == "precious"


@pytest.mark.parametrize("where", ["/proc/nowhere", "/dev/null"])
def test_without_a_folder_it_does_without(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDCOMP_TOP", where)
    made = Publisher(0, 1)
    made.start()
    assert made._done.wait(DEADLINE)
    made.stop()


def test_without_a_thread_it_does_without(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    publisher.start()
    publisher.stop()


def test_it_can_be_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDCOMP_TOP", "0")
    monkeypatch.setattr(publish, "_publishers", {})
    one = Communicator()
    assert publish.show(one, lambda: [], 0, 1) is None
    publish.hide(None)
    assert publish._publishers == {}


def test_a_fork_leaves_the_file_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own: dict[str, Publisher] = {}
    monkeypatch.setattr(publish, "_publishers", own)
    os.register_at_fork(after_in_child=own.clear)
    one = Communicator([row()])
    shown = publish.show(one, lambda: [], 0, 1)
    assert shown is not None
    until(lambda: there(folder))
    before = list(folder.iterdir())
    child = os.fork()
    if child == 0:
        try:
            publish.hide(shown)
            code = 0 if not own else 1
        except BaseException:
            code = 2
        sys.stdout = None  # type: ignore[assignment]  (what is buffered is the parent's)
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert list(folder.iterdir()) == before
    own["own"].stop()
    assert list(folder.iterdir()) == []

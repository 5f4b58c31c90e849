"""Links of a lab that are cut, slow, or lose packets: operations end with the right bits, or in time with an error.

Of the kernel's queueing disciplines this takes tbf and pfifo, which most machines allow: packets are lost in a queue
that is too short for them. To reorder packets takes netem: where the kernel has none, that fault is left out.
"""

from __future__ import annotations

import functools
import json
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridcomp.net import Lab
from tests.faults.outcome import Outcome
from tests.net.processes import living

ROOT = Path(__file__).parents[3]
HOSTS = 3
RATE = "200mbit"
GRACE = 10.0  # seconds beyond a timeout within which an error comes: a second for answers, and a busy machine
MAKING = 30.0  # seconds more that making a communicator may take
WATCHED = 20.0  # seconds beyond a timeout within which a rank ends that MPI does not come back to, and the job with it
# Output of a rank that ends, and the job with it, before all have said how an operation ended; and the end's kind.
_ENDS = {
    "past its timeout, and MPI does not come back": "ended inside MPI",
    "Fatal error in internal_": "ended by MPI after an error",
}


ERRORS = ("CollectiveTimeoutError", "RemoteError", "WireError", "MismatchError")


@dataclass(frozen=True)
class Case:
    """A fault, and the operation that it is in.

    Attributes:
        seed: seed of values.
        fault: a key of :data:`FAULTS`.
        host: host whose link has the fault, from 1 on.
        after: seconds from the operation's start to the fault.
        lasts: seconds of the fault; None: until all ranks have said how it ended.
        timeout: timeout of the operation.
        op, algorithm, codec, n: the operation.
        again: whether it is done a second time on the same communicator, once the link is mended.
        stays: whether ranks end with the fault in place.
        leaves: whether a rank that has an error ends without the others, which may connect to it again meanwhile.
    """

    seed: int
    fault: str
    host: int
    after: float
    lasts: float | None
    timeout: float
    op: str
    algorithm: str | None
    codec: str
    n: int
    again: bool
    stays: bool
    leaves: bool

    @property
    def must(self) -> str | None:
        """Return how it must end: ``"right"``, ``"error"``; None where either is well."""
        if self.fault == "vanished":
            return "error"
        if self.fault in ("slow", "loses packets", "reorders packets"):
            return "right" if self.timeout >= 40 else None
        if self.lasts is None:
            return None  # it may have ended before
        if self.fault in ("deaf", "mute") and self.lasts > 5:
            # The system gives up finding the neighbour after some 8 s. MPICH 5.0.2 then ends receives from it as if
            # they had been cancelled, without an error; that there is no message is the error then.
            return None
        return "right" if self.timeout > 3 * self.lasts + 5 else None


def _down(lab: Lab, host: int) -> None:
    _do(lab.host_command(host, ["ip", "link", "set", "eth0", "down"]))


def _up(lab: Lab, host: int) -> None:
    _do(lab.host_command(host, ["ip", "link", "set", "eth0", "up"]))


def _tc(*words: str) -> Callable[[Lab, int], None]:
    """Replace what shapes the link out of a host."""

    def apply(lab: Lab, host: int) -> None:
        # Not by tc's own replace: a packet in the queue that is longer than the new burst would stay there, and all
        # behind it.
        subprocess.run(
            lab.host_command(host, ["tc", "qdisc", "del", "dev", "eth0", "root"]),
            capture_output=True,
            check=False,
        )
        _do(lab.host_command(host, ["tc", "qdisc", "add", "dev", "eth0", "root", *words]))

    return apply


def _port(action: str) -> Callable[[Lab, int], None]:
    """Drop all that goes to a host, at the switch, or nothing."""

    def apply(lab: Lab, host: int) -> None:
        rule = ["root", "pfifo", "limit", "0"] if action == "add" else ["root"]
        _do([*lab._enter(0), "tc", "qdisc", action, "dev", f"port{host}", *rule])

    return apply


def _do(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


_SHAPED = _tc("tbf", "rate", RATE, "burst", "25000", "latency", "100ms")
#: The functions that plant each fault in a link, and that mend it.
FAULTS: dict[str, tuple[Callable[[Lab, int], None], Callable[[Lab, int], None]]] = {
    "cut": (_down, _up),
    "vanished": (_down, _up),
    "slow": (_tc("tbf", "rate", "2mbit", "burst", "25000", "latency", "100ms"), _SHAPED),
    "deaf": (_port("add"), _port("del")),  # nothing comes to it
    "mute": (_tc("pfifo", "limit", "0"), _SHAPED),  # nothing leaves it
    "loses packets": (_tc("tbf", "rate", RATE, "burst", "3000", "limit", "6000"), _SHAPED),
    "reorders packets": (
        _tc("netem", "rate", RATE, "delay", "5ms", "reorder", "75%", "loss", "0.5%"),
        _SHAPED,
    ),
}


_SLOW_SECONDS = 3.0  # that operations take at least where a link has been slow


def _lost(lab: Lab, host: int) -> int:
    """Return the packets that the queue of a host's link has dropped."""
    command = lab.host_command(host, ["tc", "-s", "-j", "qdisc", "show", "dev", "eth0"])
    said = subprocess.run(command, check=True, capture_output=True, timeout=20).stdout
    return sum(int(queue["drops"]) for queue in json.loads(said))


def drawn(seed: int) -> Case:
    """Draw a case."""
    draw = random.Random(seed)
    fault = draw.choice(["cut", "cut", "cut", *FAULTS])
    lasts = draw.choice([1.0, 1.0, 10.0, 40.0]) if fault in ("cut", "deaf", "mute") else None
    timeout = draw.choice([2.0, 4.0] if lasts == 40.0 or fault == "vanished" else [3.0, 40.0])
    op = draw.choice(["all_reduce", "all_reduce", "broadcast", "all_gather"])
    algorithm = draw.choice(["ring", "direct", None]) if op == "all_reduce" else None
    n = 1_000_000 if fault == "slow" else 12_000_000 if op == "broadcast" else 4_000_000
    again = lasts is not None and lasts < 40
    return Case(
        seed,
        fault,
        draw.randint(1, HOSTS),
        draw.uniform(0, 0.3),
        lasts,
        timeout,
        op,
        algorithm,
        draw.choice(["int8", "int8:block=128", "bf16"]),
        n,
        again,
        draw.random() < 0.5,
        draw.random() < 0.5,
    )


def scenario(seed: int) -> Outcome:
    """Run one operation on three hosts, the link of one of which has a fault.

    Args:
        seed: decides the fault, when and how long, the timeout, and the operation.

    Raises:
        AssertionError: a rank has wrong bits, other bits than another one, an error that does not say what has failed
            or comes too late, or does not end.
        LabError: network namespaces may not be made.
    """
    return run(drawn(seed))


@functools.cache
def has_netem() -> bool:
    """Tell whether a lab's links can reorder packets."""
    with Lab(1, RATE, kind="namespaces") as lab:
        try:
            FAULTS["reorders packets"][0](lab, 1)
        except subprocess.CalledProcessError:
            return False
        return True


def run(case: Case) -> Outcome:
    """Run a case."""
    if case.fault == "reorders packets" and not has_netem():
        return Outcome(0, Counter({"link reorders packets, not possible here": 1}))
    with tempfile.TemporaryDirectory() as name, Lab(HOSTS, RATE, kind="namespaces") as lab:
        folder = Path(name)
        command = ["python", "-m", "tests.faults.links.link_ranks", name, json.dumps(asdict(case))]
        with (folder / ".output").open("w+b") as output:
            ranks = lab.popen(command, 1, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            started = _Ranks(case, lab, folder)
            try:
                outcomes = Counter(one["kind"] for one in started.run())
            except _EndedError as ended:
                outcomes = Counter({str(ended): HOSTS})
            except AssertionError as error:
                output.seek(0)
                raise AssertionError(f"{case}: {error}\n{output.read().decode(errors='replace')}") from error
            finally:
                lab.end(ranks)
    return Outcome(2 if case.again else 1, Counter({started.sort: 1}), outcomes)


class _EndedError(Exception):
    """The job has ended as it should where MPI does not come back."""


class _Ranks:
    """The ranks of a case, as their starter sees them.

    Attributes:
        sort: the fault in words, which say if it came too late to be noticed.
    """

    def __init__(self, case: Case, lab: Lab, folder: Path) -> None:
        self._case, self._lab, self._folder = case, lab, folder
        self._pids: list[int] = []
        lasts = "" if case.lasts is None else f" for {case.lasts:g} s"
        self.sort = f"link {case.fault}{lasts}"

    def run(self) -> list[dict[str, Any]]:
        """Plant the fault, mend it, and check what the ranks say of that; return what they do."""
        case, host = self._case, self._case.host
        plant, mend = FAULTS[case.fault]
        self._await("ready", 30.0)
        self._pids = [int(text) for text in self._await("pid", 1.0)]
        if case.fault == "vanished":
            plant(self._lab, host)
        (self._folder / "go").touch()
        began = time.monotonic()
        if case.fault != "vanished":
            time.sleep(case.after)
            plant(self._lab, host)
        limit = case.timeout + GRACE + (MAKING if case.fault == "vanished" else 0)
        if case.lasts is not None and case.lasts <= limit:
            time.sleep(case.lasts)
            mend(self._lab, host)
        first = self._heard("first", limit - (time.monotonic() - began), case.timeout)
        noticed = case.fault != "loses packets" or _lost(self._lab, host) > 0
        lasting = case.lasts is None or case.lasts > limit
        if lasting and not case.stays:
            mend(self._lab, host)
        said = first
        if case.again:
            (self._folder / "mended").touch()
            said = first + self._heard("second", case.timeout + GRACE, case.timeout)
        self._have_ended()
        kinds = {one["kind"] for one in first}
        least = case.lasts or (_SLOW_SECONDS if case.fault == "slow" else 0.0)
        if kinds == {"right"} and (not noticed or max(one["seconds"] for one in first) < least):
            self.sort += ", too late"
        if case.must == "right":
            assert kinds == {"right"}, f"all must be right: {first}"
        if case.must == "error":
            assert "right" not in kinds, f"none can be right: {first}"
        return said

    def _have_ended(self) -> None:
        left = living(self._pids, 20.0)
        assert not left, f"of the ranks {self._pids} some have not ended: {left}"

    def _heard(self, what: str, seconds: float, timeout: float) -> list[dict[str, Any]]:
        """Wait for the ranks' reports of an operation, and check them."""
        try:
            said = [json.loads(text) for text in self._await(what, seconds)]
        except AssertionError:
            self._watched()
            raise
        digests = {one["text"] for one in said if one["kind"] == "right"}
        assert len(digests) <= 1, f"ranks have different bits: {said}"
        making = self._case.fault == "vanished"
        names = "making a communicator on axis 'dp'" if making else f"{self._case.op} number "
        for one in said:
            if one["kind"] == "right":
                continue
            assert one["kind"] in ERRORS, said
            assert names in one["text"], said
            assert one["seconds"] < timeout + GRACE + (MAKING if making else 0), said
        return said

    def _watched(self) -> None:
        """Raise if MPI has ended a rank, or does not come back to it, which ends the job."""
        deadline = time.monotonic() + WATCHED - GRACE
        while time.monotonic() < deadline:
            output = (self._folder / ".output").read_text(errors="replace")
            for words, outcome in _ENDS.items():
                for line in output.splitlines():
                    if words in line:
                        assert f": {self._case.op} number " in line or "Fatal" in words, line
                        self._have_ended()
                        raise _EndedError(outcome)
            if self._case.leaves and not living(self._pids, 0.0):
                raise _EndedError("ended by the launcher after an error")
            time.sleep(0.1)

    def _await(self, what: str, seconds: float) -> list[str]:
        """Wait for a file of every rank; return what is in them."""
        files = [self._folder / f"{what}.{rank}" for rank in range(HOSTS)]
        deadline = time.monotonic() + seconds
        while not all(file.exists() for file in files):
            missing = [file.name for file in files if not file.exists()]
            there = [file.read_text(encoding="utf-8") for file in files if file.exists()]
            assert time.monotonic() < deadline, f"no {missing} within {seconds:.1f} s; there are {there}"
            time.sleep(0.01)
        return [file.read_text(encoding="utf-8") for file in files]

"""Sends and receives by the compiled engine: the bits of Python's, MPI's order, and messages that do not fit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.engine.groups import native_engine
from hybridcomp.policy.toml import parse_policy
from tests.mpi.conftest import WORLD, communicator, gaussian, step_by_step, verdict

pytestmark = pytest.mark.ranks(least=2)  # one rank compresses no message
ME, P = WORLD.rank, WORLD.size
RIGHT, LEFT = (ME + 1) % P, (ME - 1) % P
CODECS = [
    "int8",
    "int4:rounding=stochastic",
    "bf16",
    "topk:ratio=0.1",
    "sign",
    "fp8",
    "zfp:rate=8",
    "lossless",
]


@pytest.fixture
def make() -> Iterator[Callable[..., hc.Communicator]]:
    """Make communicators; freed after the test. Python runs them where they are not ``compiled``."""
    made: list[hc.Communicator] = []

    def factory(policy: object = "none", *, compiled: bool = True, timeout: float = 30) -> hc.Communicator:
        made.append(communicator(policy, timeout=timeout))
        if not compiled:
            step_by_step(made[-1])
        # First messages are posted by threads of their own, and are not the engine's.
        word = np.zeros(1, np.uint8)
        for _ in range(2):
            made[-1].Sendrecv(np.ones(1, np.uint8), RIGHT, 0, word, LEFT, 0)
        return made[-1]

    yield factory
    for comm in made:
        comm.Free()


def compiled(comm: hc.Communicator) -> int:
    """Count the programs of sends and receives that a communicator has."""
    programs = comm.session.message_programs
    return 0 if programs is None else sum(program is not None for program in programs._programs.values())


@pytest.mark.ranks(most=4)
@pytest.mark.parametrize("codec", CODECS)
def test_same_bits_as_in_python(make, codec):
    comms = [make(compiled=compiled) for compiled in (True, False)]
    wrong = []
    for n in (1, 2, 255, 10_001):
        for dtype in ("float32", "float64", "float16"):
            for blocking in (False, True):
                got = []
                for comm in comms:
                    out, status = np.full(n + 3, 7, dtype), MPI.Status()
                    x = gaussian(n, dtype=dtype)
                    if blocking and ME == 0:
                        comm.Send(x, RIGHT, 5, codec=codec)
                        comm.Recv(out, LEFT, 5, status, codec=codec)
                    elif blocking:
                        comm.Recv(out, LEFT, 5, status, codec=codec)
                        comm.Send(x, RIGHT, 5, codec=codec)
                    else:
                        request = comm.Irecv(out, MPI.ANY_SOURCE, MPI.ANY_TAG, codec=codec)
                        comm.Isend(x, RIGHT, 5, codec=codec).wait()
                        request.Wait(status)
                    got.append((out.tobytes(), status.Get_source(), status.Get_tag(), status.Get_count()))
                    wrong += [] if (out[n:] == 7).all() else [(n, dtype, "past the end")]
                wrong += (
                    [] if got[0] == got[1] and got[0][1:] == (LEFT, 5, x.nbytes) else [(n, dtype, got[0][1:])]
                )
    verdict(not wrong, str(wrong))
    verdict(compiled(comms[1]) == 0 and (compiled(comms[0]) > 0) == (codec != "lossless"))


def test_messages_keep_the_order_of_their_tag(make):
    """Encoded and plain, blocking and not, in any order of sizes."""
    comm = make(parse_policy("[dp]\nsend = { codec = 'int8', min_bytes = 4096 }\n", "test"))
    sizes = [1, 70_000, 3, 1024, 5, 300_000, 2, 1023, 1025, 1]
    sent, requests = [], []
    incoming = [np.zeros(n, np.float32) for n in sizes]
    for i, out in enumerate(incoming):
        if i % 2:
            requests.append(comm.Irecv(out, LEFT, 3))
    # The blocking receives are of the messages that are sent first, so these are posted in one order.
    for i, n in enumerate(sizes):
        if i % 2:
            x = np.full(n, i + 1, np.float32)
            sent.append(x)
            requests.append(comm.Isend(x, RIGHT, 3))
    for request in requests:
        request.wait()
    for i in range(0, len(sizes), 2):
        comm.Sendrecv(np.full(sizes[i], i + 1, np.float32), RIGHT, 3, incoming[i], LEFT, 3)
    verdict(all((out == i + 1).all() for i, out in enumerate(incoming)))


def test_shorter_messages_and_other_codecs(make):
    """A receiver takes what fits, by whatever codec: also by one that compiled code does not decode."""
    comm = make()
    for codec in ("int8", "lossless", "none", "topk:ratio=0.5"):
        x, out, status = gaussian(1000), np.full(5000, 7, np.float32), MPI.Status()
        request = comm.Irecv(out, LEFT, 1, codec="int8")
        comm.Isend(x, RIGHT, 1, codec=codec).wait()
        request.Wait(status)
        want = hc.decode(hc.get_codec(codec).encode(gaussian(1000, LEFT)))
        verdict(out[:1000].tobytes() == want.tobytes() and bool((out[1000:] == 7).all()), codec)
        verdict(status.Get_count(MPI.FLOAT) == 1000)


def test_memory_of_messages_is_used_again(make):
    comm = make()
    x, out = gaussian(50_000), np.empty(50_000, np.float32)
    used = []
    for i in range(60):
        request = comm.Irecv(out, LEFT, 1, codec="int8")
        comm.Isend(x, RIGHT, 1, codec=("int8", "lossless")[i % 2]).wait()
        request.wait()
        used.append(native_engine().engine_used_bytes())
    verdict(used[-1] == used[10], str(used[::10]))


@pytest.mark.parametrize("codec", ["int8", "none"])
def test_a_message_that_is_too_long(make, codec):
    comm = make(timeout=10)
    out = np.empty(100, np.float32)
    request = comm.Irecv(out, LEFT, 1, codec="int8")
    sent = comm.Isend(gaussian(120), RIGHT, 1, codec=codec)
    with pytest.raises(hc.MismatchError, match=rf"rank {LEFT} sent"):
        request.wait()
    sent.wait()
    request = comm.Irecv(out, LEFT, 1, codec="int8")
    sent = comm.Isend(gaussian(60_000), RIGHT, 1, codec=codec)
    with pytest.raises(hc.MismatchError, match="sent more than this rank has room for"):
        request.wait()
    sent.wait()
    verdict(True)


def test_a_message_of_another_dtype(make):
    comm = make(timeout=10)
    request = comm.Irecv(np.empty(100, np.float32), LEFT, 1, codec="int8")
    sent = comm.Isend(gaussian(10, dtype=np.float64), RIGHT, 1, codec="int8")
    with pytest.raises(hc.MismatchError, match=rf"rank {LEFT} sent 10 float64"):
        request.wait()
    sent.wait()
    verdict(True)


def test_a_damaged_message(make):
    comm = make(timeout=10)
    for blocking in (False, True):
        native_engine().engine_damage(RIGHT, 500)
        x, out = gaussian(1000), np.empty(1000, np.float32)
        sent = comm.Isend(x, RIGHT, 1, codec="int8")
        receive = comm.Recv if blocking else lambda *how, **codec: comm.Irecv(*how, **codec).wait()
        with pytest.raises(hc.WireError):
            receive(out, LEFT, 1, codec="int8")
        sent.wait()
        verdict(True)


def test_nobody_sends(make):
    comm = make(timeout=0.5)
    out = np.empty(1000, np.float32)
    for receive in (
        lambda: comm.Recv(out, LEFT, 9, codec="int8"),
        lambda: comm.Irecv(out, codec="int8").wait(),
    ):
        began = time.monotonic()
        with pytest.raises(hc.CollectiveTimeoutError, match="recv number"):
            receive()
        verdict(time.monotonic() - began < 10)


def test_receives_can_be_cancelled(make):
    comm = make()
    out = np.zeros(3000, np.float32)
    request = comm.Irecv(out, LEFT, 7, codec="int8")
    verdict(request.cancel())
    request.wait()
    verdict(
        request.status.Is_cancelled() and request.status.Get_count(MPI.BYTE) == 0 and not request.cancel()
    )
    again = comm.Irecv(out, LEFT, 7, codec="int8")
    sent = comm.Isend(np.ones(3000, np.float32), RIGHT, 7, codec="int8")
    again.wait()
    verdict(not again.status.Is_cancelled() and bool(out.all()) and not sent.cancel())
    sent.wait()


def test_many_threads(make):
    """Each with a tag of its own, both ways at once."""
    comm = make()
    faults: list[str] = []

    def talk(tag: int) -> None:
        for i in range(40):
            n = (i * 37 + tag * 101) % 4000 + 1
            x, out = np.full(n, tag + i, np.float32), np.zeros(n, np.float32)
            request = comm.Irecv(out, LEFT, tag, codec="int8")
            if i % 2:
                comm.Isend(x, RIGHT, tag, codec="int8").wait()
            else:
                comm.Sendrecv(x, RIGHT, 100 + tag, np.empty_like(x), LEFT, 100 + tag, codec="int8")
                comm.Isend(x, RIGHT, tag, codec="int8").wait()
            request.wait()
            if not np.allclose(out, tag + i, rtol=0.01):
                faults.append(f"tag {tag}, message {i}: {out[:3]}")

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    verdict(not faults and not any(thread.is_alive() for thread in threads), str(faults[:3]))


def test_what_is_counted(make):
    comm = make()
    x, out = gaussian(10_000), np.empty(10_000, np.float32)
    for _ in range(3):
        request = comm.Irecv(out, LEFT, 1, codec="int8")
        comm.Isend(x, RIGHT, 1, codec="int8").wait()
        request.wait()
    rows = {row.op: row for row in comm.stats() if row.codec != "none" or row.op == "recv"}
    want = hc.get_codec("int8").encode(x).size | 1
    verdict(rows["send"].calls == 3 and rows["send"].wire_bytes == 3 * want)
    verdict(rows["send"].raw_bytes == 3 * x.nbytes and rows["send"].encode_seconds > 0)
    verdict(rows["recv"].calls >= 3 and rows["recv"].wire_bytes == 0)


@pytest.mark.parametrize("codec", ["int8", "none"])
def test_nobody_receives(make, codec):
    """A send that ends early is not cancelled, which some MPIs do not survive."""
    comm = make(timeout=0.5)
    for post in (comm.Isend, comm.Issend):
        request = post(gaussian(4_000_000), RIGHT, 9, codec=codec)
        with pytest.raises(hc.CollectiveTimeoutError, match=rf"send number .*waiting for rank {RIGHT}"):
            request.wait()
    verdict(True)

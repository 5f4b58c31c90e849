"""Operations on a device's memory that go wrong: ranks that do not come, damage, other codecs, and MPI's awareness."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.device import DeviceArray, Queue
from tests.cuda.common import to_device
from tests.mpi.conftest import WORLD, verdict
from tests.mpi.device.devices import RANK, SIZE, agrees, both, empty, sums_agree, values

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_mixed_buffers_are_an_error(make, way):
    comm = make("int8")
    x, y = both(values(10, "float32"), "float32")
    with pytest.raises(TypeError, match="one buffer is on a device and the other in host memory"):
        comm.Allreduce(x, y)
    with pytest.raises(TypeError, match="one buffer is on a device"):
        comm.Allgather(y, empty(10 * SIZE, "float32")[0])


def error_of(run: Callable[[], Any]) -> Exception | None:
    try:
        run()
    except hc.HybridcompError as error:
        return error
    return None


MIXES = [
    *(("none", "allreduce", 0), ("int8", "allreduce", 0), ("topk:ratio=0.05", "allreduce", 0)),
    *(("bf16", "allgather", 0), ("int8", "bcast", 0), ("int8", "bcast", 1)),
]


@pytest.mark.ranks(least=2)
@pytest.mark.parametrize(("codec", "operation", "root"), MIXES)
def test_ranks_with_their_arrays_in_different_memory_are_named(make, way, codec, operation, root):
    comm = make(codec)
    n = 30_011
    array = both(values(n, "float32"), "float32")[RANK % 2]
    room = empty(n * SIZE, "float32")[RANK % 2]
    calls = {
        "allreduce": lambda: comm.Allreduce(MPI.IN_PLACE, array),
        "allgather": lambda: comm.Allgather(array, room),
        "bcast": lambda: comm.Bcast(array, root),
    }
    began = time.monotonic()
    error, kind = error_of(calls[operation]), hc.MismatchError
    if error is None and operation == "bcast":  # it waits for nobody: the next operation says so
        time.sleep(1)
        error, kind = error_of(lambda: comm.Allreduce(MPI.IN_PLACE, values(n, "float32"))), hc.RemoteError
    on_device, on_host = (", ".join(map(str, range(first, SIZE, 2))) for first in (0, 1))
    words = f"the arrays lie on a device on rank {on_device} and in host memory on rank {on_host}"
    verdict(isinstance(error, kind) and words in str(error), repr(error))
    verdict(time.monotonic() - began < 10)


@pytest.mark.ranks(least=2)
def test_ranks_with_their_arrays_in_different_memory_are_named_before_data_moves(way):
    comm = hc.Communicator(WORLD, "int8", detail=True)
    array = both(values(30_011, "float32"), "float32")[RANK == SIZE - 1]
    error = error_of(lambda: comm.Allreduce(MPI.IN_PLACE, array))
    verdict(
        isinstance(error, hc.MismatchError) and "float32, reduction sum, on a device" in str(error),
        repr(error),
    )
    comm.Free()


@pytest.mark.ranks(least=2)
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_late_rank_has_nothing_to_answer_for(make, way, codec):
    """The others ask where its arrays lie while they wait, and none is in trouble."""
    comm = make(codec)
    x, y = both(values(30_011, "float32"), "float32")
    for array in (x, y):
        if RANK == SIZE - 1:
            time.sleep(1)
        comm.Allreduce(MPI.IN_PLACE, array)
    sums_agree(codec, x, y)
    verdict(not comm.session.notices.troubled)


def host_copy(data: Any) -> np.ndarray:
    """Return a message's bytes, which may lie on a device."""
    if isinstance(data, DeviceArray):
        return Queue(data.runtime, data.runtime.current_stream(data.owner)).read(data).copy()
    return np.array(data, np.uint8)


def test_a_rank_that_does_not_come_is_named(make, way):
    comm = make("bf16", timeout=0.6)
    absent = SIZE - 1
    if absent and absent != RANK:
        with pytest.raises(
            hc.CollectiveTimeoutError, match=rf"all_reduce number .*rank {RANK} of .*{absent}"
        ):
            comm.Allreduce(MPI.IN_PLACE, to_device(values(5000, "float32")))
    verdict(True)


def test_a_device_that_does_not_come_is_named():
    from hybridcomp.collectives.execution.progress import engine
    from hybridcomp.collectives.execution.steps import Pending

    class Never:
        def done(self) -> bool:
            return False

    def steps() -> Any:
        yield Pending([], [], events=[Never()])

    request = engine().start(steps(), "a sum", 0.2)
    with pytest.raises(hc.CollectiveTimeoutError, match=r"a sum did not end .* still waiting for the device"):
        request.wait()


@pytest.mark.parametrize("codec", ["topk:ratio=0.3,values=(int8:block=64)", "int8", "lattice"])
def test_damage_of_what_only_the_device_checks(make, way, codec, monkeypatch):
    """A bit of a payload is changed, and its CRC is right for it."""
    if SIZE == 1:
        return
    from hybridcomp.collectives.device import mailbox as mail
    from tests.codecs.common import reseal

    comm = make(codec)
    sent = mail.Outgoing.wire
    bits = np.random.default_rng(3).integers(32 * 8, 300 * 8, 20)
    for bit in bits:
        x = to_device(values(4000, "float32"))
        with monkeypatch.context() as patch:
            if RANK == SIZE - 1:

                def forged(self: Any, bit: int = bit) -> Any:
                    data = host_copy(sent(self))
                    data[bit // 8] ^= 1 << (bit % 8)
                    return reseal(data)

                patch.setattr(mail.Outgoing, "wire", forged)
            said = None
            try:
                if RANK == SIZE - 1:
                    comm.Send(x, 0)
                elif RANK == 0:
                    comm.Recv(x, SIZE - 1)
            except hc.HybridcompError as error:
                said = error
        # Some bits matter to nobody, and some say that it is another codec's message.
        ok = (
            said is None
            or isinstance(said, hc.MismatchError)
            or (
                isinstance(said, hc.WireError)
                and "recv on axis 'dp': rank 0 got a damaged message" in str(said)
            )
        )
        verdict(ok, repr(said))


@pytest.mark.parametrize("where", [3, 9, 40, 1000])
@pytest.mark.parametrize("operation", ["allreduce", "allgather", "bcast", "recv"])
def test_damage_names_operation_axis_and_rank(make, way, operation, where, monkeypatch):
    """A peer's bit is flipped on its way: in the magic, the count, the payload."""
    if SIZE == 1:
        return
    comm = make("bf16", timeout=1.0)
    transport = comm.session.message_transport if operation == "recv" else comm.session.transport
    if RANK == SIZE - 1:
        from hybridcomp.collectives.device import mailbox as mail

        sent = mail.Outgoing.wire

        def damaged(self: Any) -> Any:
            data = host_copy(sent(self))
            data[where] ^= 1
            return data

        monkeypatch.setattr(mail.Outgoing, "wire", damaged)
    x = to_device(values(4000, "float32"))
    caught = None
    try:
        if operation == "allreduce":
            comm.Allreduce(MPI.IN_PLACE, x)
        elif operation == "allgather":
            comm.Allgather(x, to_device(np.zeros(4000 * SIZE, np.float32)))
        elif operation == "bcast":
            comm.Bcast(x, SIZE - 1)
        elif RANK == SIZE - 1:
            for q in range(SIZE - 1):
                comm.Send(x, q, 1)
        else:
            comm.Recv(x, SIZE - 1, 1)
    except (hc.WireError, hc.RemoteError, hc.CollectiveTimeoutError) as error:
        caught = error
    monkeypatch.undo()
    found = WORLD.allgather(repr(caught) if isinstance(caught, hc.WireError) else "")
    named = {"allreduce": "all_reduce", "allgather": "all_gather", "bcast": "broadcast", "recv": "recv"}
    assert any(found)
    for rank, text in enumerate(found):
        assert not text or f"{named[operation]} on axis 'dp': rank {rank} got a damaged message" in text, text
    assert transport is not None
    WORLD.Barrier()


def test_another_codec_names_both_sides(make, way):
    if SIZE == 1:
        return
    comm = make("none", timeout=1.0)
    codec = "bf16" if RANK == 0 else "fp16"
    with pytest.raises((hc.MismatchError, hc.RemoteError)) as caught:
        comm.Allreduce(MPI.IN_PLACE, to_device(values(5000, "float32")), codec=codec)
    mismatches = WORLD.allreduce(int(isinstance(caught.value, hc.MismatchError)))
    verdict(mismatches > 0)


@pytest.mark.parametrize("n", [100, 5000, 200_000])
def test_messages_whose_length_only_the_device_knows(make, way, n, monkeypatch):
    """A length word that is copied with a short message, and before a long one; the send has the true length."""
    from hybridcomp.codecs.device import driver_of
    from hybridcomp.collectives.algorithms import selection as choosing

    codec = type(hc.get_codec("bf16"))
    driver, bound = type(driver_of(codec.wire_id)), codec.bound
    known = driver.encode
    monkeypatch.setattr(choosing, "chunk_bytes", lambda *_: 1 << 20)  # the usual size depends on bound

    def unknown(self: Any, codec: Any, src: Any, dtype: Any, payload: Any, queue: Any) -> Any:
        length = queue.array(1, np.uint64)
        queue.write(length, np.array([known(self, codec, src, dtype, payload, queue)], np.uint64))
        return length

    comm = make("bf16")
    sizes = []
    with monkeypatch.context() as patch:
        patch.setattr(driver, "encode", unknown)
        patch.setattr(codec, "bound", lambda *args: bound(*args) + 5000)
        x, y = both(values(n, "float32"), "float32")
        out, _ = empty(n * SIZE, "float32")
        comm.Allreduce(MPI.IN_PLACE, x, algorithm="direct")  # the usual one depends on bound, too
        comm.Allgather(x, out)
        comm.Bcast(x, 0)
        right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
        got = empty(n, "float32")[0]
        for request in [comm.Isend(x, right), comm.Irecv(got, left)]:
            request.wait()
        sizes = [row.wire_bytes for row in comm.stats()]
    other = make("bf16")
    want = empty(n * SIZE, "float32")[1]
    other.Allreduce(MPI.IN_PLACE, y, algorithm="direct")
    other.Allgather(y, want)
    other.Bcast(y, 0)
    last = empty(n, "float32")[1]
    for request in [other.Isend(y, right), other.Irecv(last, left)]:
        request.wait()
    agrees(x, y)
    agrees(out, want)
    agrees(got, last)
    verdict(SIZE == 1 or sizes == [row.wire_bytes for row in other.stats()], "bytes on the wire")


def test_awareness_of_this_mpi(make, monkeypatch):
    """The control variable that says so is read through MPI's tools interface."""
    from hybridcomp.collectives.device import cuda_aware as module

    monkeypatch.delenv("HYBRIDCOMP_CUDA_AWARE", raising=False)
    module.awareness.cache_clear()
    library = module._library()
    found = module.decide({}, library)
    if "MPICH" in library.version:
        assert library.variable("MPIR_CVAR_ENABLE_GPU") in (0, 1)
        assert library.query is not None
        assert library.variable("no_such_variable") is None
    comm = make("int8")
    verdict(comm.session.cuda_aware.messages == found.messages)
    module.awareness.cache_clear()


def test_ranks_agree_on_awareness(make, monkeypatch):
    from hybridcomp.collectives.device.cuda_aware import awareness

    monkeypatch.setenv("HYBRIDCOMP_CUDA_AWARE", "01"[RANK != SIZE - 1])
    awareness.cache_clear()
    comm = make("bf16")
    verdict(not comm.session.cuda_aware.messages)
    x, y = both(values(1000, "float32"), "float32")
    comm.Allreduce(MPI.IN_PLACE, x)
    comm.Allreduce(MPI.IN_PLACE, y)
    agrees(x, y)
    awareness.cache_clear()

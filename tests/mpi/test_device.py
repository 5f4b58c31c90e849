"""Operations on a device's memory: the bits that the host path gives, for every operation and codec.

The device is the emulation, whose streams run only what somebody waits for: a wait that is missing shows as wrong
bytes. HYBRIDCOMP_TEST_DEVICE=cuda takes the GPU, which all ranks then share.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.arrays import as_dtype
from hybridcomp.policy.toml import parse_policy
from tests.codecs.common import SPECS
from tests.cuda.common import host_array, to_device, to_host
from tests.mpi.conftest import WORLD, gaussian, identical, verdict

RANK, SIZE = WORLD.rank, WORLD.size
CODECS = ["none", "bf16", "int8", "topk:ratio=0.05"]
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(params=["staged", "direct"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Through pinned memory, or with an MPI that takes device pointers: the emulation's are the host's."""
    from hybridcomp.collectives.awareness import VARIABLE, awareness

    if os.environ.get("HYBRIDCOMP_TEST_DEVICE") == "cuda" and request.param == "direct":
        awareness.cache_clear()
        if not awareness().messages:
            pytest.skip("this MPI takes no device pointers")
    monkeypatch.setenv(VARIABLE, "1" if request.param == "direct" else "0")
    awareness.cache_clear()
    yield request.param
    monkeypatch.undo()
    awareness.cache_clear()


def values(n: int, dtype: str, rank: int = RANK, seed: int = 1) -> np.ndarray:
    """The storage of a rank's values."""
    x = gaussian(n, rank, seed)
    if dtype == "bfloat16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(dtype)


def both(storage: np.ndarray, dtype: str) -> tuple[Any, Any]:
    """The same values on the device and in host memory."""
    return to_device(storage, as_dtype(dtype)), host_array(storage.copy(), dtype)


def empty(n: int, dtype: str) -> tuple[Any, Any]:
    return both(np.full(n, 7, as_dtype(dtype).storage), dtype)


def agrees(device: Any, host: Any, what: str = "") -> None:
    """The device's bits are the host path's, on every rank."""
    got, want = to_host(device), np.asarray(hc.arrays.flatten(host).data)
    ok = got.tobytes() == want.tobytes()
    wrong = "" if ok else f"first at {np.flatnonzero(got.reshape(-1) != want.reshape(-1))[:5]}"
    verdict(ok, f"{what} {wrong}")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("codec", CODECS)
def test_allreduce(make, way, codec, dtype):
    comm = make(codec)
    for n in (0, 1, 1000, 40_003):
        x, y = both(values(n, dtype), dtype)
        out, want = empty(n, dtype)
        comm.Allreduce(x, out)
        comm.Allreduce(y, want)
        agrees(out, want, f"{n} {dtype}")
        comm.Allreduce(MPI.IN_PLACE, x, "avg")
        comm.Allreduce(MPI.IN_PLACE, y, "avg")
        agrees(x, y, f"average of {n} {dtype} in place")


@pytest.mark.parametrize("spec", SPECS)
def test_every_codec(make, way, spec):
    comm = make(spec)
    x, y = both(values(3001, "float32").reshape(1, 3001), "float32")
    out, want = empty(3001 * SIZE, "float32")
    comm.Allgather(x, out)
    comm.Allgather(y, want)
    comm.Allreduce(MPI.IN_PLACE, x)
    comm.Allreduce(MPI.IN_PLACE, y)
    if "powersgd" in spec:  # a device's matrix products round in other places
        verdict(identical(to_host(out)) and identical(to_host(x)))
    else:
        agrees(out, want, spec)
        agrees(x, y, spec)


@pytest.mark.parametrize("codec", CODECS)
def test_several_chunks(make, way, codec):
    comm = make(codec)
    n = 1_500_000 if SIZE < 4 else 2_200_000
    x, y = both(values(n, "float16"), "float16")
    comm.Allreduce(MPI.IN_PLACE, x)
    comm.Allreduce(MPI.IN_PLACE, y)
    agrees(x, y)


@pytest.mark.parametrize("codec", CODECS)
def test_reduce_scatter_block(make, way, codec):
    comm = make(codec)
    for n in (0, 3, 20_001):
        x, y = both(values(n * SIZE, "float32"), "float32")
        out, want = empty(n, "float32")
        comm.Reduce_scatter_block(x, out, "avg")
        comm.Reduce_scatter_block(y, want, "avg")
        agrees(out, want)
        comm.Reduce_scatter_block(MPI.IN_PLACE, x)
        comm.Reduce_scatter_block(MPI.IN_PLACE, y)
        agrees(x[:n], y[:n], "in place")


@pytest.mark.parametrize("codec", CODECS)
def test_allgather(make, way, codec):
    comm = make(codec)
    for n in (0, 3, 20_001):
        x, y = both(values(n, "float32"), "float32")
        out, want = empty(n * SIZE, "float32")
        comm.Allgather(x, out)
        comm.Allgather(y, want)
        agrees(out, want)
        comm.Allgather(out[RANK * n : (RANK + 1) * n], out)  # as FSDP2 does
        comm.Allgather(want[RANK * n : (RANK + 1) * n], want)
        agrees(out, want, "a slice of the output")
        comm.Allgather(out[:n], out)
        comm.Allgather(want[:n], want)
        agrees(out, want, "another slice of the output")


@pytest.mark.parametrize("codec", CODECS)
def test_alltoall(make, way, codec):
    comm = make(codec)
    n = 5001
    x, y = both(values(n * SIZE, "float32"), "float32")
    out, want = empty(n * SIZE, "float32")
    comm.Alltoall(x, out)
    comm.Alltoall(y, want)
    agrees(out, want)
    comm.Alltoall(MPI.IN_PLACE, x)
    agrees(x, want, "in place")
    counts = [[(r * 7919 + q * 104_729) % 3000 * (q != 1) for q in range(SIZE)] for r in range(SIZE)]
    x, y = both(values(sum(counts[RANK]), "float32"), "float32")
    out, want = empty(3000 * SIZE, "float32")  # with gaps, which stay as they are
    layout = ([row[RANK] for row in counts], [3000 * r for r in range(SIZE)])
    comm.Alltoallv([x, counts[RANK]], [out, layout])
    comm.Alltoallv([y, counts[RANK]], [want, layout])
    agrees(out, want, "parts of different sizes")


@pytest.mark.parametrize("codec", CODECS)
def test_bcast(make, way, codec):
    comm = make(codec)
    for root in range(SIZE):
        for n in (0, 5, 300_001):
            x, y = both(values(n, "float32"), "float32")
            comm.Bcast(x, root)
            comm.Bcast(y, root)
            agrees(x, y, f"{n} from {root}")


@pytest.mark.parametrize("codec", CODECS)
def test_sends(make, way, codec):
    comm = make(codec)
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for n in (0, 1, 50_003):
        x, y = both(values(n, "float32"), "float32")
        out, want = empty(n + 3, "float32")  # longer than the message: the rest stays as it was
        requests = [comm.Isend(x, right, 5), comm.Irecv(out, left, 5)]
        requests += [comm.Isend(y, right, 6), comm.Irecv(want, left, 6)]
        for request in requests:
            request.wait()
        agrees(out, want)


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_sends_of_one_tag_keep_their_order(make, way, codec):
    """Whoever waits for a device is not overtaken by who need not."""
    comm = make(codec)
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    sent = [values(100, "float32", seed=i) for i in range(6)]
    requests = [comm.Isend(to_device(x) if i % 2 else x, right, 3) for i, x in enumerate(sent)]
    got = [empty(100, "float32")[i % 3 == 0] for i in range(6)]
    requests += [comm.Irecv(x, left, 3) for x in got]
    for request in requests:
        request.wait()
    for i, x in enumerate(got):
        other = values(100, "float32", left, seed=i)
        host = to_host(x) if hasattr(x, "get") or hasattr(x, "is_cuda") else x
        verdict(bool(np.allclose(host, other, rtol=0.01)), f"message {i}")


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8", "complex64"])
def test_other_dtypes(make, way, dtype):
    comm = make("int8")
    x, y = both((np.arange(10_000) % 7 + RANK).astype(dtype), dtype)
    if dtype != "bool":
        comm.Allreduce(MPI.IN_PLACE, x)
        comm.Allreduce(MPI.IN_PLACE, y)
        agrees(x, y)
    comm.Bcast(x, SIZE - 1)
    comm.Bcast(y, SIZE - 1)
    agrees(x, y)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_mpis_own_reductions(make, way, dtype):
    comm = make("int8")
    x, y = both(values(3000, dtype), dtype)
    comm.Allreduce(MPI.IN_PLACE, x, MPI.MAX)
    comm.Allreduce(MPI.IN_PLACE, y, MPI.MAX)
    agrees(x, y)
    out, want = empty(3000, dtype)
    comm.Reduce(x, out, MPI.PROD, SIZE - 1)
    comm.Reduce(y, want, MPI.PROD, SIZE - 1)
    agrees(out, want)


def test_rooted_operations(make, way):
    comm = make("int8")
    x, y = both(values(300, "float32"), "float32")
    every, want = empty(300 * SIZE, "float32")
    comm.Gather(x, every if RANK == 0 else None)
    comm.Gather(y, want if RANK == 0 else None)
    agrees(every, want)
    comm.Scatter(every if RANK == 0 else None, x)
    comm.Scatter(want if RANK == 0 else None, y)
    agrees(x, y)


@pytest.mark.parametrize("codec", ["lattice", "randomblock:ratio=0.2", "powersgd:rank=2", "sketch"])
def test_linear_codecs(make, way, codec):
    comm, other = make(codec), make(codec)
    x, y = both(values(9000, "float32").reshape(90, 100), "float32")
    comm.Allreduce(MPI.IN_PLACE, x)
    other.Allreduce(MPI.IN_PLACE, y)
    if "powersgd" in codec:  # a device's matrix products round in other places
        verdict(identical(to_host(x)))
        verdict(bool(np.allclose(to_host(x), y, rtol=1e-4, atol=1e-4)))
    else:
        agrees(x, y)


@pytest.mark.parametrize("codec", ["int4:block=128", "topk:ratio=0.05"])
@pytest.mark.parametrize("form", ["ef", "loco", "dgc", "ef21"])
def test_feedback(make, way, form, codec):
    how = f'{{ codec = "{codec}", feedback = "{form}" }}'
    policy = parse_policy(f"[dp]\nall_reduce = {how}\n", "test")
    comm, other = make(policy), make(policy)
    for step in range(4):
        for name, n in (("weight", 5003), ("large", 400_000)):
            x, y = both(values(n, "float32", seed=step), "float32")
            if step == 2:  # the memory moves to the host, and back
                x = host_array(to_host(x), "float32")
            comm.Allreduce(MPI.IN_PLACE, x, "avg", name=name)
            other.Allreduce(MPI.IN_PLACE, y, "avg", name=name)
            if step != 2:
                agrees(x, y, f"{name}, step {step}")


@pytest.mark.parametrize("form", ["ef", "loco", "dgc"])
def test_feedback_of_reduce_scatter(make, way, form):
    policy = parse_policy(f'[fsdp]\nreduce_scatter = {{ codec = "int8", feedback = "{form}" }}\n', "test")
    comm, other = make(policy, "fsdp"), make(policy, "fsdp")
    for step in range(3):
        x, y = both(values(5003 * SIZE, "float32", seed=step), "float32")
        out, want = empty(5003, "float32")
        comm.Reduce_scatter_block(x, out, name="weight")
        other.Reduce_scatter_block(y, want, name="weight")
        agrees(out, want, f"step {step}")


def test_feedback_on_host_and_device_ranks(make, way):
    policy = parse_policy('[dp]\nall_reduce = { codec = "int8", feedback = "ef" }\n', "test")
    comm, other = make(policy), make(policy)
    for step in range(3):
        x, y = both(values(3000, "float32", seed=step), "float32")
        z = host_array(values(3000, "float32", seed=step), "float32")
        comm.Allreduce(MPI.IN_PLACE, (x, y)[RANK % 2], name="weight")
        other.Allreduce(MPI.IN_PLACE, z, name="weight")
        verdict((y if RANK % 2 else to_host(x)).tobytes() == z.tobytes(), f"step {step}")


@pytest.mark.parametrize("codec", CODECS)
def test_host_and_device_ranks_in_one_operation(make, way, codec):
    comm, other = make(codec), make(codec)
    mine = RANK % 2
    x, y = both(values(30_011, "float32"), "float32")
    out, want = empty(30_011 * SIZE, "float32")
    comm.Allgather((x, y)[mine], (out, want)[mine])
    comm.Allreduce(MPI.IN_PLACE, (x, y)[mine])
    comm.Bcast((x, y)[mine], SIZE - 1)
    z = host_array(values(30_011, "float32"), "float32")
    every = np.zeros(30_011 * SIZE, np.float32)
    other.Allgather(z, every)
    other.Allreduce(MPI.IN_PLACE, z)
    other.Bcast(z, SIZE - 1)
    verdict(identical(y if mine else to_host(x)))
    verdict((y if mine else to_host(x)).tobytes() == z.tobytes())
    verdict((want if mine else to_host(out)).tobytes() == every.tobytes())


def test_many_operations_in_flight(make, way):
    comms = [make("bf16"), make("none"), make("int8")]
    requests, pairs = [], []
    for i in range(18):
        x, y = both(values(1000 * (i % 5) + 17, "float32", seed=i), "float32")
        requests += [comms[i % 3].Iallreduce(MPI.IN_PLACE, x), comms[i % 3].Iallreduce(MPI.IN_PLACE, y)]
        pairs.append((x, y))
    order = np.random.default_rng(RANK).permutation(len(requests))
    for i in order:
        requests[i].wait()
    for i, (x, y) in enumerate(pairs):
        agrees(x, y, f"operation {i}")


def test_mixed_buffers_are_an_error(make, way):
    comm = make("int8")
    x, y = both(values(10, "float32"), "float32")
    with pytest.raises(TypeError, match="one buffer is on a device and the other in host memory"):
        comm.Allreduce(x, y)
    with pytest.raises(TypeError, match="one buffer is on a device"):
        comm.Allgather(y, empty(10 * SIZE, "float32")[0])


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
    from hybridcomp.collectives.engine import Pending, engine

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
    """A bit of a payload whose CRC is right for it."""
    if SIZE == 1:
        return
    from hybridcomp.collectives import device_mailbox as mail
    from tests.codecs.common import reseal

    comm = make(codec)
    sent = mail.Outgoing.wire
    bits = np.random.default_rng(3).integers(32 * 8, 300 * 8, 20)
    for bit in bits:
        x = to_device(values(4000, "float32"))
        with monkeypatch.context() as patch:
            if RANK == SIZE - 1:

                def forged(self: Any, bit: int = bit) -> Any:
                    data = np.array(np.asarray(sent(self)), np.uint8)
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
    transport = comm._p2p_transport if operation == "recv" else comm._transport
    if RANK == SIZE - 1:
        from hybridcomp.collectives import device_mailbox as mail

        sent = mail.Outgoing.wire

        def damaged(self: Any) -> Any:
            data = np.array(np.asarray(sent(self)), np.uint8)
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
    except (hc.WireError, hc.CollectiveTimeoutError) as error:
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
    with pytest.raises((hc.MismatchError, hc.CollectiveTimeoutError)) as caught:
        comm.Allreduce(MPI.IN_PLACE, to_device(values(5000, "float32")), codec=codec)
    mismatches = WORLD.allreduce(int(isinstance(caught.value, hc.MismatchError)))
    verdict(mismatches > 0)


@pytest.mark.parametrize("n", [100, 5000, 200_000])
def test_messages_whose_length_only_the_device_knows(make, way, n, monkeypatch):
    """A length word that is copied with a short message, and before a long one; the send has the true length."""
    from hybridcomp.codecs.device import driver_of

    codec = type(hc.get_codec("bf16"))
    driver, bound = type(driver_of(codec.wire_id)), codec.bound
    known = driver.encode

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
        comm.Allreduce(MPI.IN_PLACE, x)
        comm.Allgather(x, out)
        comm.Bcast(x, 0)
        right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
        got = empty(n, "float32")[0]
        for request in [comm.Isend(x, right), comm.Irecv(got, left)]:
            request.wait()
        sizes = [row.wire_bytes for row in comm.stats()]
    other = make("bf16")
    want = empty(n * SIZE, "float32")[1]
    other.Allreduce(MPI.IN_PLACE, y)
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
    from hybridcomp.collectives import awareness as module

    monkeypatch.delenv(module.VARIABLE, raising=False)
    module.awareness.cache_clear()
    library = module._library()
    found = module.decide({}, library)
    if "MPICH" in library.version:
        assert library.variable("MPIR_CVAR_ENABLE_GPU") in (0, 1)
        assert library.query is not None
        assert library.variable("no_such_variable") is None
    comm = make("int8")
    verdict(comm.cuda_aware.messages == found.messages)
    module.awareness.cache_clear()


@pytest.mark.skipif(WORLD.size == 1, reason="ranks differ")
def test_ranks_agree_on_awareness(make, monkeypatch):
    from hybridcomp.collectives.awareness import VARIABLE, awareness

    monkeypatch.setenv(VARIABLE, "01"[RANK != SIZE - 1])
    awareness.cache_clear()
    comm = make("bf16")
    verdict(not comm.cuda_aware.messages)
    x, y = both(values(1000, "float32"), "float32")
    comm.Allreduce(MPI.IN_PLACE, x)
    comm.Allreduce(MPI.IN_PLACE, y)
    agrees(x, y)
    awareness.cache_clear()

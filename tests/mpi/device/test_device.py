"""Operations on a device's memory: the bits that the host path gives, for every operation and codec.

The device is the emulation, whose streams run only what somebody waits for: a wait that is missing shows as wrong
bytes. HYBRIDCOMP_TEST_DEVICE=cuda takes the GPU, which all ranks then share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives import starting
from hybridcomp.collectives.data_path.schedule_run import run_schedule
from hybridcomp.policy import Policy, Rule
from hybridcomp.policy.toml import parse_policy
from tests.codecs.common import SPECS
from tests.cuda.common import host_array, to_device, to_host
from tests.mpi.conftest import identical, verdict
from tests.mpi.device.devices import CODECS, RANK, SIZE, agrees, both, empty, sums_agree, values

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
# Every form of each codec on three ranks and by one way, one of each otherwise.
ONE_EACH = list({spec.split(":")[0]: spec for spec in reversed(SPECS)}.values())
FORMS = [("direct", spec) for spec in (SPECS if SIZE == 3 else ONE_EACH)] + [("staged", s) for s in ONE_EACH]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("codec", CODECS)
def test_allreduce(make, way, codec, dtype):
    comm = make(codec)
    for n in (0, 1, 1000, 40_003):
        x, y = both(values(n, dtype), dtype)
        out, want = empty(n, dtype)
        comm.Allreduce(x, out)
        comm.Allreduce(y, want)
        sums_agree(codec, out, want, f"{n} {dtype}")
        comm.Allreduce(MPI.IN_PLACE, x, "avg")
        comm.Allreduce(MPI.IN_PLACE, y, "avg")
        sums_agree(codec, x, y, f"average of {n} {dtype} in place")


@pytest.mark.parametrize(("way", "spec"), FORMS, indirect=["way"])
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
        sums_agree(spec, x, y, spec)


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
        comm.Allgather(want[RANK * n : (RANK + 1) * n].copy(), want)  # plain mpi4py refuses the slice
        agrees(out, want, "a slice of the output")
        comm.Allgather(out[:n], out)
        comm.Allgather(want[:n].copy(), want)
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


def test_small_sends_go_as_they_are(make, way):
    comm = make(Policy("large", Rule((hc.get_codec("int8"),), min_bytes=4096)))
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for n in (0, 1, 1023, 1024, 1025):
        x, y = both(values(n, "float32"), "float32")
        out, want = empty(2000, "float32")
        for send, recv in ((x, want), (y, out)):  # from a device to a host, and back
            request = comm.Irecv(recv, left, 5)
            comm.Send(send, right, 5)
            request.wait()
        agrees(out, want, str(n))


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_sends_of_one_tag_keep_their_order(make, way, codec):
    """A send that waits for a device is not overtaken by one that need not."""
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


@pytest.mark.parametrize(
    "codec", ["lattice", "randomblock:ratio=0.2", "powersgd:rank=2", "sketch", "sketch:index=bloom"]
)
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
@pytest.mark.parametrize("form", ["ef", "loco", "dgc", "ef21", "ef-sgdm"])
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


@pytest.mark.parametrize("form", ["ef", "loco", "dgc", "ef-sgdm"])
def test_feedback_of_reduce_scatter(make, way, form):
    policy = parse_policy(f'[fsdp]\nreduce_scatter = {{ codec = "int8", feedback = "{form}" }}\n', "test")
    comm, other = make(policy, "fsdp"), make(policy, "fsdp")
    for step in range(3):
        x, y = both(values(5003 * SIZE, "float32", seed=step), "float32")
        out, want = empty(5003, "float32")
        comm.Reduce_scatter_block(x, out, name="weight")
        other.Reduce_scatter_block(y, want, name="weight")
        agrees(out, want, f"step {step}")


@pytest.mark.ranks(least=2)
@pytest.mark.parametrize("codec", ["none", "int8", "lattice"])
def test_arrays_in_host_memory_run_in_the_engine(make, way, codec, monkeypatch):
    """They do beside arrays on a device, which Python steps through, on one communicator."""
    stepped: list[Any] = []

    def run(carrier: Any, *arguments: Any, **how: Any) -> Any:
        stepped.append(carrier)
        return run_schedule(carrier, *arguments, **how)

    monkeypatch.setattr(starting, "run_schedule", run)
    comm = make(codec)
    x, y = both(values(30_011, "float32"), "float32")
    for array, on_device in ((x, True), (y, False), (x, True)):
        stepped.clear()
        comm.Allreduce(MPI.IN_PLACE, array)
        comm.Iallreduce(MPI.IN_PLACE, array).wait()
        if codec == "int8":
            comm.Bcast(array, SIZE - 1)
        steps = (
            3 if codec == "int8" and on_device else 0
        )  # MPI sums plain arrays, and the engine a linear codec's
        verdict(len(stepped) == steps, f"{len(stepped)} of {steps} operations in steps")
    verdict(identical(y))


def test_many_operations_in_flight(make, way):
    codecs = ["bf16", "none", "int8"]
    comms = [make(codec) for codec in codecs]
    requests, pairs = [], []
    for i in range(18):
        x, y = both(values(1000 * (i % 5) + 17, "float32", seed=i), "float32")
        requests += [comms[i % 3].Iallreduce(MPI.IN_PLACE, x), comms[i % 3].Iallreduce(MPI.IN_PLACE, y)]
        pairs.append((x, y))
    order = np.random.default_rng(RANK).permutation(len(requests))
    for i in order:
        requests[i].wait()
    for i, (x, y) in enumerate(pairs):
        sums_agree(codecs[i % 3], x, y, f"operation {i}")

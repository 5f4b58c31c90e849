"""Sends that remember what the ones before them lost."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.policy import in_place
from hybridcomp.policy.toml import parse_policy

WORLD = MPI.COMM_WORLD
SHAPE = (2, 24, 32)
CODECS = ["int4:block=32", "topk:ratio=0.1", "powersgd:rank=2"]


def gaussian(seed: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(100 * WORLD.rank + seed).standard_normal(SHAPE).astype(dtype)


def everywhere(good: bool) -> bool:
    return bool(WORLD.allreduce(int(good), MPI.MIN))


def policy(codec: str, feedback: str):
    return parse_policy(f'[pp]\nsend = {{ codec = "{codec}"{feedback} }}', "links.toml")


def around(comm, arrays, link):
    """Send the arrays to the right, one after another; return what comes from the left."""
    got = []
    for x in arrays:
        with in_place(link=link):
            request = comm.Isend(x, (comm.rank + 1) % comm.size, 1)
        got.append(np.empty_like(x))
        comm.Recv(got[-1], (comm.rank - 1) % comm.size, 1)
        request.wait()
    return got


def left(comm, arrays):
    """Return the left neighbour's arrays, exactly."""
    return [
        comm.mpi.sendrecv(x, (comm.rank + 1) % comm.size, source=(comm.rank - 1) % comm.size) for x in arrays
    ]


@pytest.mark.skipif(WORLD.size == 1, reason="one rank sends nothing that is compressed")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("codec", CODECS)
def test_what_arrives_and_the_residual_are_what_was_sent(codec, dtype):
    comm = hc.Communicator(WORLD, policy=policy(codec, ', feedback = "ef"'), axis="pp")
    sent = [gaussian(i, dtype) for i in range(5)]
    got = sum(x.astype("float64") for x in around(comm, sent, "right"))
    (residual,) = (a for key, a in comm.feedback.state_dict().items() if a.size == sent[0].size)
    total = sum(x.astype("float64") for x in left(comm, sent))
    (lost,) = left(comm, [residual])
    close = np.abs(total - got - lost.reshape(SHAPE)).max() < (1e-4 if dtype != "float16" else 1e-2)
    something = np.abs(lost).max() > 0.01
    comm.Free()
    assert everywhere(close)
    assert everywhere(something)


@pytest.mark.skipif(WORLD.size == 1, reason="one rank sends nothing that is compressed")
def test_a_send_without_a_link_has_no_memory():
    comm = hc.Communicator(WORLD, policy=policy("int4:block=32", ', feedback = "ef"'), axis="pp")
    x = gaussian(0)
    one, two = around(comm, [x, x], None)
    same, kept = np.array_equal(one, two), comm.feedback.state_dict()
    comm.Free()
    assert everywhere(same)
    assert everywhere(not kept)


@pytest.mark.skipif(WORLD.size == 1, reason="one rank sends nothing that is compressed")
def test_powersgd_takes_activations_for_rows_and_goes_on_from_its_factor():
    comm = hc.Communicator(WORLD, policy=policy("powersgd:rank=2", ""), axis="pp")
    rng = np.random.default_rng(WORLD.rank)
    # The matrix has rank 2 as [batch * time, width], and no such rank in any other shape.
    x = (rng.standard_normal((48, 2)) @ rng.standard_normal((2, 32))).astype("float32").reshape(SHAPE)
    noisy = x + 0.5 * gaussian(1)
    exact = around(comm, [x], "exact")[0]
    several = around(comm, [noisy] * 4, "right")
    (wanted,), (alike,) = left(comm, [x]), left(comm, [noisy])
    errors = [np.linalg.norm(got - alike) for got in several]
    comm.Free()
    assert everywhere(np.allclose(exact, wanted, atol=1e-3))
    assert everywhere(errors[3] < 0.999 * errors[0])  # a power iteration each


@pytest.mark.skipif(WORLD.size == 1, reason="one rank sends nothing that is compressed")
def test_what_is_not_finite_spoils_no_memory():
    comm = hc.Communicator(WORLD, policy=policy("powersgd:rank=2", ', feedback = "ef"'), axis="pp")
    bad = gaussian(1)
    bad[0, 0, 0] = np.inf
    with np.errstate(all="ignore"):
        got = around(comm, [gaussian(0), bad, gaussian(2)], "right")
    kept = [a for a in comm.feedback.state_dict().values() if a.dtype.kind == "f"] + list(comm.warm.values())
    comm.Free()
    assert everywhere(not np.isfinite(got[1]).all() and np.isfinite(got[2]).all())
    assert everywhere(len(kept) == 2 and all(np.isfinite(a).all() for a in kept))


@pytest.mark.skipif(WORLD.size == 1, reason="one rank sends nothing that is compressed")
def test_a_policy_of_places_is_asked_each_time_by_blocking_calls_too():
    rules = parse_policy('[tp]\nmin_bytes = 0\ncodec = "int8"\nfrom_layer = 1', "places.toml")
    comm = hc.Communicator(WORLD, policy=rules, axis="tp")
    x = np.ones(512, np.float32)
    for layer in (0, 1, 0):
        with in_place(layer=layer):
            comm.Allreduce(MPI.IN_PLACE, x.copy())
    calls = {row.reason: (row.calls, row.codec != "none") for row in comm.stats() if row.op == "all_reduce"}
    comm.Free()
    wanted = {"layer 0 is before from_layer 1": (2, False), "policy places.toml": (1, True)}
    assert everywhere(calls == wanted)

"""Hierarchical algorithms, on hosts that are only said to be several."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from hybridcomp.codecs import get_codec
from hybridcomp.collectives.agreement import making
from hybridcomp.collectives.algorithms import selection as choosing
from hybridcomp.policy.toml import parse_policy
from hybridcomp.schedules.algorithms.hierarchical import Roles
from hybridcomp.schedules.topology import Topology

from .conftest import WORLD, gaussian, identical, relative_error, total, verdict

TWICE = ("ef", "loco")  # forms that two levels take, and those that they refuse
ONCE = ("dgc", "ef21", "ef-sgdm")
SIZES = [0, 1, 2, 1001, 20_001]
LAYOUTS = {
    "blocks": lambda size: tuple(r * 2 // size for r in range(size)),
    "round robin": lambda size: tuple(r % 2 for r in range(size)),
    "uneven": lambda size: (*(0 for _ in range(size - 1)), 1),
}


@pytest.fixture(params=list(LAYOUTS))
def topology(request) -> Topology:
    """Lay the ranks out on two hosts."""
    return Topology(LAYOUTS[request.param](WORLD.size) if WORLD.size > 2 else (0,) * WORLD.size)


@pytest.fixture
def on_hosts(topology, make, monkeypatch):
    """Make communicators whose ranks are said to be on two hosts; chunks are small."""
    monkeypatch.setattr(making, "discover", lambda comm, node: topology)
    monkeypatch.setattr(choosing, "chunk_bytes", lambda *_: 8192)
    return make


@pytest.fixture(params=["hierarchical", "two_level"])
def algorithm(request) -> str:
    """On fewer than three ranks there is no hierarchy, and the only algorithm must do."""
    return request.param if WORLD.size > 2 else "direct"


def test_one_rank_leads_each_shard_and_all_lead_alike():
    for hosts in ((0, 0, 1, 1), (0, 1, 0, 1, 1), (0, 0, 0, 1), (0, 1, 2, 2, 0, 1, 0)):
        topology = Topology(hosts)
        roles = [Roles(topology, r) for r in range(len(hosts))]
        for q, owner in enumerate(roles):
            leaders = [roles[topology.ranks(h)[0]].leader(q) for h in range(topology.count)]
            assert leaders[hosts[q]] == q
            assert [hosts[r] for r in leaders] == list(range(topology.count))
            assert owner.peers == [r for r in leaders if r != q]
        for r, mine in enumerate(roles):
            assert mine.led == sorted(mine.led, key=lambda q: (q - r) % len(hosts))
            assert all(mine.leader(q) == r for q in mine.led)
        for h in range(topology.count):
            led = [len(roles[r].led) for r in topology.ranks(h)]
            assert max(led) - min(led) <= topology.largest


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("spec", "bound"), [("bf16", 0.01), ("int8", 0.02), ("lossless", 0.002)])
def test_allreduce(on_hosts, algorithm, spec, bound, dtype):
    comm = on_hosts()
    for n in SIZES:
        x = gaussian(n, dtype=dtype)
        want = np.sum([gaussian(n, r, dtype=dtype).astype(np.float64) for r in range(WORLD.size)], axis=0)
        y = np.empty_like(x)
        comm.Allreduce(x, y, codec=spec, algorithm=algorithm)
        verdict(identical(y) and relative_error(y, want) < bound, f"sum of {n}")
        comm.Allreduce(MPI.IN_PLACE, x, "avg", codec=spec, algorithm=algorithm)
        verdict(identical(x) and relative_error(x, want / WORLD.size) < bound, f"mean of {n}")


def test_reduce_scatter_and_allgather(on_hosts, algorithm):
    comm = on_hosts()
    for n in SIZES:
        whole = gaussian(n * WORLD.size)
        part = np.empty(n, np.float32)
        comm.Reduce_scatter_block(whole, part, codec="int8", algorithm=algorithm)
        want = total(n * WORLD.size)
        own = want[WORLD.rank * n : (WORLD.rank + 1) * n]
        verdict(relative_error(part, own) < 0.02, f"scatter of {n}")
        gather = "hierarchical" if WORLD.size > 2 else "direct"
        comm.Allgather(part, whole, codec="int8", algorithm=gather)
        verdict(identical(whole) and relative_error(whole, want) < 0.03, f"gather of {n}")


@pytest.mark.parametrize(
    ("algorithm", "form"),
    [*(("hierarchical", form) for form in (*TWICE, *ONCE)), *(("two_level", form) for form in TWICE)],
    indirect=["algorithm"],
)
def test_feedback_does_what_it_does_in_a_direct_allreduce(on_hosts, algorithm, form):
    n, steps = 5_000, 15
    comm = on_hosts(
        parse_policy(f'min_bytes = 0\n[dp]\nall_reduce = {{ codec = "int8", feedback = "{form}" }}\n', "test")
    )
    x, want = gaussian(n), total(n)
    sent = {"direct": np.zeros(n), algorithm: np.zeros(n)}
    for way, so_far in sent.items():
        for _ in range(steps):
            y = np.empty(n, np.float32)
            comm.Allreduce(x, y, name=way, algorithm=way)
            verdict(identical(y))
            np.add(so_far, y, out=so_far)
    verdict(relative_error(sent[algorithm], sent["direct"]) < 0.02)
    if form in TWICE:  # what is missing does not grow
        verdict(relative_error(sent[algorithm] / steps, want) < 0.03)


@pytest.mark.ranks(least=3)
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_two_levels_with_feedback_have_the_bits_of_numpy(on_hosts, topology, operation):
    """bf16 rounds each element by itself; each of three encodings adds what its last one lost."""
    n, rank = 64 * WORLD.size, WORLD.rank
    rule = (
        f'min_bytes = 0\n[dp]\n{operation} = {{ codec = "bf16", feedback = "ef", algorithm = "two_level" }}\n'
    )
    comm = on_hosts(parse_policy(rule, "test"))
    lost: dict[tuple[str, int], np.ndarray] = {}

    def sent(what: str, by: int, values: np.ndarray) -> np.ndarray:
        owed = values + lost.get((what, by), np.float32(0))
        rounded = codec.decode(codec.encode(owed))
        lost[what, by] = owed - rounded
        return rounded

    codec = get_codec("bf16")
    for _ in range(4):
        x = gaussian(n)
        every = [gaussian(n, r).reshape(WORLD.size, 64) for r in range(WORLD.size)]
        want = []
        for owner in range(WORLD.size):
            home, total = topology.hosts[owner], None
            for host in sorted(range(topology.count), key=lambda h: (h != home, h)):
                ranks = topology.ranks(host)
                leader = Roles(topology, ranks[0]).leader(owner)
                addend = every[leader][owner]
                for other in ranks:
                    if other != leader:
                        addend = addend + sent(f"part {owner}", other, every[other][owner])
                if host != home:
                    addend = sent(f"part {owner}", leader, addend)
                total = addend if total is None else total + addend
            want.append(sent(f"part {owner}", owner, total) if operation == "all_reduce" else total)
        if operation == "all_reduce":
            comm.Allreduce(MPI.IN_PLACE, x, name="x")
            verdict(identical(x) and np.array_equal(x, np.concatenate(want)))
        else:
            own = np.empty(64, np.float32)
            comm.Reduce_scatter_block(x, own, name="x")
            verdict(np.array_equal(own, want[rank]))


@pytest.mark.ranks(least=3)
@pytest.mark.parametrize("form", ONCE)
def test_two_levels_refuse_forms_that_sum_up(on_hosts, form):
    rule = f'min_bytes = 0\n[dp]\nall_reduce = {{ codec = "int8", feedback = "{form}" }}\n'
    comm, x = on_hosts(parse_policy(rule, "test")), gaussian(5_000)
    with pytest.raises(
        ValueError, match=f"'two_level' here: it has no error feedback of the form {form}; allowed:"
    ):
        comm.Allreduce(MPI.IN_PLACE, x, name="x", algorithm="two_level")


def test_a_hierarchy_is_refused_where_there_is_none(make):
    comm = make(parse_policy('[dp]\nall_reduce = { codec = "int8", algorithm = "two_level" }\n', "test"))
    x = gaussian(100_000)
    comm.Allreduce(MPI.IN_PLACE, x)  # a policy's algorithm is used where it can be
    verdict(identical(x) and relative_error(x, total(100_000)) < 0.02)
    if WORLD.size == 1:  # nothing is sent, whatever the algorithm
        comm.Allreduce(MPI.IN_PLACE, x, algorithm="hierarchical")
        return
    with pytest.raises(
        ValueError, match="cannot use algorithm 'hierarchical' here: all ranks are on one host"
    ):
        comm.Allreduce(MPI.IN_PLACE, x, algorithm="hierarchical")
    with pytest.raises(ValueError, match="'fastest' here: there is none of that name; allowed: direct"):
        comm.Allreduce(MPI.IN_PLACE, x, algorithm="fastest")


@pytest.mark.ranks(least=3)
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_statistics_tell_what_leaves_a_host(make, monkeypatch, codec):
    """By the engine, by MPI, in messages of each kind: for all ranks together they are as many as were sent."""
    size, rank = WORLD.size, WORLD.rank
    monkeypatch.setenv("HYBRIDCOMP_HOSTS", f"2,{size - 2}")
    comm = make()
    away = 2 if rank >= 2 else size - 2  # ranks of the other host

    def between(op: str) -> int:
        return sum(row.between_bytes for row in comm.stats() if row.op == op)

    n = 2000
    x, y = gaussian(n), np.empty(n * size, np.float32)
    message = len(get_codec(codec).encode(x)) if codec != "none" else 4 * n
    comm.Allgather(x, y, codec=codec, algorithm="direct" if codec != "none" else None)
    if codec != "none":
        verdict(between("all_gather") == away * message)
    comm.Alltoall(y, y.copy(), codec=codec)
    verdict(between("all_to_all") == away * message)
    peers = [(rank + 1) % size, (rank - 1) % size, (rank + 1) % size]
    sent = 0
    for way, peer in enumerate(peers * 2):
        source = (rank - 1) % size if peer == (rank + 1) % size else (rank + 1) % size
        here = np.empty(n, np.float32)
        sends = comm.Isend(x, peer, codec=codec) if way % 2 else None
        if sends is None:
            comm.Sendrecv(x, peer, 0, here, source, 0, codec=codec)
        else:
            comm.Recv(here, source)
            sends.wait()
        sent += (peer < 2) != (rank < 2)
    found = between("send")
    verdict(sent * message <= found <= sent * (message + 1), f"{found} for {sent} of {message}")
    for row in comm.stats():
        verdict(row.inside_bytes >= 0 and row.between_bytes >= 0)

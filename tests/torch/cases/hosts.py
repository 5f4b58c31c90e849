"""Hook, FSDP2 and rare synchronisation over gloo on hosts of several ranks, against the backend's two levels."""

import gc
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import hybridcomp as hc
import hybridcomp.torch as hct
from hybridcomp.torch.exchange import batch, lanes
from hybridcomp.torch.exchange import group as exchange_group
from tests.torch.models.fsdp import (
    error,
    gathered,
    gradients,
    mesh_of,
    policy_of,
    same_everywhere,
    sharded,
    whole,
)
from tests.torch.models.parallel import assert_same_on_all_ranks

SHAPES = {5: ("2,3", "1,4", "3,1,1"), 4: ("2x2",), 3: ("2,1",)}
LOSSY = ("int8:block=128", "int4:block=128", "topk:ratio=0.1", "lattice:bits=8")
LEVELS = "all_reduce=hierarchical,reduce_scatter=hierarchical,all_gather=hierarchical"
BACKENDS = ("hybridcomp", "gloo")


@contextmanager
def on(hosts: str) -> Iterator[None]:
    """Let groups that are made in here have these hosts, and two levels without chunks in one."""
    about = {"HYBRIDCOMP_HOSTS": hosts, "HYBRIDCOMP_ALGORITHM": LEVELS, "HYBRIDCOMP_CHUNK_BYTES": "16777216"}
    with mock.patch.dict(os.environ, about):
        yield


def shapes() -> tuple[str, ...]:
    return SHAPES[dist.get_world_size()]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(61, 48), nn.Tanh(), nn.Linear(48, 1), nn.Linear(1, 7))


def averaged(backend: str, policy: str, steps: int = 3, *, axis: str = "dp") -> dict[str, torch.Tensor]:
    """Return what a hook makes of gradients that each rank draws."""
    model = net()
    group = dist.new_group(backend=backend)
    ddp = nn.parallel.DistributedDataParallel(model, process_group=group)
    state = hct.HookState(policy, axis=axis, module=ddp)
    ddp.register_comm_hook(state, hct.comm_hook)
    draw = torch.Generator().manual_seed(10 + dist.get_rank())
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.randn(8, 61, generator=draw)).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def case_a_hook_has_the_backends_bits() -> None:
    for hosts in shapes():
        with on(hosts):
            for codec in LOSSY:
                of_each = [averaged(backend, f"{codec}:min_bytes=0") for backend in BACKENDS]
                for grads in of_each:
                    assert_same_on_all_ranks(grads)
                for name, grad in of_each[0].items():
                    assert torch.equal(grad, of_each[1][name]), (hosts, codec, name)


def case_uncompressed_and_linear_ones_are_near() -> None:
    want = averaged("gloo", "none")
    for hosts in shapes():
        with on(hosts):
            for codec, most in (
                ("none:min_bytes=0", 1e-6),
                ("sketch:min_bytes=0", 1e-5),
                ("powersgd:rank=4", 0.9),
            ):
                got = averaged("gloo", codec)
                assert_same_on_all_ranks(got)
                for name, grad in got.items():
                    assert (grad - want[name]).norm() <= most * want[name].norm(), (hosts, codec, name)


def case_ranks_that_are_not_in_the_order_of_hosts() -> None:
    want = averaged("gloo", "none")
    with mock.patch.object(exchange_group, "identity", return_value=f"host {dist.get_rank() % 2}"):
        for codec, most in (("none:min_bytes=0", 1e-6), ("int8:min_bytes=0", 0.05)):
            got = averaged("gloo", codec)
            assert_same_on_all_ranks(got)
            for name, grad in got.items():
                assert (grad - want[name]).norm() <= most * want[name].norm(), (codec, name)


def case_feedback_makes_up_for_what_was_lost() -> None:
    """The mean of many averages of one gradient nears the mean, where a codec alone stays away from it."""
    for hosts in shapes():
        with on(hosts):
            alone, corrected = (distance_after(30, form) for form in ("", ', feedback = "ef"'))
        assert corrected < alone / 4, (hosts, alone, corrected)


def distance_after(steps: int, form: str) -> float:
    policy = policy_of(f'min_bytes = 0\n[dp]\nall_reduce = {{ codec = "int4:block=128"{form} }}\n')
    state = hct.HookState(policy, process_group=dist.new_group(backend="gloo"))
    mine = torch.randn(4000, generator=torch.Generator().manual_seed(dist.get_rank()))
    mean, total = mine.clone(), torch.zeros(4000)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    for step in range(steps):
        buffer = mine.clone()
        averaging = state.average(buffer, lambda: [("w", (4000,))], "w", step)
        assert averaging is not None
        state.flush()
        averaging.wait()
        total += buffer
    return float((total / steps - mean).norm() / mean.norm())


def case_fsdp_is_near_and_the_same_everywhere() -> None:
    plain = gradients(sharded(mesh_of("gloo")))
    for hosts in shapes():
        for codec, most in (("int8:block=64:min_bytes=0", 0.06), ("none", 1e-6)):
            for backend in BACKENDS:
                with on(hosts):
                    model = sharded(mesh_of(backend))
                    hct.compress_fsdp(model, codec)
                    weights, grads = gathered(model), gradients(model)
                same_everywhere(weights)
                same_everywhere(grads)
                for name, grad in grads.items():
                    assert error(grad, plain[name]) < most, (hosts, codec, backend, name)


def case_replicas_that_synchronise_rarely() -> None:
    for hosts in shapes():
        with on(hosts):
            model, group = net(), dist.new_group(backend="gloo")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with hct.LocalSGD(model, optimizer, every=2, policy="int8:min_bytes=0", process_group=group):
                for step in range(4):
                    draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
                    optimizer.zero_grad()
                    model(torch.randn(8, 61, generator=draw)).square().mean().backward()
                    optimizer.step()
            assert_same_on_all_ranks(dict(model.named_parameters()))


def case_each_byte_leaves_a_host_once() -> None:
    """The bytes that the ranks of the first host send to others, times those of the gradients or parameters.

    Those that stay inside are told apart from them.
    """
    hosts = shapes()[0]
    first = dist.get_rank() < int(hosts[0])
    for make, limits in (
        (hooked_step, {"int8": 0.275, "int4": 0.145}),
        (fsdp_step, {"int8": 0.41, "none": 1.55}),
    ):
        for (codec, most), backend in itertools.product(limits.items(), BACKENDS):
            dist.barrier()
            hct.reset_stats()
            with on(hosts):
                state, nbytes = make(f"{codec}:min_bytes=0", backend)
            rows = [row for row in hct.stats() if row.axis in ("dp", "fsdp")]
            sent = torch.tensor(
                [float(sum(row.between_bytes for row in rows) if first else 0),
                 float(sum(row.inside_bytes for row in rows))]
            )  # fmt: skip
            inside = sent[1].item()
            dist.all_reduce(sent)
            about = (make.__name__, codec, backend, sent.tolist(), nbytes, rows)
            assert most / 2 < sent[0].item() / nbytes <= most, about
            assert inside > 0, about
            assert sent[1] > sent[0], about
            del state


def wide() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(600, 500), nn.Linear(500, 600))


def hooked_step(policy: str, backend: str) -> tuple[hct.HookState, int]:
    model = wide()
    ddp = nn.parallel.DistributedDataParallel(model, process_group=dist.new_group(backend=backend))
    state = hct.HookState(policy, module=ddp)
    ddp.register_comm_hook(state, hct.comm_hook)
    ddp(torch.randn(4, 600)).square().mean().backward()
    return state, sum(p.nbytes for p in model.parameters())


def fsdp_step(policy: str, backend: str) -> tuple[hct.FSDPCompression, int]:
    model = wide()
    nbytes = sum(p.nbytes for p in model.parameters())
    mesh = mesh_of(backend)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    state = hct.compress_fsdp(fully_shard(model, mesh=mesh), policy)
    model(torch.randn(4, 600)).square().mean().backward()
    return state, nbytes


@contextmanager
def told_to_the_backend() -> Iterator[list[tuple[int, list[int]]]]:
    """Collect the bytes that this rank has the backend carry to each rank, for each exchange."""
    found: list[tuple[int, list[int]]] = []
    carried = batch.Batch._carried

    def noted(self: batch.Batch, counts: list[int], sizes: list[int]) -> object:
        found.append((self.transport.rank, counts))
        return carried(self, counts, sizes)

    with mock.patch.object(batch.Batch, "_carried", noted):
        yield found


def averages_of(
    state: hct.HookState, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...]
) -> list[torch.Tensor]:
    """Return the averages of drawn buffers, all in flight together."""
    buffers, started = [], []
    for dtype in dtypes:
        for n in sizes:
            draw = torch.Generator().manual_seed(100 * n + dist.get_rank())
            buffers.append(torch.randn(n, generator=draw).to(dtype))
            name = f"{dtype} {n}"
            averaging = state.average(buffers[-1], lambda name=name, n=n: [(name, (n,))], name, 0)
            assert averaging is not None
            started.append(averaging)
    state.flush()
    for averaging in started:
        averaging.wait()
    return buffers


FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ODD = (1, 61, 4099)


def case_ranks_of_a_host_hand_each_other_messages_in_memory() -> None:
    """The backend carries nothing between them; the bits are those of what it carries where they share none."""
    for hosts, codec in (("2,3", "int8:block=128"), ("3,1,1", "topk:ratio=0.1")):
        with on(hosts):
            host = hosts_of_ranks(hosts)
            results = []
            for shares in ("1", "0"):
                with mock.patch.dict(os.environ, {"HYBRIDCOMP_SHARED_MEMORY": shares}):
                    state = hct.HookState(
                        f"{codec}:min_bytes=0", process_group=dist.new_group(backend="gloo")
                    )
                    with told_to_the_backend() as carried:
                        results.append(averages_of(state, FLOATS, ODD))
                inside = sum(
                    n for rank, counts in carried for peer, n in enumerate(counts) if host[peer] == host[rank]
                )
                alone = host.count(host[dist.get_rank()]) == 1
                assert (inside == 0) == (shares == "1" or alone), (hosts, codec, shares, inside)
                reasons = {row.reason for row in state.rows()}
                told = any("HYBRIDCOMP_SHARED_MEMORY=0 forbids it" in reason for reason in reasons)
                assert told == (shares == "0" and not alone), reasons
                shared = sum(row.shared_bytes for row in state.rows())
                assert (shared > 0) == (shares == "1" and not alone), shared
            for mine, theirs in zip(*results, strict=True):
                assert torch.equal(mine, theirs), (hosts, codec, mine.dtype, mine.numel())
            assert_same_on_all_ranks({str(i): mine.double() for i, mine in enumerate(results[0])})


class Assorted(nn.Module):
    """Parameters of every kind: complex, half-width and double ones, a scalar, empty ones, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        for i, (dtype, shape) in enumerate(
            (
                (torch.complex64, (61, 37)),
                (torch.complex128, (4099,)),
                (torch.complex64, ()),
                (torch.bfloat16, (61, 33)),
                (torch.float16, (4099,)),
                (torch.float64, (3, 5, 7)),
                (torch.float32, (0, 7)),
                (torch.float32, ()),
                (torch.float32, (611,)),
                (torch.bfloat16, (0,)),
            )
        ):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, dtype=dtype)))

    def forward(self, x: float) -> torch.Tensor:
        return sum((p * (x + i)).abs().double().square().sum() for i, p in enumerate(self.parameters()))


def assorted(codec: str, group: dist.ProcessGroup) -> tuple[dict[str, torch.Tensor], hct.HookState]:
    ddp = nn.parallel.DistributedDataParallel(Assorted(), process_group=group)
    state = hct.HookState(f"{codec}:min_bytes=0", module=ddp)
    ddp.register_comm_hook(state, hct.comm_hook)
    for step in range(2):  # DDP has other buckets at the second step
        ddp.zero_grad()
        ddp(1.0 + step + 0.25 * dist.get_rank()).backward()
    return {name: real(p.grad) for name, p in ddp.module.named_parameters()}, state


def real(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).clone().reshape(-1)


# Names of hosts by rank: others' ranks between those of a host, and hosts of unlike numbers.
ORDERS = {5: ("abcba", "aabca"), 4: ("abba",), 3: ("aba",)}


def case_gradients_of_every_kind_in_shared_memory() -> None:
    """Hosts of ranks that are in no order; sums in memory have the bits of those that the backend carries."""
    exact = assorted("none", dist.new_group(backend="gloo"))[0]
    for order in ORDERS[dist.get_world_size()]:
        several = order.count(order[dist.get_rank()]) > 1
        with mock.patch.object(exchange_group, "identity", return_value=order[dist.get_rank()]):
            for codec, most in (("none", 1e-2), ("int8:block=128", 0.06)):
                results = []
                for shares in ("1", "0"):
                    with mock.patch.dict(os.environ, {"HYBRIDCOMP_SHARED_MEMORY": shares}):
                        grads, state = assorted(codec, dist.new_group(backend="gloo"))
                    assert any(row.shared_bytes for row in state.rows()) == (shares == "1" and several)
                    results.append(grads)
                assert_same_on_all_ranks({name: grad.double() for name, grad in results[0].items()})
                for name, grad in results[0].items():
                    assert torch.equal(grad, results[1][name]), (order, codec, name)
                    off = (grad.double() - exact[name].double()).norm()
                    assert off <= most * exact[name].double().norm(), (order, codec, name, off)


def case_shards_and_replicas_in_shared_memory() -> None:
    """Shards of FSDP2, many of them empty, and weights of replicas, on hosts of ranks that are in no order."""
    order = ORDERS[dist.get_world_size()][-1]
    with mock.patch.object(exchange_group, "identity", return_value=order[dist.get_rank()]):
        for make in (half_width_shards, synchronised):
            results = []
            for shares in ("1", "0"):
                with mock.patch.dict(os.environ, {"HYBRIDCOMP_SHARED_MEMORY": shares}):
                    results.append(make())
            assert_same_on_all_ranks({name: value.double() for name, value in results[0].items()})
            for name, value in results[0].items():
                assert torch.equal(value, results[1][name]), (make.__name__, name)


def half_width_shards() -> dict[str, torch.Tensor]:
    model = net()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    fully_shard(model, mesh=mesh_of("gloo"))
    hct.compress_fsdp(model, "int8:block=64:min_bytes=0")
    draw = torch.Generator().manual_seed(10 + dist.get_rank())
    model(torch.randn(8, 61, generator=draw).bfloat16()).square().mean().backward()
    grads = {f"grad {name}": whole(p.grad) for name, p in model.named_parameters()}
    return gathered(model) | grads


def synchronised() -> dict[str, torch.Tensor]:
    model = Assorted()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    group = dist.new_group(backend="gloo")
    with hct.LocalSGD(model, optimizer, every=1, policy="int8:min_bytes=0", process_group=group):
        for step in range(2):
            optimizer.zero_grad()
            model(1.0 + step + 0.25 * dist.get_rank()).backward()
            optimizer.step()
    return {name: real(p.detach()) for name, p in model.named_parameters()}


def hosts_of_ranks(hosts: str) -> list[int]:
    counts = [int(n) for n in hosts.split(",")] if "," in hosts else [int(hosts[2])] * int(hosts[0])
    return [host for host, count in enumerate(counts) for _ in range(count)]


def case_a_rank_that_shares_no_memory() -> None:
    """Its host's ranks go by the backend, and say why; those of the other host do not."""
    with on("2,3"):
        want = averages_of(
            hct.HookState("int8:min_bytes=0", process_group=dist.new_group(backend="gloo")), FLOATS, ODD
        )
        state = hct.HookState("int8:min_bytes=0", process_group=dist.new_group(backend="gloo"))
        with mock.patch.object(lanes, "own_pool", failing) if dist.get_rank() == 3 else nullcontext():
            got = averages_of(state, FLOATS, ODD)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
    said = [
        row.reason
        for row in state.rows()
        if "rank 3 shares no memory: OSError: no space is left" in row.reason
    ]
    assert bool(said) == (dist.get_rank() >= 2), state.rows()


def failing() -> None:
    raise OSError("no space is left")


def case_groups_that_come_and_go() -> None:
    """Rings and buffers of groups that are gone serve later ones; those of the process do not grow."""
    with on("2,3"):
        used = []
        for _ in range(6):
            group = dist.new_group(backend="gloo")
            averages_of(hct.HookState("int8:min_bytes=0", process_group=group), FLOATS[:1], ODD[:2])
            gc.collect()
            dist.barrier()
            used.append(lanes.own_pool().blocks.used)
    assert used[-1] <= used[2], used


def case_a_rank_of_this_host_that_does_not_come() -> None:
    """It is named once the group's timeout is over, and later averages are refused."""
    with on("2,3"):
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
        state = hct.HookState("int8:min_bytes=0", process_group=group)
        averages_of(state, FLOATS[:1], (4099,))
        dist.barrier()
        if dist.get_rank() == 4:
            time.sleep(6)
        elif dist.get_rank() >= 2:
            with pytest.raises(
                hc.CollectiveTimeoutError, match=r"all_reduce number 2 .*no messages of rank 4 of this host"
            ):
                averages_of(state, FLOATS[:1], (4099,))
            with pytest.raises(hc.HybridcompError, match="rank 4"):
                averages_of(state, FLOATS[:1], (4099,))
        dist.barrier()
    if dist.get_rank() == 4:
        with on("2,3"), pytest.raises(hc.RemoteError, match=r"has left the exchange: CollectiveTimeoutError"):
            averages_of(state, FLOATS[:1], (4099,))
    dist.barrier()


def case_a_list_of_hosts_that_does_not_add_up() -> None:
    with (
        mock.patch.dict(os.environ, {"HYBRIDCOMP_HOSTS": "7x9"}),
        pytest.raises(hc.ConfigError, match="63 ranks"),
    ):
        averaged("gloo", "int8:min_bytes=0", 1)


def case_lists_of_hosts_that_differ() -> None:
    size = dist.get_world_size()
    hosts = f"1x{size}" if dist.get_rank() else f"{size}x1"
    with (
        mock.patch.dict(os.environ, {"HYBRIDCOMP_HOSTS": hosts}),
        pytest.raises(hc.MismatchError, match="rank 0 has"),
    ):
        averaged("gloo", "int8:min_bytes=0", 1)

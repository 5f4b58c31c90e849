"""torchft's replicas over gloo: each rank is one, and the cases play their manager."""

import gc
import itertools
import os
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchft import process_group
from torchft.process_group import ProcessGroup, reconfigure_with_store

import hybridcomp.torch.torchft as hft
from hybridcomp.errors import ConfigError, MismatchError, PolicyError
from tests.torch.cases.hook import policy
from tests.torch.models.replicas import assert_same_everywhere

SECONDS = timedelta(seconds=30)
_numbers = itertools.count()


def meet(group: ProcessGroup, ranks: list[int]) -> None:
    """Make a process group of torchft's one of some ranks; the others only agree on where."""
    here, number = dist.get_rank(), next(_numbers)
    store = (
        dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if here == ranks[0] else None
    )
    port = [store.port if store else 0]
    dist.broadcast_object_list(port, ranks[0])
    try:
        if here in ranks:
            address = f"localhost:{port[0]}/{number}"
            reconfigure_with_store(group, address, ranks.index(here), len(ranks), SECONDS)
    finally:
        dist.barrier()  # the store stays until all have met


class Manager:
    """Stand-in for torchft's manager, which tells of a quorum; a case says what was committed."""

    def __init__(self, group: ProcessGroup) -> None:
        self._pg = group
        self.step = 0
        self.participants: list[int] = []
        self.error: Exception | None = None
        self.commits = True
        self._use_async_quorum = False
        self.states: dict[str, Any] = {}

    def meet(self, ranks: list[int], participants: list[int] | None = None) -> None:
        self.participants = ranks if participants is None else participants
        meet(self._pg, ranks)

    def start_quorum(self) -> None: ...

    def wait_quorum(self) -> None: ...

    def disallow_state_dict_read(self) -> None: ...

    def allow_state_dict_read(self) -> None: ...

    def should_commit(self) -> bool:
        self.step += self.commits
        return self.commits and self.error is None

    def current_step(self) -> int:
        return self.step

    def errored(self) -> Exception | None:
        return self.error

    def report_error(self, error: Exception) -> None:
        self.error = error

    def is_participating(self) -> bool:
        return dist.get_rank() in self.participants

    def num_participants(self) -> int:
        return len(self.participants)

    def wrap_future(self, future: Any, default: object) -> Any:
        return future

    def register_state_dict_fn(self, name: str, load: Any, state: Any) -> None:
        self.states[name] = load, state


def everyone() -> list[int]:
    return list(range(dist.get_world_size()))


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 7))


def gradients(ddp: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Return the averaged gradients of a rank's own data."""
    ddp.zero_grad(set_to_none=True)
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * seed + dist.get_rank()))
    ddp(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in ddp.named_parameters() if p.grad is not None}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        bytes(memoryview(a[key]).cast("B")) == bytes(memoryview(b[key]).cast("B")) for key in a
    )


def residuals(ddp: Any) -> dict[str, Any]:
    return ddp._hybridcomp.feedback.state_dict()


def case_sums_and_averages() -> None:
    ranks = everyone()
    for codec, bound in (("int8:block=128", 0.02), ("none", 1e-6)):
        group = hft.ProcessGroupGloo(codec, SECONDS)
        meet(group, ranks)
        for n, dtype in (
            (70_001, torch.float32),
            (9_000, torch.float64),
            (3, torch.float32),
            (0, torch.float32),
        ):
            parts = [torch.randn(n, dtype=dtype, generator=torch.Generator().manual_seed(r)) for r in ranks]
            for op, want in ((dist.ReduceOp.SUM, sum(parts)), (dist.ReduceOp.AVG, sum(parts) / len(ranks))):
                if op == dist.ReduceOp.AVG and (n < 1024 or codec == "none"):
                    continue  # gloo's own has no averages
                mine = parts[dist.get_rank()].clone()
                opts = dist.AllreduceOptions()
                opts.reduceOp = op
                assert group.allreduce([mine], opts).wait()
                error = (mine - want).norm() / max(float(want.norm()), 1e-30)
                assert error <= bound, (codec, n, dtype, op, error)
                assert (error > 1e-3) == (codec != "none" and n > 3)  # it was compressed
                assert n != 3 or error < 1e-6  # small messages are exact
                assert_same_everywhere({"sum": mine})
        counts = torch.arange(5) + dist.get_rank()
        opts = dist.AllreduceOptions()
        group.allreduce([counts], opts).wait()
        assert counts.tolist() == [len(ranks) * i + sum(ranks) for i in range(5)]
        group.shutdown()


def case_feedback_follows_what_was_committed() -> None:
    manager = Manager(hft.ProcessGroupGloo(policy("int4:block=128", True, min_bytes=1024), SECONDS))
    manager.meet(everyone())
    ddp = hft.DistributedDataParallel(manager, model())
    for manager.step in range(3):
        assert_same_everywhere(gradients(ddp, manager.step))
    manager.step, before = 3, residuals(ddp)
    assert before
    first = gradients(ddp, 3)
    assert not same(residuals(ddp), before)
    again = gradients(ddp, 3)  # nobody committed it
    assert same({k: v.numpy() for k, v in first.items()}, {k: v.numpy() for k, v in again.items()})
    manager.step = 4
    after = residuals(ddp)
    gradients(ddp, 4)
    assert same(ddp._hybridcomp._before, after)


def case_feedback_is_kept_by_who_stays() -> None:
    ranks, here = everyone(), dist.get_rank()
    manager = Manager(hft.ProcessGroupGloo(policy("int4:block=128", True, min_bytes=1024), SECONDS))
    manager.meet(ranks)
    ddp = hft.DistributedDataParallel(manager, model())
    gradients(ddp, 0)
    manager.step, kept = 1, residuals(ddp)
    stay = ranks[:-1]
    manager.meet(stay)
    if here in stay:
        found = gradients(ddp, 1)
        assert same(ddp._hybridcomp._before, kept)
        mean = sum(float(p.norm()) for p in found.values())
        assert mean > 0
    manager.step = 2
    load, state = manager.states["hybridcomp"]
    states = [None] * len(ranks)
    dist.all_gather_object(states, state())
    manager.meet(ranks)
    if here not in stay:  # it recovers from another
        load(states[0])
        assert not residuals(ddp)
    assert_same_everywhere(gradients(ddp, 2))


def case_what_ranks_agree_on_is_agreed_anew() -> None:
    ranks, here = everyone(), dist.get_rank()
    stay = ranks[:-1]
    lowrank = policy("powersgd:rank=2", True, min_bytes=1024, warmup_steps=2)
    for chosen in (lowrank, "auto:dp=aggressive"):
        manager = Manager(hft.ProcessGroupGloo(chosen, SECONDS))
        ddp: Any = None
        for number, quorum in enumerate((ranks, stay, ranks)):
            joins = number == 2 and here not in stay
            if joins:  # in a process of its own, with the others' step, and their state after its first one
                manager = Manager(hft.ProcessGroupGloo(chosen, SECONDS))
                manager.step, ddp = 24, None
            manager.meet(quorum, stay if number == 2 else quorum)
            if here not in quorum:
                continue
            ddp = ddp or hft.DistributedDataParallel(manager, model())
            state = ddp._hybridcomp
            state.begin()  # as the first bucket does once more
            assert not state._factors
            for seed in range(12):
                found = gradients(ddp, seed)
                manager.participants = quorum
                manager.step += 1
                if joins and not seed:
                    load, told = manager.states["hybridcomp"]
                    load(told())
                if quorum == ranks:
                    assert_same_everywhere(found)
            assert all(p.isfinite().all() for p in found.values())
            assert state.step == 12 * number + 11
            if chosen == lowrank:
                assert len(state._factors) == 2
            else:
                assert state._operations.comm.decider.choices()


def case_quorums_leave_nothing_behind() -> None:
    manager = Manager(hft.ProcessGroupGloo(policy("int4:block=128", True, min_bytes=1024), SECONDS))
    ddp: nn.Module | None = None
    found: list[int] = []
    gc.disable()  # which a program that trains collects seldom
    try:
        for manager.step in range(12):
            manager.meet(everyone())
            ddp = ddp or hft.DistributedDataParallel(manager, model())
            gradients(ddp, manager.step)
            manager._pg.allreduce([torch.ones(5000)], dist.AllreduceOptions()).wait()
            found.append(len(os.listdir("/proc/self/fd")))
            dist.barrier()
    finally:
        gc.enable()
    assert max(found[6:]) <= max(found[3:6]), found


def case_who_recovers_contributes_nothing() -> None:
    ranks = everyone()
    for codec, bound in (("int8:block=128", 0.02), ("none", 1e-5)):
        manager = Manager(hft.ProcessGroupGloo(codec, SECONDS))
        manager.meet(ranks, ranks[:-1])
        ddp = hft.DistributedDataParallel(manager, model())
        found = gradients(ddp, 0)
        assert_same_everywhere(found)
        alone, wanted = model(), {}
        for rank in ranks[:-1]:
            alone.zero_grad(set_to_none=True)
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank))
            alone(x).square().mean().backward()
            for name, p in alone.named_parameters():
                wanted[name] = wanted.get(name, 0) + p.grad / (len(ranks) - 1)
        for name, value in wanted.items():
            got = found[f"module.{name}"]
            assert (got - value).norm() <= bound * value.norm(), name
    manager = Manager(hft.ProcessGroupGloo(policy("int4:block=128", True, min_bytes=1024), SECONDS))
    manager.meet(ranks)
    ddp = hft.DistributedDataParallel(manager, model())
    gradients(ddp, 0)
    manager.step, manager.participants = 1, ranks[:-1]  # the last one was cut off for a while
    ddp._hybridcomp.begin()
    assert bool(residuals(ddp)) == (dist.get_rank() in ranks[:-1])
    assert_same_everywhere(gradients(ddp, 1))


def case_who_is_unlike_is_refused() -> None:
    ranks, here = everyone(), dist.get_rank()
    newcomer = ranks[-1]
    for theirs, settings, told in (
        ("int4", {"seed": "1"}, r"the policy of rank \d differs .*int[48]\S* \["),
        ("int8", {"seed": "2"}, r"the seed of rank \d differs .*: [12], not [12]"),
        ("int8", {"seed": "1", "version of hybridcomp": "9.9"}, r"the version of hybridcomp of rank .*9\.9"),
        ("int8", None, "the seed of rank .*the default"),
        ("none of ours", None, "the process group of rank 2 is not one of hybridcomp.torch.torchft"),
    ):
        same = here != newcomer
        group: Any = hft.ProcessGroupGloo("int8", SECONDS, settings={"seed": "1"})
        if not same and theirs == "none of ours":
            group = process_group.ProcessGroupGloo(timedelta(seconds=2))
        elif not same:
            group = hft.ProcessGroupGloo(theirs, SECONDS, settings=settings)
        manager = Manager(group)
        manager.meet(ranks[:-1])
        error = None
        try:
            manager.meet(ranks)
        except (MismatchError, RuntimeError) as mismatch:  # torchft's own waits for the others in vain
            error = mismatch
        if same or theirs != "none of ours":
            assert isinstance(error, MismatchError), error
            assert re.search(told, str(error)), error
            ddp = hft.DistributedDataParallel(manager, model())
        if not same and theirs != "none of ours":  # who ends by it, in its own call
            with pytest.raises(MismatchError, match=told):
                gradients(ddp, 0)
        manager.meet(ranks[:-1])
        if same:
            assert gradients(ddp, 0)


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int) -> None:
    """Train on a rank's own data."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    for _ in range(count):
        optimizer.zero_grad(set_to_none=True)
        net(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()


def weights(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def exact_mean(mine: torch.Tensor) -> torch.Tensor:
    total = mine.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def case_local_sgd_compresses_differences() -> None:
    for codec, bound in (("int8:block=128", 0.02), ("none", 1e-4)):
        manager = Manager(hft.ProcessGroupGloo(policy(codec, codec != "none", min_bytes=1024), SECONDS))
        manager.meet(everyone())
        net, mine, last = model(), {}, weights(model())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_, m=mine, n=net: m.update(weights(n)))  # before they meet
        with hft.LocalSGD(manager, net, optimizer, 4) as local:
            for number in range(3):
                manager.commits = number != 1
                kept = local._averages.feedback.state_dict()
                steps(net, optimizer, 4, seed=number)
                if number == 1:  # each keeps its own, and the next average is of both
                    assert same(local._averages._before, kept)
                    assert all(torch.equal(p, mine[name]) for name, p in weights(net).items())
                    continue
                found = weights(net)
                assert_same_everywhere(found)
                for name, values in found.items():
                    exact = exact_mean(mine[name])
                    change = (exact - last[name]).norm()
                    assert change > 0
                    assert (values - exact).norm() <= bound * change + 1e-7, (codec, name, change)
                last = found
            assert manager.step == 2
            assert bool(local._averages.feedback.state_dict()) == (codec != "none")


def case_who_recovers_takes_over_the_last_average() -> None:
    ranks, here = everyone(), dist.get_rank()
    manager = Manager(hft.ProcessGroupGloo(policy("int8:block=128", True, min_bytes=1024), SECONDS))
    manager.meet(ranks, ranks[:-1])
    net = model()
    if here == ranks[-1]:
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()  # what it had is lost
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    local = hft.LocalSGD(manager, net, optimizer, 1)
    load, state = manager.states["hybridcomp_local_sgd"]
    states: list[Any] = [None] * len(ranks)
    dist.all_gather_object(states, state())
    commit = manager.should_commit
    manager.should_commit = lambda: (load(states[0]) if here == ranks[-1] else None, commit())[1]
    with local:
        steps(net, optimizer, 1, seed=5)
    assert_same_everywhere(weights(net))
    assert any(
        float((p - q).norm()) > 0 for p, q in zip(weights(net).values(), states[0].values(), strict=True)
    )


def case_diloco_compresses_differences() -> None:
    for codec in ("int8:block=128", "none"):
        manager = Manager(hft.ProcessGroupGloo(policy(codec, codec != "none", min_bytes=1024), SECONDS))
        manager.meet(everyone())
        net = model()
        fragments = [nn.Sequential(net[0]), nn.Sequential(net[2])]
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        outer = [torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True) for f in fragments]
        with hft.DiLoCo(manager, fragments, inner, outer, 4, fragment_sync_delay=1) as diloco:
            steps(net, inner, 4, seed=0)
            assert manager.step == 2  # each fragment once
            for fragment in diloco._fragments:
                assert_same_everywhere(dict(fragment.original_parameters))
            averages = diloco._fragments[0]._average_grads.__self__._averages
            names = {key for key in averages.feedback.state_dict() if "0.weight" in str(key)}
            assert bool(names) == (codec != "none"), names
            kept = averages.feedback.state_dict()
            manager.commits = False
            steps(net, inner, 2, seed=1)
            assert same(averages._before, kept)
            manager.commits = True
            steps(net, inner, 2, seed=2)
            assert manager.step == 3
            for fragment in diloco._fragments:
                assert_same_everywhere(dict(fragment.original_parameters))


def case_another_process_group_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"of hybridcomp.torch.torchft, not torchft.process_group.ProcessGroupGloo"
    ):
        hft.DistributedDataParallel(Manager(process_group.ProcessGroupGloo(SECONDS)), model())
    with pytest.raises(PolicyError, match="int9"):
        hft.ProcessGroupGloo("int9")

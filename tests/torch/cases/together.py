"""Groups that decide together: four ranks, as two replicas of two ranks each."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hybridcomp as hc
import hybridcomp.torch as hct
from hybridcomp.policy.toml import parse_policy
from tests.torch.cases.adapt import GRAVAC, Fixed
from tests.torch.cases.hook import BACKENDS
from tests.torch.models.fsdp import MINUTE
from tests.torch.models.parallel import assert_same_on_all_ranks
from tests.unlike_times import unlike_times

PAIRS = ([0, 2], [1, 3])  # with one rank of each replica
ADAPTS = parse_policy(f"dp.all_reduce = {GRAVAC.replace('omega=0.9', 'omega=0.01')}", "it")


class Wide(Fixed):
    """A module whose first parameter is large enough for error feedback."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(200, 100))


def new_group(backend: str, ranks: list[int], policy: object) -> dist.ProcessGroup:
    options = {"pg_options": hct.Options(policy=policy, axis="dp")} if backend == "hybridcomp" else {}
    return dist.new_group(ranks, backend=backend, timeout=MINUTE, **options)


def gradients(ddp: DistributedDataParallel, step: int) -> list[torch.Tensor]:
    """Return the gradients of a step: the first parameter is a copy in both ranks of a replica, the second is not."""
    rank = dist.get_rank()
    alike = torch.Generator().manual_seed(100 * step + rank // 2)
    apart = torch.Generator().manual_seed(100 * step + 10 + rank)
    ddp.zero_grad()
    ddp(
        torch.randn(200, 100, generator=alike) ** 3, torch.randn(500, generator=apart) ** 3 * (1 + rank)
    ).backward()
    return [p.grad.clone() for p in ddp.module.parameters()]


def case_copies_stay_alike() -> None:
    """Check that the copies' gradients are the same bits where groups decide together, and not where they do not."""
    for backend in BACKENDS:
        for policy, steps in ((ADAPTS, 26), (hc.load_policy("auto"), 60)):
            for together in (False, True):
                groups = [new_group(backend, ranks, policy) for ranks in PAIRS]
                group = groups[dist.get_rank() % 2]
                larger = new_group(backend, [0, 1, 2, 3], policy)
                if together:
                    hct.decide_together(group, larger)
                ddp = DistributedDataParallel(Wide(), process_group=group)
                state = hct.HookState(policy, module=ddp, process_group=group)
                ddp.register_comm_hook(state, hct.comm_hook)
                with unlike_times():
                    first = torch.cat([gradients(ddp, step)[0].flatten() for step in range(steps)])
                codecs = {row.codec for row in state.rows()}
                assert len(codecs) > 1, (backend, policy.name, codecs)
                if together:
                    assert_same_on_all_ranks({"gradient": first})
                else:
                    everyone = [torch.empty_like(first) for _ in range(4)]
                    dist.all_gather(everyone, first)
                    assert not torch.equal(everyone[0], everyone[1]), (backend, policy.name)
                del ddp, state


def case_wrong_groups_are_refused_on_all_ranks() -> None:
    pairs = [dist.new_group(ranks, backend="hybridcomp", timeout=MINUTE) for ranks in PAIRS]
    group = pairs[dist.get_rank() % 2]
    gloo = dist.new_group([0, 1, 2, 3], backend="gloo", timeout=MINUTE)
    with pytest.raises(ValueError, match="must have one backend, not hybridcomp and gloo"):
        hct.decide_together(group, gloo)
    halves = [dist.new_group(ranks, backend="hybridcomp", timeout=MINUTE) for ranks in ([0, 1], [2, 3])]
    lacking = r"rank \d of the group of rank 0 is lacking"
    with pytest.raises(ValueError, match=lacking):
        hct.decide_together(group, halves[dist.get_rank() // 2])
    unlike = [dist.new_group(ranks, backend="hybridcomp", timeout=MINUTE) for ranks in ([0], [1, 2, 3])]
    with pytest.raises(ValueError, match="that of rank 0 has 1, that of rank 1 has 3"):
        hct.decide_together(unlike[min(1, dist.get_rank())], dist.group.WORLD)
    chosen = hct.Options(policy="int8" if dist.get_rank() % 2 else "none")
    apart = [
        dist.new_group(ranks, backend="hybridcomp", timeout=MINUTE, pg_options=chosen) for ranks in PAIRS
    ]
    with pytest.raises(
        hc.MismatchError, match=r"must have one policy: .* that of rank 1 is not that of rank 0"
    ):
        hct.decide_together(apart[dist.get_rank() % 2], dist.group.WORLD)


def case_a_larger_group_that_lacks_a_rank_is_refused_on_all_ranks_under_gloo() -> None:
    """Check that a rank whose own group is within the larger one is told of the other, which is not."""
    group = [new_group("gloo", ranks, ADAPTS) for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2]
    larger = [new_group("gloo", ranks, ADAPTS) for ranks in ([0, 1, 2], [3])][dist.get_rank() // 3]
    hct.decide_together(group, larger)
    with pytest.raises(ValueError, match=r"in the larger group rank \d of the group of rank \d is lacking"):
        hct.HookState(ADAPTS, process_group=group).average(
            torch.zeros(8192), lambda: [("w", (8192,))], "k", 0
        )


def case_a_group_of_one_rank_is_refused_with_the_others_under_gloo() -> None:
    group = [new_group("gloo", ranks, ADAPTS) for ranks in ([0], [1, 2, 3])][min(1, dist.get_rank())]
    hct.decide_together(group, new_group("gloo", [0, 1, 2, 3], ADAPTS))
    state = hct.HookState(ADAPTS, process_group=group)
    with pytest.raises(ValueError, match="that of rank 0 has 1, that of rank 1 has 3"):
        state.average(torch.zeros(8192), lambda: [("w", (8192,))], "k", 0)


def case_groups_that_send_unlike_messages_are_told() -> None:
    for backend in BACKENDS:
        policy = parse_policy(
            'dp.all_reduce = { codec = "sidco:ratio=0.05", feedback = "ef", adapt = "sidco:every=2" }', "it"
        )
        groups = [new_group(backend, ranks, policy) for ranks in PAIRS]
        group = groups[dist.get_rank() % 2]
        hct.decide_together(group, new_group(backend, [0, 1, 2, 3], policy))
        state = hct.HookState(policy, process_group=group)
        parameters = [("v", (8192,)), ("w", (8192,))][: 1 + dist.get_rank() % 2]

        def train(state=state, parameters=parameters) -> None:
            for step in range(4):
                state.average(torch.randn(8192 * len(parameters)), lambda: parameters, "k", step).wait()

        # A rank whose own check comes later is told of another's error.
        with pytest.raises(
            (hc.MismatchError, hc.RemoteError), match=r"same order: .* has 2 figures, .* has 4"
        ):
            train()

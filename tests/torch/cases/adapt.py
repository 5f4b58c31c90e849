"""Hooks and FSDP2 models whose rules adapt, over hybridcomp and over gloo."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp as hc
import hybridcomp.torch as hct
from hybridcomp.policy.adapt.decisions import files, read_decisions
from hybridcomp.policy.toml import parse_policy
from tests.torch.cases.hook import BACKENDS, hooked
from tests.torch.models.fsdp import local_gradients, mesh_of, same_bits, sharded
from tests.torch.models.parallel import assert_same_on_all_ranks

GRAVAC = (
    '{ codec = "topk:ratio=0.5", feedback = "ef", '
    'adapt = "gravac:first=0.5,least=0.06,every=2,window=4,eps=0.2,omega=0.9" }'
)
DCT = '{ codec = "threshold", feedback = "ef", adapt = "dct:density=0.2,check=2,every=6,scope=tensor" }'
SIDCO = '{ codec = "sidco:ratio=0.05,stages=2", feedback = "ef", adapt = "sidco:every=2,drift=0.1" }'
STEPS = (
    '{ codec = "int4:block=64", feedback = "ef", steps = { 3 = "powersgd:rank=2", 6 = "topk:ratio=0.1" } }'
)


class Fixed(nn.Module):
    """A module whose gradients a test gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(40, 30))
        self.second = nn.Parameter(torch.zeros(500))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (self.first * first).sum() + (self.second * second).sum()


def given(step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(40, 30, generator=generator) ** 3, torch.randn(500, generator=generator) ** 3]


def adapting(backend: str, rule: str) -> DistributedDataParallel:
    return hooked(backend, parse_policy(f"dp.all_reduce = {rule}", "adapting"), Fixed())


def average(ddp: DistributedDataParallel, step: int) -> torch.Tensor:
    """Return the gradient that a rank gets in a step, flat."""
    ddp.zero_grad()
    ddp(*given(step, dist.get_rank())).backward()
    return torch.cat([p.grad.flatten() for p in ddp.module.parameters()])


def case_ranks_decide_alike_and_nothing_is_lost() -> None:
    """Check that what was averaged over the steps, and what the ranks still owe, are the sum of all gradients."""
    ranks, steps = dist.get_world_size(), 24
    for backend in BACKENDS:
        for rule, kinds in (
            (GRAVAC, {"none", "topk"}),
            (DCT, {"threshold"}),
            (SIDCO, {"sidco"}),
            (STEPS, {"int4", "powersgd", "topk"}),
        ):
            ddp = adapting(backend, rule)
            total, meant = torch.zeros(1700, dtype=torch.float64), torch.zeros(1700, dtype=torch.float64)
            for step in range(steps):
                found = average(ddp, step)
                assert_same_on_all_ranks({"gradient": found})
                total += found
                for rank in range(ranks):
                    meant += torch.cat([g.flatten() for g in given(step, rank)]).double() / ranks
            owed = np.concatenate(
                [
                    ddp.state.feedback.residual(("dp", name), n)
                    for name, n in (("first", 1200), ("second", 500))
                ]
            )
            each = torch.from_numpy(owed).double()
            dist.all_reduce(each, group=ddp.process_group)
            difference = (total + each / ranks - meant).norm() / meant.norm()
            assert difference < 1e-5, (backend, rule, difference)
            carried = {row.codec.partition(":")[0] for row in ddp.state.rows() if row.raw_bytes}
            assert carried >= kinds, (backend, rule, carried)
            thresholds = {row.codec for row in ddp.state.rows() if row.codec.startswith("threshold")}
            assert len(thresholds) <= 1, thresholds  # whatever values they have taken
            decided = [tuple(one) for one in hct.decisions()] if rule != STEPS else []
            assert len(decided) >= (3 if rule == GRAVAC else 2) or rule == STEPS
            kept = len(ddp.state._plans._known)  # of one bucket; of each codec of a table
            assert kept == 1 or rule == STEPS, (backend, rule, kept)
            everyone: list[object] = [None] * ranks
            dist.all_gather_object(everyone, decided)
            assert everyone == [decided] * ranks
            del ddp


def case_one_rank_that_is_not_finite_in_measured_steps() -> None:
    """Check that ranks gather figures all the same, and decide alike by those of the others."""
    ranks, steps = dist.get_world_size(), 10
    for backend in BACKENDS:
        for rule in (GRAVAC, DCT, DCT.replace(",scope=tensor", ""), SIDCO):
            ddp = adapting(backend, rule)
            for step in range(steps):
                gradients = given(step, dist.get_rank())
                if dist.get_rank() == 1 and step in (0, 4):  # as where a loss scale is too large
                    for gradient in gradients[: 1 if step else 2]:
                        gradient[0] = float("inf")
                ddp.zero_grad()
                ddp(*gradients).backward()
            decided = [tuple(one) for one in hct.decisions()]
            everyone: list[object] = [None] * ranks
            dist.all_gather_object(everyone, decided)
            assert everyone == [decided] * ranks, (backend, rule)
            assert any(one.step == 2 for one in hct.decisions()), (backend, rule)
            del ddp


def case_files_have_the_decisions_of_groups_of_all_ranks() -> None:
    """Check that senders of one axis are told apart, and that a group of some ranks writes no file."""
    # Each rank is in one of them: torch names later groups by the number of those that a rank is in.
    pair, _ = (dist.new_group(ranks, backend="hybridcomp") for ranks in ([0, 1], [2]))
    with tempfile.TemporaryDirectory() as folder:
        rule = SIDCO.replace("sidco:every=2", f"sidco:every=2,freeze={folder}/decided.toml")
        both = [adapting("gloo", rule) for _ in range(2)]
        for step in range(4):
            for ddp in both:
                average(ddp, step)
        places = [ddp.state._adapting._adaptation.written()[0].place for ddp in both]
        assert places[1] == places[0] + 1
        files.write()
        found = read_decisions(Path(folder) / "decided.toml") if dist.get_rank() == 0 else ()
        assert {one.place for one in found} == set(places if found else ())
        assert {(one.axis, one.op) for one in found} <= {("dp", "all_reduce")}
        if dist.get_rank() < 2:
            alone = hct.HookState(parse_policy(f"dp.all_reduce = {rule}", "it"), process_group=pair)
            with pytest.raises(hc.PolicyError, match="2 of 3 ranks make them: other groups decide apart"):
                alone.average(torch.zeros(8), lambda: [("w", (8,))], "w", 0)
        files._sources.clear()  # the folder goes


def case_a_resumed_hook_has_the_bits_of_an_uninterrupted_one() -> None:
    for backend in BACKENDS:
        for rule, at in ((DCT, 4), (DCT, 5), (SIDCO, 5)):
            whole = adapting(backend, rule)
            wanted = [average(whole, step) for step in range(12)]
            del whole
            first = adapting(backend, rule)
            for step in range(at):
                average(first, step)
            saved = hct.state_dict()
            del first
            second = adapting(backend, rule)
            hct.load_state_dict(saved)
            for step in range(at, 12):
                assert torch.equal(average(second, step), wanted[step]), (backend, rule, at, step)
            del second


def case_reduce_scatters_of_fsdp_adapt() -> None:
    for backend in BACKENDS:
        policy = parse_policy(
            'fsdp.reduce_scatter = { codec = "threshold", feedback = "ef", adapt = "dct:density=0.5,check=2" }',
            "it",
        )
        model = sharded(mesh_of(backend))
        state = hct.compress_fsdp(model, policy)
        for _ in range(6):
            local_gradients(model)
        decided = [one for one in hct.decisions() if one.axis == "fsdp"]
        assert decided
        assert all(one.op == "reduce_scatter" for one in decided)
        saved = state.memory()
        assert any(key.startswith("decided/0/") for key in saved)
        again = sharded(mesh_of(backend))
        other = hct.compress_fsdp(again, policy)
        other.load_memory({key: array.copy() for key, array in saved.items()})
        same_bits(local_gradients(model), local_gradients(again))
        del model, again, state, other

"""LocalSGD and DiLoCo on three ranks; checks that need none."""

import pytest
import torch
from torch import nn

import hybridcomp.torch as hct
from hybridcomp.errors import PolicyError
from hybridcomp.policy import Policy
from hybridcomp.policy.toml import parse_policy
from hybridcomp.torch.sync.cutting import cut
from tests.torch.harness import case_names, check_case


@pytest.mark.parametrize("case", case_names("sync"))
def test_case(case: str) -> None:
    check_case("sync", 3, case)


def sized(*sizes: int) -> nn.Module:
    model = nn.Module()
    for number, size in enumerate(sizes):
        model.register_parameter(f"p{number}", nn.Parameter(torch.zeros(size)))
    return model


@pytest.mark.parametrize(
    ("sizes", "count", "runs"),
    [
        ([4, 4, 4, 4], 2, [2, 2]),
        ([1, 1, 1, 9], 2, [3, 1]),
        ([9, 1, 1, 1], 2, [1, 3]),
        ([100, 1, 1], 3, [1, 1, 1]),
        ([1, 1, 100], 3, [1, 1, 1]),
        ([3, 3, 3, 3, 3], 3, [2, 1, 2]),
        ([5], 1, [1]),
    ],
)
def test_fragments_are_runs_of_about_equal_size(sizes: list[int], count: int, runs: list[int]) -> None:
    parts = cut(sized(*sizes), count)
    assert [len(part) for part in parts] == runs
    assert [name for part in parts for name in part] == [f"p{i}" for i in range(len(sizes))]


def small() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"every": 0}, "every must be at least 1, not 0"),
        ({"every": 2.5}, "every must be an integer, at least 1, not 2.5"),
        ({"every": float("inf")}, "every must be an integer, at least 1, not inf"),
        ({"every": True}, "every must be an integer, at least 1, not True"),
        ({"every": 4, "fragments": 2.0}, "fragments must be an integer, at least 1, or modules, not 2.0"),
        ({"every": 4, "fragments": True}, "fragments must be an integer, at least 1, or modules, not True"),
        ({"every": 4, "fragment_sync_delay": 0.5}, "must be an integer, from 0 and below every, not 0.5"),
        ({"every": 3, "fragments": 4}, r"fragments must be from 1 to every \(3\), not 4"),
        ({"every": 9, "fragments": 5}, r"from 1 to the number of trained parameters \(4\), not 5"),
        ({"every": 4, "fragment_sync_delay": 4}, r"from 0 and below every \(4\), not 4"),
        (
            {"every": 5, "fragments": 2, "fragment_sync_delay": 2},
            r"below every / fragments \(2\), not 2.*='paper'",
        ),
        (
            {"every": 4, "fragment_sync_order": "late"},
            "fragment_sync_order must be one of torchft, paper, not 'late'",
        ),
        ({"every": 4, "fragment_update_alpha": 1.5}, "from 0 to 1, not 1.5"),
        ({"every": 4, "policy": "nosuch"}, "unknown policy 'nosuch'"),
    ],
)
def test_numbers_out_of_range_are_named(more: dict[str, object], words: str) -> None:
    model, inner = small()
    with pytest.raises(ValueError, match=words):
        hct.DiLoCo(model, inner, **more)


def with_feedback(codec: str, feedback: str) -> Policy:
    """Return a policy that at first compresses nothing."""
    rule = f'codec = "{codec}", feedback = "{feedback}", warmup_steps = 3, exclude = ["*weight"]'
    return parse_policy(f"dp.all_reduce = {{ {rule} }}", "p.toml")


@pytest.mark.parametrize(
    ("codec", "feedback"),
    [("topk:ratio=0.1", "dgc"), ("int4", "ef-sgdm:momentum=0.5"), ("powersgd", "ef-sgdm")],
)
def test_feedback_with_momentum_is_refused(codec: str, feedback: str) -> None:
    """It would make others of the parameters' differences."""
    model, inner = small()
    policy = with_feedback(codec, feedback)
    words = rf'feedback {feedback} of dp has momentum, .*: give feedback = "ef", "loco" or "ef21"'
    for make in (hct.LocalSGD, hct.DiLoCo):
        with pytest.raises(PolicyError, match=words):
            make(model, inner, every=4, policy=policy)
        make(model, inner, every=4, policy=policy, axis="tp")


@pytest.mark.parametrize("feedback", ["ef", "ef21", "loco", "dgc:momentum=0"])
def test_other_feedback_is_allowed(feedback: str) -> None:
    model, inner = small()
    hct.LocalSGD(model, inner, every=4, policy=with_feedback("topk:ratio=0.1", feedback))


def test_fragments_that_do_not_fit_are_named() -> None:
    model, inner = small()
    for fragments, words in (
        ([model[0]], "no fragment has 1.weight"),
        ([model[0], model], "0.weight is in fragments 0 and 1"),
        ([*model, nn.Linear(1, 1)], "fragment 2 has a parameter that the model has not"),
        ([*model, nn.Tanh()], "fragment 2 has no parameter"),
    ):
        with pytest.raises(ValueError, match=words):
            hct.DiLoCo(model, inner, every=4, fragments=fragments)
    with pytest.raises(ValueError, match="nothing to synchronise"):
        hct.LocalSGD(model.requires_grad_(False), every=4)


def test_outer_optimizers_that_do_not_fit_are_named() -> None:
    model, inner = small()
    with pytest.raises(ValueError, match="another optimizer than inner"):
        hct.DiLoCo(model, inner, inner, every=4)
    with pytest.raises(ValueError, match=r"it lacks 1\.weight"):
        hct.DiLoCo(model, inner, torch.optim.SGD(model[0].parameters()), every=4)
    others = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="it has others, too"):
        hct.DiLoCo(model, inner, others, every=4)
    used = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    used.step()
    with pytest.raises(ValueError, match="outer has taken steps"):
        hct.DiLoCo(model, inner, used, every=4)


def test_global_values_of_complex_parameters_are_complex_and_in_single_precision_at_least() -> None:
    model = nn.Module()
    model.first = nn.Parameter(torch.randn(3).bfloat16())  # an odd number of reals, before pairs
    model.wave = nn.Parameter(torch.randn(2, dtype=torch.complex64))
    values = hct.LocalSGD(model, torch.optim.SGD(model.parameters()), every=2).state_dict()["globals"]
    assert {name: value.dtype for name, value in values.items()} == {
        "first": torch.float32,
        "wave": torch.complex64,
    }
    for name, value in model.named_parameters():
        assert torch.equal(values[name], value.detach().to(values[name].dtype)), name


def test_states_that_do_not_fit_are_named() -> None:
    model, inner = small()
    context = hct.DiLoCo(model, inner, every=4, fragments=2)
    part = {name: tensor for name, tensor in context.state_dict()["globals"].items() if name.startswith("0")}
    with pytest.raises(ValueError, match=r"of 1\.weight the saved state has none, and this has \[2, 2\]"):
        context.load_state_dict(context.state_dict() | {"globals": part})
    late = context.state_dict() | {"step": 3, "arrived": dict(model[0].named_parameters(prefix="0"))}
    with pytest.raises(
        ValueError, match="every, fragments, fragment_sync_delay and its order must be as they were"
    ):
        context.load_state_dict(late)
    half = context.state_dict() | {"arrived": {"0.weight": torch.ones(2, 2)}}
    with pytest.raises(ValueError, match=r"outer gradients under way: of 0\.bias"):
        context.load_state_dict(half)

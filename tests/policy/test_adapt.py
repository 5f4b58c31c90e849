"""Test decisions about a rule's codec, made from figures on which all ranks agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.arrays import DType
from hybridcomp.errors import PolicyError
from hybridcomp.policy import Message, load_policy
from hybridcomp.policy.adapt.decisions import Decision, to_toml
from hybridcomp.policy.adapt.gravac import ladder
from hybridcomp.policy.adapt.thresholds import threshold_of
from hybridcomp.policy.load import frozen_to
from hybridcomp.policy.toml import parse_policy
from tests.policy.job import DCT, NAMES, SIDCO, Job, drawn, rule

GRAVAC = '{ codec = "topk:ratio=0.1", feedback = "ef", adapt = "gravac:OPTIONS" }'


# -- gravac -----------------------------------------------------------------------------------------------------


def test_gains_are_those_of_the_codec():
    """The norms that top-k of each ratio keeps, tensor by tensor, over all ranks."""
    job = Job(*rule(GRAVAC, "least=0.025,alpha=1.0"), drawn)
    job.run(0, 3)
    ratios = [0.1, 0.05, 0.025]
    kept, whole = np.zeros(3), 0.0
    for rank in range(3):
        for name in NAMES:
            x = drawn(0, rank, name)
            whole += np.linalg.norm(x.astype(np.float64))
            for i, ratio in enumerate(ratios):
                back = hc.decode(hc.get_codec("topk", ratio=ratio).encode(x))
                kept[i] += np.linalg.norm(back.astype(np.float64))
    controller = job.each[0]._controller
    assert controller.ratios == ratios
    np.testing.assert_allclose(controller.gains, kept / whole, rtol=1e-9)


def test_the_ratio_with_the_best_score_is_kept():
    """Steps that take as long as their messages, beside a second of other work: gain over seconds has a best ratio."""
    job = Job(*rule(GRAVAC, "eps=0.1,every=2,window=8,omega=0.001,least=0.001"), drawn)
    seconds = {f"topk:ratio={r:g}": 0.02 + 10 * r for r in ladder(0.1, 0.5, 0.001)}
    job.seconds = lambda codec: seconds.get(codec, 20.0)
    job.run(0, 200)
    controller = job.each[0]._controller
    scores = {
        ratio: gain / seconds[f"topk:ratio={ratio:g}"]
        for ratio, gain in zip(controller.ratios, controller.gains, strict=True)
    }
    assert not controller.searching
    assert controller.sent == max(scores, key=scores.__getitem__)
    assert job.codecs[-1] == f"topk:ratio={controller.sent:g}"
    tried = [d.codec.removesuffix(":values=none") for d in job.each[0].history()]
    assert tried[:4] == ["none", "topk:ratio=0.1", "topk:ratio=0.05", "topk:ratio=0.025"]


def test_the_search_ends_where_two_ratios_are_as_good():
    job = Job(*rule(GRAVAC, "eps=0.1,every=2,window=8,omega=0.9,least=0.001"), drawn)
    job.run(0, 60)
    assert job.each[0]._controller.sent == 0.05  # the smaller one of the first two
    assert "search ended" in job.each[0].history()[-1].why


def test_all_is_sent_where_too_little_would_be_kept_and_again_less_later():
    def values(step: int, rank: int, name: str) -> np.ndarray:
        flat = np.ones(4000, np.float32)
        flat[:40] = 100.0 if step >= 40 else 1.0
        return flat

    job = Job(*rule(GRAVAC, "eps=0.9,every=2,window=8,least=0.05"), values)
    job.run(0, 80)
    assert set(job.codecs[3:40]) == {"none"}
    assert job.codecs[-1] == "topk:ratio=0.05"


def test_steps_that_are_not_finite_decide_nothing():
    def values(step: int, rank: int, name: str) -> np.ndarray:
        found = drawn(0, rank, name)
        if step >= 10 and rank == 1:
            found[7] = np.nan if name == "first" else np.inf
        return found

    job = Job(*rule(GRAVAC, "eps=0.3,every=2,window=1000"), values)
    job.run(0, 10)
    before = job.each[0]._controller.gains
    job.values = lambda step, rank, name: np.full(100, np.nan, np.float32)
    job.run(10, 20)
    assert job.each[0]._controller.gains == before
    job.values = values
    job.run(20, 30)
    assert np.isfinite(job.each[0]._controller.gains).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("text", "options"),
    [
        (GRAVAC, "every=2"),
        (DCT, "density=0.01,check=2,every=4"),
        (DCT, "density=0.01,check=2,every=4,scope=tensor"),
        (SIDCO.replace("0.01", "0.01,stages=4"), "every=2,drift=0.01"),
        (SIDCO.replace("0.01", "0.01,stages=4"), "every=2,drift=0.01,scope=all"),
    ],
)
def test_ranks_gather_as_many_figures_where_one_is_not_finite(text, options, bad):
    """One rank's tensors have no finite figures in measured steps; the other ranks' decide."""

    def values(step: int, rank: int, name: str) -> np.ndarray:
        found = drawn(step, rank, name)
        if rank == 1 and (step == 4 or name == "first"):
            found[0] = bad
        return found

    job = Job(*rule(text, options), values)
    job.run(0, 12)
    for offers in job.offers.values():
        assert len(offers) == 3
        assert len({len(one) for one in offers}) == 1
    history = job.each[0].history()
    assert [one.history() for one in job.each] == [history] * 3
    assert len(history) > 1 or text == GRAVAC
    if "scope=tensor" in options:
        tau = next(d for d in reversed(history) if d.name == "first")
        finite = [np.sort(np.abs(drawn(tau.step - 2, rank, "first")))[-40] for rank in (0, 2)]
        assert tau.codec == f"threshold:abs={threshold_of(float(np.mean(finite))):g}:values=none"


# -- saved, and repeated ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (GRAVAC, "eps=0.2,every=3,window=9"),
        (DCT, "check=5,density=0.02"),
        (SIDCO.replace("0.01", "0.01,stages=3"), "every=4,drift=0.05"),
    ],
)
@pytest.mark.parametrize("at", [20, 21, 22])
def test_a_resumed_job_decides_what_an_uninterrupted_one_does(text, options, at):
    whole = Job(*rule(text, options), drawn)
    whole.run(0, 60)
    first = Job(*rule(text, options), drawn)
    first.run(0, at)
    saved = [one.memory() for one in first.each]
    second = Job(*rule(text, options), drawn)
    for one, arrays in zip(second.each, saved, strict=True):
        one.load_memory({key: array.copy() for key, array in arrays.items()})
    first.run(at, 60)  # saving has changed nothing
    second.run(at, 60)
    assert first.codecs == whole.codecs
    assert second.codecs == whole.codecs[at:]
    assert second.each[0].history() == whole.each[0].history()


def test_a_state_that_is_none():
    job = Job(*rule(DCT), drawn)
    with pytest.raises(ValueError, match=r"the saved decisions of dp\.all_reduce cannot be those"):
        job.each[0].load_memory({"state": np.frombuffer(b"{}", np.uint8)})


@pytest.mark.parametrize(
    ("text", "options"),
    [(GRAVAC, "eps=0.2,every=3,window=9"), (SIDCO.replace("0.01", "0.01,stages=4"), "every=2,drift=0.02")],
)
def test_frozen_decisions_are_made_at_their_steps(tmp_path: Path, text, options):
    job = Job(*rule(text, options), drawn)
    job.run(0, 80)
    file = tmp_path / "decided.toml"
    file.write_text(to_toml(job.each[0].history()))
    kind = "gravac" if text == GRAVAC else "sidco"
    again = Job(*rule(text.replace(f'"{kind}:OPTIONS', f'"frozen:{file}')), drawn)
    again.run(0, 80)
    assert again.codecs == job.codecs
    assert len(set(job.codecs)) > 2


def test_an_environment_or_a_trainer_names_the_file(monkeypatch: pytest.MonkeyPatch):
    policy, _ = rule(GRAVAC)
    assert frozen_to(policy, "there.toml").adapting("dp", "all_reduce").adapt.freeze == "there.toml"
    monkeypatch.setenv("HYBRIDCOMP_FREEZE", "here.toml")
    assert frozen_to(policy).adapting("dp", "all_reduce").adapt.freeze == "here.toml"
    assert frozen_to(policy).digest == policy.digest


# -- rules ------------------------------------------------------------------------------------------------------


def test_codecs_by_step():
    policy = parse_policy(
        'dp.all_reduce = { codec = "int4", feedback = "ef", warmup_steps = 3, '
        'steps = { 20 = "int8", 10 = ["powersgd", "int2"] } }',
        "it",
    )

    def codec(step: int | None, *shape: int) -> str:
        about = Message(
            "dp", "all_reduce", "backward", DType.FLOAT32, 1 << 20, "w", step, shape or (512, 512)
        )
        return policy.choose(about).codec.name

    assert [codec(step) for step in (0, 2, 3, 9, 10, 19, 20, 10**9)] == [
        *["none"] * 2,
        *["int4"] * 2,
        *["powersgd"] * 2,
        *["int8"] * 2,
    ]
    assert codec(10, 7) == "int2"  # a tensor of one dim
    assert codec(None) == "int8"  # without a count of steps, the last codec
    assert [policy.same_as_step(step) for step in (0, 2, 3, 9, 10, 25)] == [0, 0, 3, 3, 10, 20]
    assert {c.name for c in policy.codecs("dp", "all_reduce")} == {"int4", "powersgd", "int2", "int8"}
    plain = parse_policy('dp.all_reduce = { codec = "int4", feedback = "ef", warmup_steps = 3 }', "it")
    assert policy.digest != plain.digest


@pytest.mark.parametrize("name", ["lowrank", "sparse"])
def test_presets_of_slow_links_begin_with_four_bits(name):
    policy = load_policy(name)

    def codec(step: int) -> str:
        about = Message("dp", "all_reduce", "backward", DType.FLOAT32, 1 << 20, "w", step, (512, 512))
        return policy.choose(about).codec.name

    assert codec(99) == "int4"
    assert codec(100) == {"lowrank": "powersgd", "sparse": "topk"}[name]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{ codec = "int4", adapt = "gravac" }', "adapt gravac decides about codec topk or sidco, not int4"),
        ('{ codec = "topk", adapt = "dct" }', "adapt dct decides about codec threshold, not topk"),
        (
            '{ codec = "topk", adapt = "gravel" }',
            "adapt must be one of gravac, dct, sidco, frozen, not 'gravel'",
        ),
        ('{ codec = "topk", adapt = "sidco" }', "adapt sidco decides about codec sidco, not topk"),
        ('{ codec = "sidco", adapt = "sidco:every=0" }', "every must be an integer from 1"),
        ('{ codec = "sidco", adapt = "sidco:drift=1.5" }', "drift must be a number above 0 and at most 1"),
        ('{ codec = "sidco", adapt = "sidco:stages=2" }', "no parameter 'stages'; it takes every, drift"),
        ('{ codec = "topk", adapt = 3 }', "adapt must be a text such as"),
        (
            '{ codec = "topk", feedback = "dgc", adapt = "gravac" }',
            "goes with feedback ef, or none, not 'dgc'",
        ),
        ('{ codec = "topk", adapt = "gravac:epsilon=1" }', "has no parameter 'epsilon'; it takes eps"),
        ('{ codec = "topk", adapt = "gravac:0.5" }', "no parameter without a name"),
        ('{ codec = "topk", adapt = "gravac:eps=2" }', "eps must be a number above 0 and at most 1, not 2"),
        ('{ codec = "topk", adapt = "gravac:every=0" }', "every"),
        (
            '{ codec = "topk", adapt = "gravac:factor=0.9999999" }',
            "factor must be a number above 0 and at most 0.99",
        ),
        (
            '{ codec = "topk", adapt = "gravac:first=0.01,least=0.1" }',
            "least must be at most first (0.01), not 0.1",
        ),
        ('{ codec = "threshold", adapt = "dct:scope=some" }', "scope must be one of all, tensor"),
        ('{ codec = "topk", adapt = "frozen:nowhere.toml" }', "cannot read decisions nowhere.toml"),
        ('{ codec = "topk", adapt = "gravac", steps = { 3 = "int8" } }', "give only one of them"),
        (
            '{ codec = "topk", steps = { a = "int8" } }',
            "steps must be a table of steps of training and codecs",
        ),
        (
            '{ codec = "topk", feedback = "dgc", steps = { 3 = "powersgd" } }',
            "feedback of powersgd must be ef",
        ),
        ('{ steps = { 3 = "int8" } }', "steps stands beside a codec, and here is none"),
    ],
)
def test_what_is_wrong_is_said(text, told):
    with pytest.raises(PolicyError) as caught:
        parse_policy(f"dp.all_reduce = {text}", "it")
    assert told in str(caught.value)
    assert "it: line 1, key dp.all_reduce" in str(caught.value)


def test_adapt_stands_in_entries_of_sums_only():
    with pytest.raises(
        PolicyError, match="adapt stands in an entry all_reduce or reduce_scatter of an axis only"
    ):
        parse_policy('tp.forward = { codec = "topk", adapt = "gravac" }', "it")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "decision = 3",
        "[[decision]]\nstep = 1",
        '[[decision]]\nstep = "1"\ncodec = "int8"',
        '[[decision]]\nstep = -1\ncodec = "int8"',
        '[[decision]]\nstep = 1\ncodec = "int99"',
        '[[decision]]\nstep = 1\ncodec = "int8"\nmore = 1',
        '[[decision]]\nstep = 1\ncodec = "int8"\naxis = 1',
        '[[decision]]\nstep = 1\ncodec = "int8"\nplace = -1',
    ],
)
def test_files_that_are_no_decisions(tmp_path: Path, text):
    file = tmp_path / "decided.toml"
    file.write_text(text)
    with pytest.raises(PolicyError, match=r"decided\.toml"):
        parse_policy(f'dp.all_reduce = {{ codec = "topk", adapt = "frozen:{file}" }}', "it")


def test_decisions_as_text_and_back(tmp_path: Path):
    made = [
        Decision(3, "int8:block=128", "", "why"),
        Decision(5, "none", 'a "name"', "", "dp", "all_reduce", 2),
    ]
    file = tmp_path / "decided.toml"
    file.write_text(to_toml(made))
    _, found = rule(GRAVAC.replace("gravac:OPTIONS", f"frozen:{file}"))
    assert list(found.adapt.frozen) == made

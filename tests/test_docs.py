"""The guide to codecs speaks of the codecs that there are, and the code of pages runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hybridcomp as hc
from hybridcomp.arrays import DType
from hybridcomp.codecs import own_names

DOCS = Path(__file__).parent.parent / "docs"
GUIDE = (DOCS / "codecs.md").read_text()
SPECS = sorted(
    {
        spec
        for spec in re.findall(r"`([a-z0-9]+(?::[^`]*)?)`", GUIDE)
        if spec.partition(":")[0] in own_names()
        and not re.search(r"=(\.\.\.|[a-z])(,|$)", spec)  # not rate=r
    }
)


@pytest.mark.parametrize("spec", SPECS)
def test_specs_are_right(spec):
    assert hc.get_codec(spec).name == spec.partition(":")[0]


def test_no_codec_is_left_out():
    assert set(own_names()) == {spec.partition(":")[0] for spec in SPECS}


def test_the_first_example_runs():
    example = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert example
    scope: dict[str, object] = {}
    exec(example[1], scope)
    assert scope["y"].shape == scope["x"].shape == (1_000_000,)
    assert scope["total"].any()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_benchmarker_s_example_runs(capsys):
    (example,) = blocks("for-benchmarks.md", "python")
    exec(example, {})
    assert capsys.readouterr().out.endswith(" GB/s, 8.25 bits per value\n")


def test_the_policy_of_the_choice_is_one(tmp_path):
    (text,) = blocks("choosing.md", "toml")
    (tmp_path / "policy.toml").write_text(text)
    policy = hc.load_policy(tmp_path / "policy.toml")
    message = hc.Message("dp", "all_reduce", None, DType.FLOAT32, 4 << 20, "layer.weight", 200, (1024, 1024))
    assert policy.choose(message).codec.name == "powersgd"

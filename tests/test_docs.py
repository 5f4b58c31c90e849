"""The guide to codecs speaks of the codecs that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hybridcomp as hc
from hybridcomp.codecs import names

GUIDE = (Path(__file__).parent.parent / "docs" / "codecs.md").read_text()
SPECS = sorted(
    {
        spec
        for spec in re.findall(r"`([a-z0-9]+(?::[^`]*)?)`", GUIDE)
        if spec.partition(":")[0] in names() and not re.search(r"=(\.\.\.|[a-z])(,|$)", spec)  # not rate=r
    }
)


@pytest.mark.parametrize("spec", SPECS)
def test_specs_are_right(spec):
    assert hc.get_codec(spec).name == spec.partition(":")[0]


def test_no_codec_is_left_out():
    assert set(names()) == {spec.partition(":")[0] for spec in SPECS}


def test_the_first_example_runs():
    example = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert example
    scope: dict[str, object] = {}
    exec(example[1], scope)
    assert scope["y"].shape == scope["x"].shape == (1_000_000,)
    assert scope["total"].any()

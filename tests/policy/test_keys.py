"""Check what holds for every key of a policy file and every field of a rule."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hybridcomp.codecs import get_codec
from hybridcomp.policy.adapt.spec import parse_adapt
from hybridcomp.policy.rules import Policy, Rule
from hybridcomp.policy.toml import _RULE_KEYS, parse_policy

GUIDES = [Path(__file__).parents[2] / name for name in ("README.md", "docs/techniques.md", "docs/adapt.md")]
INT8, TOPK = (get_codec("int8"),), (get_codec("topk"),)
# For each field a value that is not its default, and the key as a file has it, in an entry of the axis `dp`.
SET = {
    "codecs": (INT8, 'codec = "int8"', "all_reduce"),
    "feedback": ("ef", 'feedback = "ef"', "all_reduce"),
    "warmup_steps": (3, "warmup_steps = 3", "all_reduce"),
    "min_bytes": (3, "min_bytes = 3", "all_reduce"),
    "exclude": (("*.bias",), 'exclude = ["*.bias"]', "all_reduce"),
    "only": ("cool-down", 'only = "cool-down"', "backward"),
    "stages": (3, "stages = 3", "all_reduce"),
    "from_layer": (3, "from_layer = 3", "all_reduce"),
    "between_hosts": (True, "between_hosts = true", "all_reduce"),
    "algorithm": ("ring", 'algorithm = "ring"', "all_reduce"),
    "steps": (((3, INT8),), 'steps = { 3 = "int8" }', "all_reduce"),
    "adapt": (parse_adapt("gravac", TOPK, None), 'adapt = "gravac"', "all_reduce"),
}
FIELDS = [f.name for f in dataclasses.fields(Rule)]


def rule(name: str) -> Rule:
    """Return a rule that sets this field, and a codec, without which most mean nothing."""
    return Rule(**{"codecs": INT8, name: SET[name][0]})


@pytest.mark.parametrize("name", FIELDS)
def test_ranks_whose_rules_differ_have_other_digests(name):
    without = Rule() if name == "codecs" else Rule(INT8)
    assert Policy("p", rule(name)).digest != Policy("p", without).digest


@pytest.mark.parametrize("name", FIELDS)
def test_a_rule_keeps_what_it_sets_inside_another(name):
    assert getattr(rule(name).inside(Rule()), name) == SET[name][0]
    assert getattr(Rule().inside(rule(name)), name) == SET[name][0]  # and takes it where it sets nothing


@pytest.mark.parametrize("name", FIELDS)
def test_a_file_sets_it(name):
    value, line, entry = SET[name]
    codec = {"codecs": "", "adapt": 'codec = "topk", '}.get(name, 'codec = "int8", ')
    policy = parse_policy(f"[dp]\n{entry} = {{ {codec}{line} }}\n", "p.toml")
    assert getattr(policy.entries["dp"][entry], name) == value


def test_every_key_of_a_file_is_a_field_and_in_the_guides():
    keys = {line.partition(" ")[0] for _, line, _ in SET.values()}
    assert keys == set(_RULE_KEYS)
    told = "\n".join(guide.read_text() for guide in GUIDES)
    assert [key for key in sorted(keys) if key not in told] == []

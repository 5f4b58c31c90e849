"""List the codecs that a plan may give to an axis, by the loss that a training may risk; write them as a policy."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hybridcomp.policy import Policy
from hybridcomp.policy.toml import parse_policy

LossBudget = Literal["exact", "safe", "aggressive"]
BUDGETS: tuple[LossBudget, ...] = ("exact", "safe", "aggressive")


@dataclass(frozen=True)
class AxisCodec:
    """Codec for all large messages of an axis.

    Attributes:
        name: name for people.
        rules: lines of the axis's section in a policy.
    """

    name: str
    rules: str


NONE = AxisCodec("none", 'codec = "none"')
_EXACT = (NONE, AxisCodec("exponent", 'codec = "exponent"'))
_SAFE = (AxisCodec("bf16", 'codec = "bf16"'), AxisCodec("int8", 'codec = "int8:block=128"'))
_AGGRESSIVE: Mapping[str, tuple[AxisCodec, ...]] = {
    # Only summed gradients have a residual at the sender that the next step can repair.
    "dp": (
        AxisCodec("int4 + ef", 'all_reduce = { codec = "int4:block=128", feedback = "ef" }'),
        AxisCodec(
            "powersgd + ef",
            'all_reduce = { codec = ["powersgd:rank=4", "int8:block=128"], feedback = "ef" }',
        ),
        AxisCodec(
            "topk + ef",
            'all_reduce = { codec = "topk:ratio=0.01", feedback = "ef" }',
        ),
    ),
    "pp": (
        AxisCodec(
            "int8, back int4 + ef",
            'forward = "int8:block=128"\nbackward = { codec = "int4:block=128", feedback = "ef" }',
        ),
    ),
}
_AROUND = 'min_bytes = 16384\nexclude = ["*.bias", "*norm*"]\n'


def codecs_of(axis: str, budget: LossBudget) -> tuple[AxisCodec, ...]:
    """Return the codecs that an axis may be given, ``none`` first."""
    if budget == "exact":
        return _EXACT
    if budget == "safe":
        return _EXACT + _SAFE
    return _EXACT + _SAFE + _AGGRESSIVE.get(axis, ())


def policy_text(codecs: Mapping[str, AxisCodec]) -> str:
    """Return the policy, as TOML, that gives each axis its codec."""
    sections = [f"[{axis}]\n{codec.rules}\n" for axis, codec in codecs.items()]
    return "\n".join([_AROUND, *sections])


def policy_of(codecs: Mapping[str, AxisCodec]) -> Policy:
    """Return the policy that gives each axis its codec."""
    return _policy(policy_text(codecs), ", ".join(f"{axis} {codec.name}" for axis, codec in codecs.items()))


@functools.lru_cache(4096)
def _policy(text: str, name: str) -> Policy:
    return parse_policy(text, name)

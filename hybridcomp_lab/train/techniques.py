"""Check the needs of a policy's techniques on a configuration: see docs/techniques.md.

The module imports no torch: ranks do not exist yet.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec, get_codec
from hybridcomp.errors import ConfigError
from hybridcomp.policy import PHASES, Message, Policy, Rule
from hybridcomp.policy.auto.spec import axes_of
from hybridcomp.policy.momentum import check_differences, feedback_with_momentum
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.sync import DiLoCo, parse_sync

_OPS = {
    "pp": "send",
    "tp": "all_reduce",
}  # operation, by axis, that carries activations forward and their gradients backward

NONZERO = "threshold:abs=5e-324"
"""Codec of all values but zeros, unchanged."""


def with_sparse_sends(policy: Policy, config: TrainConfig) -> Policy:
    """Return a run's policy, with :data:`NONZERO` for stages' sends, where only a share of the values goes on.

    A policy that the user names keeps its codec for pp, if it has one.
    """
    if not config.pp_neurons or config.pp == 1 or (config.policy is not None and _names_sends(policy)):
        return policy
    axes = {**policy.axes, "pp": Rule((get_codec(NONZERO),), min_bytes=0)}
    entries = {axis: rules for axis, rules in policy.entries.items() if axis != "pp"}
    return dataclasses.replace(policy, axes=axes, entries=entries)


def _names_sends(policy: Policy) -> bool:
    if "pp" in policy.axes:
        return True
    if policy.auto is None:
        return bool(policy.codecs("pp", "send"))
    return bool(policy.auto.frozen) or "pp" in axes_of(policy.auto.classes)


def check_techniques(policy: Policy, config: TrainConfig) -> None:
    """Check that the schedule has the parts of which the policy speaks, and that its feedback suits what is sent.

    Raises:
        ConfigError: ``only = "cool-down"`` with a schedule whose pipeline stays full.
        PolicyError: feedback with momentum, where replicas send differences of parameters.
    """
    only = policy.entries.get("pp", {}).get("backward", Rule()).only
    if only is not None and config.schedule == "2bw":
        raise ConfigError(
            f"policy {policy.name}: pp.backward has only = {only!r}, and schedule 2bw has none, as it goes on into "
            "the next step: take 1f1b, gpipe or interleaved, or leave it out"
        )
    sync = None if config.sync is None else parse_sync(config.sync)
    if isinstance(sync, DiLoCo):
        check_differences(policy, "dp", f"with sync {config.sync} ")


def concerns(policy: Policy, config: TrainConfig) -> list[str]:
    """List warnings about a run's policy.

    They concern momentum that is applied twice, zeros that are sent, and gradients of activations that are too coarse.
    These gradients need the finer codec of the two (arXiv:2401.07788), unless error feedback makes up for it: sends of
    a pipeline have it, sums over tp, whose messages have no names, have not.
    """
    return [*_momentum_twice(policy, config), *_zeros(policy, config), *_coarse(policy, config)]


def _momentum_twice(policy: Policy, config: TrainConfig) -> list[str]:
    own = config.momentum if config.optimizer == "sgd" else config.beta1
    if config.dp == 1 or config.sync is not None or not own:
        return []
    op = "reduce_scatter" if config.shard == "zero1" else "all_reduce"
    feedback = feedback_with_momentum(policy, "dp", op)
    if feedback is None:
        return []
    return [
        f"policy {policy.name}: gradients over dp have momentum before compression (feedback {feedback}), and "
        f"optimizer {config.optimizer} adds its own: it is made for --optimizer sgd --momentum 0"
    ]


def _zeros(policy: Policy, config: TrainConfig) -> list[str]:
    if not config.pp_neurons or config.pp == 1 or config.backend != "hybridcomp":
        return []
    codecs = {policy.choose(message).codec for message in _messages("pp", config)}
    dense = sorted(codec.spec for codec in codecs if codec.fixed_size)
    return [
        f"policy {policy.name}: pp sends the zeros, too, by {spec}, and pp_neurons ({config.pp_neurons}) saves no "
        f"bytes: {NONZERO} does, or a policy without a codec for pp"
        for spec in dense
    ]


def _messages(axis: str, config: TrainConfig) -> list[Message]:
    """Return the messages of activations and of their gradients over an axis."""
    shape = (config.micro_batch_size * config.seq_len, config.d_model)
    nbytes = 4 * shape[0] * shape[1]
    return [Message(axis, _OPS[axis], phase, DType.FLOAT32, nbytes, shape=shape) for phase in PHASES]


def _coarse(policy: Policy, config: TrainConfig) -> list[str]:
    if config.backend != "hybridcomp":
        return []
    shape = (config.micro_batch_size * config.seq_len, config.d_model)
    found = []
    for axis in _OPS:
        if getattr(config, axis) == 1:
            continue
        forward, backward = map(policy.choose, _messages(axis, config))
        if axis == "pp" and backward.feedback is not None:
            continue
        there, back = (_bits(choice.codec, shape) for choice in (forward, backward))
        if back < there:
            found.append(
                f"policy {policy.name}: {axis} sends {back:.3g} bits a value backward and {there:.3g} forward, without "
                "error feedback; gradients of activations need more bits than activations (arXiv:2401.07788)"
            )
    return found


def _bits(codec: Codec, shape: tuple[int, int]) -> float:
    """Return the bits per value that a codec makes of noise of a shape."""
    noise = np.random.default_rng(0).standard_normal(shape, np.float32)
    return float(8 * codec.encode(noise).size / noise.size)

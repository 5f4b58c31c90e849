"""Load a :class:`~hybridcomp.policy.rules.Policy` from presets, files and bare codec specs."""

from __future__ import annotations

import dataclasses
import functools
import os
from importlib import resources
from pathlib import Path

from hybridcomp import variables
from hybridcomp.codecs import Codec, get_codec, names
from hybridcomp.codecs.registry import take_parameter
from hybridcomp.codecs.table import missing
from hybridcomp.errors import PolicyError, UnknownCodecError
from hybridcomp.files import read_text
from hybridcomp.perfmodel import wanted_path
from hybridcomp.policy.auto.spec import NAME as AUTO
from hybridcomp.policy.auto.spec import parse_spec
from hybridcomp.policy.rules import Policy, Rule, check_bound
from hybridcomp.policy.toml import MOST, parse_policy

_UNCALIBRATED = "hybrid"  # default policy where no profile says what links cost
_EXCLUDED = ("*.bias", "*norm*")  # names that auto excludes: small parameters, and sensitive ones

#: ``min_bytes`` of a codec as policy: sums of a few numbers (norms, dot products, counts) are exact.
CODEC_MIN_BYTES = 4096

PRESETS = ("none", "exact", "naive", "mzhybrid", "zhybrid", "hybrid", "lowrank", "sparse", "onebit")


def load_policy(source: str | os.PathLike[str] | Policy | Codec) -> Policy:
    """Return the policy that ``source`` names.

    Args:
        source: a preset's name (:data:`PRESETS`), ``"auto"`` or that with its options
            (``"auto:dp=safe,freeze=choices.toml"``), the path of a TOML file, a bare codec spec
            (``"int8:block=128"``: that codec for every message it can carry), a codec, or a policy. A codec leaves
            messages below 4096 bytes as they are; ``"int8:min_bytes=0"`` has it take all.

    Raises:
        PolicyError: no such preset, file or codec; a codec without a bound that it needs; or the file is wrong, with
            its line and key.
    """
    if isinstance(source, Policy):
        return source
    if isinstance(source, Codec):
        return _of_codec(source, CODEC_MIN_BYTES)
    text = os.fspath(source)
    if text in PRESETS:
        return frozen_to(_preset(text))
    if text.partition(":")[0] == AUTO:
        return frozen_to(Policy(text, Rule(exclude=_EXCLUDED), auto=parse_spec(text)))
    path = Path(text)
    if path.suffix == ".toml" or os.path.isfile(path):
        content = read_text(path, what="policy file", error=PolicyError)
        return frozen_to(parse_policy(content, text))
    try:
        spec, least = take_parameter(text, "min_bytes")
        codec = get_codec(spec)
        check_bound(spec, codec)
        return _of_codec(codec, CODEC_MIN_BYTES if least is None else _checked(least))
    except UnknownCodecError:
        where = missing(text.partition(":")[0])
        raise PolicyError(
            f"unknown policy {text!r}: {where}neither a preset ({', '.join(PRESETS)}), nor {AUTO}, "
            f"nor a .toml file, nor a codec ({', '.join(names())})"
        ) from None
    except ValueError as error:  # a PolicyError too
        raise PolicyError(f"policy {text!r}: {error}") from error


def _of_codec(codec: Codec, min_bytes: int) -> Policy:
    """Return the policy of a codec for all messages from a size on; its name loads it again."""
    name = codec.spec if min_bytes == CODEC_MIN_BYTES else f"{codec.spec}:min_bytes={min_bytes}"
    return Policy(name, Rule(codecs=(codec,), min_bytes=min_bytes), everything=True)


def _checked(min_bytes: int | float | bool | str) -> int:
    if type(min_bytes) is not int or not 0 <= min_bytes <= MOST:
        raise ValueError(f"min_bytes must be a whole number from 0 to {MOST}, not {min_bytes!r}")
    return min_bytes


def default_policy() -> Policy:
    """Return the policy where none is asked for: ``auto`` if a profile was calibrated, else ``hybrid``."""
    name = AUTO if os.path.isfile(wanted_path()) else _UNCALIBRATED
    return dataclasses.replace(load_policy(name), default=True)


def frozen_to(policy: Policy, path: str | None = None) -> Policy:
    """Return a policy whose choices are written to a file as the job ends: those of ``auto``, or else of ``adapt``.

    Args:
        policy: policy to write; one that has nothing to decide stays as it is.
        path: path of the file; None for the one in ``HYBRIDCOMP_FREEZE``, where the policy itself names none.
    """
    told = variables.FREEZE.read() or None
    if policy.decides and policy.auto is not None:
        wanted = path or policy.auto.freeze or told
        return dataclasses.replace(policy, auto=dataclasses.replace(policy.auto, freeze=wanted))
    if not policy.adapts:
        return policy

    def written(rule: Rule) -> Rule:
        wanted = path or (rule.adapt and rule.adapt.freeze) or told
        return dataclasses.replace(rule, adapt=rule.adapt and rule.adapt.written_to(wanted))

    entries = {
        axis: {key: written(rule) for key, rule in rules.items()} for axis, rules in policy.entries.items()
    }
    return dataclasses.replace(policy, entries=entries)


@functools.cache
def _preset(name: str) -> Policy:
    content = resources.files("hybridcomp.policy").joinpath("presets", f"{name}.toml").read_text("utf-8")
    return parse_policy(content, name, preset=True)

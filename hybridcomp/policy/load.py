"""Load a :class:`~hybridcomp.policy.rules.Policy` from presets, files and bare codec specs."""

from __future__ import annotations

import dataclasses
import functools
import os
from importlib import resources
from pathlib import Path

from hybridcomp import variables
from hybridcomp.codecs import Codec, get_codec, names
from hybridcomp.errors import PolicyError, UnknownCodecError
from hybridcomp.files import read_text
from hybridcomp.perfmodel import wanted_path
from hybridcomp.policy.auto.spec import NAME as AUTO
from hybridcomp.policy.auto.spec import parse_spec
from hybridcomp.policy.rules import Policy, Rule
from hybridcomp.policy.toml import parse_policy

_UNCALIBRATED = "hybrid"  # default policy where no profile says what links cost
_EXCLUDED = ("*.bias", "*norm*")  # names that auto excludes: small parameters, and sensitive ones

PRESETS = ("none", "exact", "naive", "mzhybrid", "zhybrid", "hybrid", "lowrank", "sparse")


def load_policy(source: str | os.PathLike[str] | Policy | Codec) -> Policy:
    """Return the policy that ``source`` names.

    Args:
        source: a preset's name (:data:`PRESETS`), ``"auto"`` or that with its options
            (``"auto:dp=safe,freeze=choices.toml"``), the path of a TOML file, a bare codec spec
            (``"int8:block=128"``: that codec for every message it can carry), a codec, or a policy.

    Raises:
        PolicyError: no such preset, file or codec; or the file is wrong, with its line and key.
    """
    if isinstance(source, Policy):
        return source
    if isinstance(source, Codec):
        return Policy(source.spec, Rule(codecs=(source,), min_bytes=0), everything=True)
    text = os.fspath(source)
    if text in PRESETS:
        return _preset(text)
    if text.partition(":")[0] == AUTO:
        return frozen_to(Policy(text, Rule(exclude=_EXCLUDED), auto=parse_spec(text)))
    path = Path(text)
    if path.suffix == ".toml" or os.path.isfile(path):
        content = read_text(path, what="policy file", error=PolicyError)
        return frozen_to(parse_policy(content, text))
    try:
        return load_policy(get_codec(text))
    except UnknownCodecError:
        raise PolicyError(
            f"unknown policy {text!r}: neither a preset ({', '.join(PRESETS)}), nor {AUTO}, "
            f"nor a .toml file, nor a codec ({', '.join(names())})"
        ) from None
    except ValueError as error:
        raise PolicyError(f"policy {text!r}: {error}") from error


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

"""Load a :class:`~hybridcomp.policy.rules.Policy` from presets, files and bare codec specs."""

from __future__ import annotations

import functools
import os
from importlib import resources
from pathlib import Path

from hybridcomp.codecs import Codec, get_codec, names
from hybridcomp.errors import PolicyError, UnknownCodecError
from hybridcomp.policy.rules import Policy, Rule
from hybridcomp.policy.toml import parse_policy

PRESETS = ("none", "exact", "naive", "mzhybrid", "zhybrid", "hybrid")


def load_policy(source: str | os.PathLike[str] | Policy | Codec) -> Policy:
    """Return the policy that ``source`` names.

    Args:
        source: a preset's name (:data:`PRESETS`), the path of a TOML file, a bare codec spec
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
    path = Path(text)
    if path.suffix == ".toml" or path.is_file():
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(f"cannot read policy file {text}: {error}") from error
        return parse_policy(content, text)
    try:
        return load_policy(get_codec(text))
    except UnknownCodecError:
        raise PolicyError(
            f"unknown policy {text!r}: neither a preset ({', '.join(PRESETS)}), "
            f"nor a .toml file, nor a codec ({', '.join(names())})"
        ) from None
    except ValueError as error:
        raise PolicyError(f"policy {text!r}: {error}") from error


@functools.cache
def _preset(name: str) -> Policy:
    content = resources.files("hybridcomp.policy").joinpath("presets", f"{name}.toml").read_text("utf-8")
    return parse_policy(content, name, preset=True)

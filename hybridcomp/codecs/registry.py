"""Make codecs from spec strings, and decode messages of any codec.

A spec string is a name and parameters: ``"int8"``, ``"int8:block=128"``, ``"topk:ratio=0.01,values=bf16"``.
Parameters are separated by ``:`` or ``,``; the first one may go without its name: ``"fp8:e5m2"``. The value of
``values=`` may itself be a spec in parentheses: ``"topk:ratio=0.01,values=(int8:block=64)"``.
"""

from __future__ import annotations

import difflib
from typing import Any

from hybridcomp import arrays, native, wire
from hybridcomp.codecs.base import Codec, add_message, decode_message, parameters
from hybridcomp.codecs.late import device_codecs
from hybridcomp.codecs.table import ENTRY_POINTS, codec_for, find, is_own, missing, names, package_of
from hybridcomp.errors import UnknownCodecError

FIRST = ""  # key under which parse_spec puts a parameter without a name


def get_codec(spec: str | Codec, **params: Any) -> Codec:
    """Make a codec from a spec string, or from a name and keyword arguments.

    Args:
        spec: ``"int8:block=128"``, ``"int8"``, or a codec (returned as it is).
        params: parameters by name; they win over those in the string.

    Raises:
        UnknownCodecError: no codec has that name; names the package that is missing, as far as is known.
        ConfigError: an installed package offers the codec, but cannot give it; names the package.
        ValueError: an unknown parameter, or a value out of its range.
    """
    if isinstance(spec, Codec):
        if params:
            raise ValueError("parameters go with a codec's name, not with a codec")
        return spec
    name, given = parse_spec(spec)
    cls: type[Codec] | None = find(name)
    if cls is None:
        raise _unknown(name)
    allowed = list(parameters(cls))
    if FIRST in given:  # given by its place
        first = given.pop(FIRST)
        if not allowed or allowed[0] in given:
            raise ValueError(
                f"malformed codec spec {spec!r}: {first!r} is "
                + ("not name=value" if allowed else "a parameter; it takes none")
            )
        given[allowed[0]] = first
    merged = {**given, **params}
    for key in merged:
        if key not in allowed:
            takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
            raise ValueError(f"codec {name!r} has no parameter {key!r}; {takes}")
    return cls(**merged)


def packages_of(codec: Codec) -> set[str]:
    """Return the packages, with versions, that a codec and the codec of its values are of, other than hybridcomp."""
    found = set() if is_own(type(codec)) else {package_of(type(codec))}
    values = getattr(codec, "values", None)
    return found | (packages_of(values) if isinstance(values, Codec) else set())


def _unknown(name: str) -> UnknownCodecError:
    known = names()
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    said = [
        f"unknown codec {name!r}{hint}",
        f"{missing(name)}known: {', '.join(known)}",
        *ENTRY_POINTS.faults(),
    ]
    return UnknownCodecError("; ".join(said))


def decode(msg: Any, out: Any = None, *, max_bytes: int | None = None) -> Any:
    """Decode any message by its header.

    Args:
        msg: 1-D uint8 array, tensor or bytes. One in device memory is decoded there.
        out: optional contiguous array or tensor of the message's element count; float messages decode into
            any float dtype.
        max_bytes: most bytes of the values where ``out`` is not given; None is 1 GiB, or 256 times the message's bytes
            where that is more: a sparse or low-rank message of some bytes may claim any number of elements.

    Returns:
        ``out``, or a new 1-D array of the message's dtype (bfloat16 without torch: see
        :func:`hybridcomp.arrays.empty_like_dtype`).

    Raises:
        WireError: damaged or unknown bytes, or more values than ``max_bytes`` allows.
        CodecMismatchError: ``out`` has a dtype that the values cannot become, or is read-only or not contiguous.
        ValueError: ``out`` has another count.
    """
    if out is not None and native.kernels().decode_plain(msg, out, False):
        return out
    if arrays.on_device(msg):
        return device_codecs().decode_array(msg, out, max_bytes=max_bytes)
    raw, header = wire.open_message(msg)
    return decode_message(
        codec_for(header), raw, header, out, torch_out=arrays.is_torch(msg), max_bytes=max_bytes
    )


def decode_add(msg: Any, acc: Any) -> None:
    """Add any message's values to ``acc``: contiguous float32 (float64 for a float64 message), same count.

    Raises:
        WireError: damaged or unknown bytes.
        CodecMismatchError: ``acc`` has another dtype, or is read-only or not contiguous.
        ValueError: ``acc`` has another count.
    """
    if native.kernels().decode_plain(msg, acc, True):
        return
    if arrays.on_device(msg):
        device_codecs().add_array(msg, acc)
        return
    raw, header = wire.open_message(msg)
    add_message(codec_for(header), raw, header, acc)


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a spec string into its name and typed parameters (int, float, bool or str).

    A first parameter without its name is found under ``""``.

    Raises:
        ValueError: malformed text.
    """
    parts = _split(spec)
    name = parts[0].strip()
    params: dict[str, Any] = {}
    for i, part in enumerate(parts[1:]):
        key, equals, value = part.partition("=")
        key = key.strip()
        if i == 0 and not equals and key:
            params[FIRST] = _value(key)
            continue
        if not equals or not key.isidentifier() or not value.strip():
            raise ValueError(f"malformed codec spec {spec!r}: {part!r} is not name=value")
        if key in params:
            raise ValueError(f"malformed codec spec {spec!r}: {key!r} is given twice")
        params[key] = _value(value.strip())
    if not name:
        raise ValueError(f"malformed codec spec {spec!r}: it has no name")
    return name, params


def take_parameter(spec: str, name: str) -> tuple[str, int | float | bool | str | None]:
    """Take a parameter that is not the codec's out of a spec string.

    Args:
        spec: spec string.
        name: name of the parameter.

    Returns:
        The spec string without it, and its value; None where the string does not give it.

    Raises:
        ValueError: malformed text, or the parameter is given twice.
    """
    first, *parts = _split(spec)
    taken = [part for part in parts if part.partition("=")[0].strip() == name and "=" in part]
    if not taken:
        return spec, None
    value = parse_spec(":".join([first, *taken]))[1][name]
    return ":".join([first, *(part for part in parts if part not in taken)]), value


def _split(spec: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, c in enumerate(spec):
        depth += (c == "(") - (c == ")")
        if depth < 0:
            break
        if depth == 0 and c in ":,":
            parts.append(spec[start:i])
            start = i + 1
    if depth != 0:
        raise ValueError(f"malformed codec spec {spec!r}: unbalanced parentheses")
    return [*parts, spec[start:]]


def _value(text: str) -> int | float | bool | str:
    if text.startswith("(") and text.endswith(")"):
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text

"""Read the trainer's configuration from TOML and from the command line, and write it."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, get_args, get_type_hints

from hybridcomp.errors import ConfigError, printable
from hybridcomp.files import parse_toml, read_text, shown
from hybridcomp_lab.train.checks import check_config
from hybridcomp_lab.train.config import TrainConfig

CONFIGURATION = "the configuration"
_UNBOUNDED = ("clip",)  # fields that may be infinite


def read_toml(path: str) -> dict[str, Any]:
    """Read fields from a TOML file.

    Raises:
        ConfigError: the file is missing, no TOML, or a key is unknown or of a wrong type; names file, line
        and key.
    """
    text = read_text(path, what=CONFIGURATION)
    return fields_of(parse_toml(text, path), path, text)


def fields_of(document: Mapping[str, Any], path: str, text: str) -> dict[str, Any]:
    """Check the names and types of a table's fields.

    Args:
        document: table of fields.
        path: path of the file, for messages.
        text: text of the file, to name the line.

    Returns:
        The fields, with integers turned into floats where floats are due.

    Raises:
        ConfigError: a key is unknown or of a wrong type; names file, line and key.
    """
    types = _field_types()
    values: dict[str, Any] = {}
    for key, value in document.items():
        if key not in types or key == "config":
            near = difflib.get_close_matches(key, types, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; allowed: {', '.join(types)}"
            fail(path, text, key, f"unknown key {key!r}{hint}")
        if isinstance(value, float) and not math.isfinite(value) and key not in _UNBOUNDED:
            fail(path, text, key, f"must be finite, not {value}")
        values[key] = _convert(value, types[key], lambda what, key=key: fail(path, text, key, what))
    return values


def _field_types() -> dict[str, Any]:
    hints = get_type_hints(TrainConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(TrainConfig)}


def _convert(value: Any, kind: Any, fail: Any) -> Any:
    options = get_args(kind)
    if options and all(isinstance(o, str) for o in options):
        if value not in options:
            fail(f"must be one of {', '.join(options)}, not {shown(value)}")
        return value
    allowed = [o for o in (options or (kind,)) if o is not type(None)]
    if tuple[int, ...] in allowed:
        if not isinstance(value, list) or not all(
            type(one) is int and one.bit_length() <= 63 for one in value
        ):
            fail(f"must be a list of integers, not {shown(value)}")
        return tuple(value)
    if isinstance(value, int) and value.bit_length() > 63:
        fail(f"must be within 63 bits, and has {value.bit_length()}")
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) not in allowed:
        words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
        names = " or ".join(words[k] for k in allowed)
        fail(f"must be {names}, not {shown(value)}")
    return value


def fail(path: str, text: str, key: str, what: str) -> NoReturn:
    """Raise ConfigError that names the file, the line of ``key`` in its text, and the key."""
    pattern = re.compile(rf"\s*\[*\s*[\"']?{re.escape(key)}[\"']?\s*[.=\]]")
    line = next((n for n, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 1)
    raise ConfigError(f"{printable(path)}: line {line}, key {printable(key)}: {what}")


def to_toml(values: Mapping[str, Any]) -> str:
    """Write fields as TOML; None (unset) fields are left out."""
    lines = []
    for key, value in values.items():
        if isinstance(value, bool):
            lines.append(f"{key} = {str(value).lower()}")
        elif isinstance(value, str):
            lines.append(f"{key} = {_quote(value)}")
        elif isinstance(value, tuple):
            lines.append(f"{key} = {list(value)!r}")
        elif value is not None:
            lines.append(f"{key} = {value!r}")
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped) + '"'


def parse(arguments: Sequence[str], *, prog: str = "hybridcomp train") -> TrainConfig:
    """Make the configuration from command-line arguments: defaults, then ``--config``'s file, then the flags.

    Raises:
        ConfigError: a value is wrong, on the command line or in the file.
        SystemExit: a flag that does not exist or does not parse (2, with a message), or ``--help`` (0).
    """
    import tyro  # noqa: PLC0415  (an extra; and --help of the other commands should not wait for it)

    path = _config_path(arguments)
    values = {} if path is None else read_toml(path) | {"config": path}
    default = dataclasses.replace(TrainConfig(), **values)
    config = tyro.cli(TrainConfig, prog=prog, args=list(arguments), default=default)
    if config.global_batch is not None and "micro_batches" not in values.keys() | _flags(arguments):
        followed = config.global_batch // max(1, config.dp * config.micro_batch_size)
        config = dataclasses.replace(config, micro_batches=max(1, followed))
    check_config(config)
    return config


def _flags(arguments: Sequence[str]) -> set[str]:
    """Return the fields that the command line names, whether or not with their defaults."""
    return {a.partition("=")[0][2:].replace("-", "_") for a in arguments if a.startswith("--")}


def _config_path(arguments: Sequence[str]) -> str | None:
    path = None
    for i, argument in enumerate(arguments):
        if argument == "--config" and i + 1 < len(arguments):
            path = arguments[i + 1]
        elif argument.startswith("--config="):
            path = argument.removeprefix("--config=")
    return path

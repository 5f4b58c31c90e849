"""Record the decisions about codecs by step, in a file that repeats them.

.. code-block:: toml

    [[decision]]
    step = 40
    codec = "topk:ratio=0.05"
    name = "layer.0.weight"        # for one tensor alone
    why = "gain 0.81"
    axis = "dp"                    # for messages of this axis alone
    op = "all_reduce"              # for messages of this operation alone
    place = 1                      # for the first sender of such messages in a process, such as a hook
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hybridcomp.codecs import get_codec
from hybridcomp.errors import HybridcompError, PolicyError, printable
from hybridcomp.files import read_toml, shown
from hybridcomp.policy.at_exit import FilesAtExit

_KINDS: dict[str, type] = {
    "step": int,
    "codec": str,
    "name": str,
    "why": str,
    "axis": str,
    "op": str,
    "place": int,
}
_MOST = 1 << 62


class Decision(NamedTuple):
    """Decision about the codec from a step on.

    Attributes:
        step: step of training, from 0.
        codec: spec of the codec.
        name: name of the tensor that it is about; ``""`` for all.
        why: reason in a few words.
        axis, op: mesh axis and operation of the messages; ``""`` for any. Only files say them.
        place: number of the sender among the process's senders of such messages, from 1; 0 for any.
    """

    step: int
    codec: str
    name: str = ""
    why: str = ""
    axis: str = ""
    op: str = ""
    place: int = 0

    def concerns(self, axis: str, op: str, place: int) -> bool:
        """Tell whether it is about the messages of a sender."""
        return self.axis in ("", axis) and self.op in ("", op) and self.place in (0, place)


def to_toml(decisions: Sequence[Decision]) -> str:
    """Return decisions as the text of a file."""
    lines = ['# Decisions of a job about its codecs: adapt = "frozen:THIS FILE" repeats them.']
    unsaid = Decision._field_defaults
    for decision in decisions:
        lines += ["", "[[decision]]"]
        pairs = {key: value for key, value in decision._asdict().items() if value != unsaid.get(key)}
        lines += [f"{key} = {json.dumps(value)}" for key, value in pairs.items()]
    return "\n".join(lines) + "\n"


def read_decisions(path: Path) -> tuple[Decision, ...]:
    """Read decisions from a file, in the order of their steps.

    Raises:
        PolicyError: the file cannot be read, or holds something else.
    """
    document = read_toml(path, what="decisions", error=PolicyError)
    given = document.get("decision")
    if not isinstance(given, list) or not given or set(document) != {"decision"}:
        raise PolicyError(f"{printable(path)} must have tables [[decision]], and nothing else")
    return tuple(_decision(path, number, one) for number, one in enumerate(given, 1))


def _decision(path: Path, number: int, table: Any) -> Decision:
    what = f"{printable(path)}, decision {number}"
    if not isinstance(table, dict) or not {"step", "codec"} <= set(table) <= set(_KINDS):
        raise PolicyError(f"{what} must have step and codec, and may have {', '.join(list(_KINDS)[2:])}")
    for key, value in table.items():
        if type(value) is not _KINDS[key]:
            raise PolicyError(f"{what}: {key} must be of type {_KINDS[key].__name__}, not {shown(value)}")
    for key in ("step", "place"):
        if not 0 <= table.get(key, 0) <= _MOST:
            raise PolicyError(f"{what}: {key} must be from 0 to 2**62, not {table[key]}")
    try:
        codec = get_codec(table["codec"]).spec
    except (ValueError, TypeError, HybridcompError) as error:
        raise PolicyError(f"{what}: {error}") from error
    return Decision(**{**table, "codec": codec})


def _text(sources: Sequence[Callable[[], list[Decision]]]) -> str:
    decisions = sorted(decision for source in sources for decision in source())
    return to_toml(decisions) if decisions else ""


files: FilesAtExit[Callable[[], list[Decision]]] = FilesAtExit("the decisions", _text)

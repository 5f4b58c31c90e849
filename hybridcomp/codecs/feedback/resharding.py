"""Reshard the states of error feedback to another number of ranks.

The sum over all ranks still lacks the sum of their residuals, so resharding keeps the latter: new rank r gets the sum
of old ranks r, r + ranks, r + 2 ranks, ... Where there are more ranks than before, the new ones begin with zeros:
splitting residuals would keep the sum too, but round (``loco`` would lose half a scale), and change the messages of
the ranks that stay.

*   ``ef``, and both arrays of ``dgc`` and ``ef-sgdm``: summed in the state's own dtype, so exact but for its rounding.
*   ``loco``: where several ranks become one, their 8-bit states are decoded, summed in float64 and made 8 bits again;
    an element is off by at most 1/254 of the largest sum in its block of 128, half of a scale. One rank's state goes
    on as it is, bit for bit.
*   ``ef21``: the senders' estimates are summed. A receiver's sum of all estimates (:meth:`ErrorFeedback.accumulate`)
    does not change, and is the same on all ranks; the parts of it that the owners of shards have in a reduction are
    joined, and each new owner subtracts its own estimate. The estimate of the result is the same on all ranks, and
    stays.

A mean divides by the number of ranks: kept states are divided by the new number. The steps of a key are the largest of
any rank, so that :meth:`Codec.at_step` gives all ranks the same codec.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridcomp.arrays import as_dtype
from hybridcomp.codecs import checks
from hybridcomp.codecs.feedback.error_feedback import MEMORIES, Arrays, Key, keys_of, pack_key, unpack_keys
from hybridcomp.codecs.feedback.estimates import EstimateMemory
from hybridcomp.codecs.feedback.forms import Form
from hybridcomp.codecs.feedback.memories import STATE_CODEC, AverageMemory, PlainMemory
from hybridcomp.codecs.feedback.memory import Array, Memory, Scratch

_MOST_RANKS = 1 << 20


def reshard(states: Sequence[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Make the states of ``ranks`` ranks from those of all ranks of another number.

    Args:
        states: :meth:`ErrorFeedback.state_dict` of every old rank, in their order. A rank may lack keys: it has
            sent nothing under them, and its part is zero.
        ranks: the new number of ranks.

    Returns:
        A state for each new rank, for :meth:`ErrorFeedback.load_state_dict`; all have all keys.

    Raises:
        ValueError: ranks disagree on a key's form, count or dtype, or a state is damaged.
    """
    checks.integer("ranks", ranks, 1, _MOST_RANKS)
    if not states:
        raise ValueError("states must hold the state of at least one rank")
    old = [unpack_keys(state) for state in states]
    scratch = Scratch()
    new: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for text in keys_of(old):
        form, steps, memories = _gathered(text, [state.get(text) for state in old], scratch)
        for rank in range(ranks):
            parts = _merged(memories[rank::ranks], memories)
            new[rank].update(pack_key(text, form, steps, parts))
    return new


def _gathered(
    text: str, found: Sequence[tuple[Form, int, Arrays] | None], scratch: Scratch
) -> tuple[Form, int, list[Memory | None]]:
    """Return a key's form, its steps, and each rank's memory of it, checked to be of one kind."""
    memories: list[Memory | None] = []
    steps = 0
    for part in found:
        if part is None:
            memories.append(None)
            continue
        form, count, parts = part
        try:
            memories.append(MEMORIES[form.name].restore(form, parts, scratch))
        except ValueError as error:
            raise ValueError(f"residual {text} cannot be of the form {form.name!r}: {error}") from error
        steps = max(steps, count)
    first = _first(memories)
    for rank, memory in enumerate(memories):
        if memory is not None and _kind(memory) != _kind(first):
            raise ValueError(
                f"residual {text} is {' '.join(_kind(memory))} on rank {rank}, "
                f"{' '.join(_kind(first))} on another"
            )
    return first.form, steps, memories


def _kind(memory: Memory) -> tuple[str, str]:
    return memory.form.name, f"{memory.kind.label}[{memory.n}]"


def _first(memories: Sequence[Memory | None]) -> Memory:
    return next(memory for memory in memories if memory is not None)


def _merged(mine: Sequence[Memory | None], everyone: Sequence[Memory | None]) -> Arrays:
    """Return the arrays of a new rank, from the memories that become its own and those of all old ranks."""
    first = _first(everyone)
    parts = [memory.arrays() for memory in mine if memory is not None]
    if isinstance(first, AverageMemory):
        return {"": _summed_states(parts, first)}
    shared: Arrays = {}
    if isinstance(first, EstimateMemory):
        shared = _shared([memory.arrays() for memory in everyone if memory is not None])
        parts = [{"": part[""]} for part in parts]
    empty = {name: np.zeros_like(array) for name, array in first.arrays().items() if name not in shared}
    if isinstance(first, EstimateMemory):
        empty = {"": empty[""]}
    return {name: _sum([part[name] for part in parts], zero) for name, zero in empty.items()} | shared


def _shared(everyone: Sequence[Arrays]) -> Arrays:
    """Return the arrays of ``ef21`` that are the same on all ranks, or the owners' parts joined."""
    totals = [part["total"] for part in everyone if "total" in part]
    known = [part["known"] for part in everyone if "known" in part]
    shared: Arrays = {}
    if totals:  # with an estimate of a result they are the owners' parts of one sum, zero elsewhere
        shared["total"] = _sum(totals, np.zeros_like(totals[0])) if known else totals[0].copy()
    if known:
        shared["known"] = known[0].copy()
    return shared


def _sum(parts: Sequence[Array], zero: Array) -> Array:
    total = zero
    for part in parts:
        total = total + part
    return total


def _summed_states(parts: Sequence[Arrays], like: AverageMemory) -> Array:
    if len(parts) == 1:
        return parts[0][""]
    values = np.zeros(like.n, np.float64)
    for part in parts:
        values += STATE_CODEC.decode(part[""])
    message: Array = STATE_CODEC.encode(values.astype(as_dtype(like.kind).storage))
    return message


def release(state: Mapping[str, Any], key: Key, span: slice) -> tuple[Arrays, Array] | None:
    """Remove from a state its part for a span that its rank now owns, and sends to nobody any more.

    A reduce-scatter adds an owner's part as it is, so the residual that resharding gave an owner for its own span has
    to be added to its sum by hand. ``dgc`` sends an owner's part too, and keeps it.

    Args:
        state: state of one rank.
        key: key of an array.
        span: span of the array.

    Returns:
        The arrays of the key for a new state, with zeros in the span, and the values to add to the span of a sum; None
        if there is nothing to add.
    """
    text = json.dumps(list(key))
    mine = {name: value for name, value in state.items() if name == text or name.startswith(f"{text}#")}
    for form, steps, parts in unpack_keys(mine).values():
        memory = MEMORIES[form.name].restore(form, parts, Scratch())
        if not isinstance(memory, PlainMemory | AverageMemory) or span.stop > memory.n:
            return None
        errors = memory.error
        missing = errors[span].copy()
        if not missing.any():
            return None
        errors[span] = 0
        if isinstance(memory, AverageMemory):  # its errors are sent in shares that add up to this
            missing /= 1 - form.options["beta"]
            return pack_key(text, form, steps, {"": STATE_CODEC.encode(errors)}), missing
        return pack_key(text, form, steps, {**parts, "": errors}), missing
    return None

"""Choose the codec of each message: the codec that a call asks for, or the policy's."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import Codec, get_codec
from hybridcomp.errors import CodecMismatchError
from hybridcomp.policy import Choice, Message, Policy, place
from hybridcomp.policy.auto.decider import Decider

CodecLike = Codec | str | Choice | None


class OperationOptions(NamedTuple):
    """Options of an operation, as its caller gives them: see :mod:`.communicator`.

    Attributes:
        name: name of the tensor, under which error feedback remembers.
        phase: ``"forward"`` or ``"backward"``, for the policy.
        codec: codec to use in place of the policy's.
        algorithm: algorithm to use in place of the fastest.
    """

    name: str | None = None
    phase: str | None = None
    codec: CodecLike = None
    algorithm: str | None = None


NO_OPTIONS = OperationOptions()

codec_of = functools.lru_cache(256)(get_codec)  # a spec that a call passes as a string is passed often


def explicit_choice(codec: Codec | str | Choice, op: str, data: Flat) -> Choice:
    """Return the choice that a call has made.

    Raises:
        CodecMismatchError: the codec cannot carry the array; says why.
    """
    if isinstance(codec, Choice):
        return codec
    fixed = codec_of(codec) if isinstance(codec, str) else get_codec(codec)
    reason = fixed.can_carry(data.dtype, data.shape)
    if reason is not None:
        raise CodecMismatchError(f"{op}: codec {fixed.spec!r} cannot carry this buffer: {reason}")
    return Choice(fixed, None, "asked for in the call")


class Choices:
    """Choices of codecs for one communicator: the policy is asked once for messages alike.

    Args:
        hosts: number of hosts that its ranks are on.
    """

    _MOST = 4096

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._policy: Policy | Decider | None = None  # policy that made the choices below
        self._known: dict[tuple[Any, ...], Choice] = {}
        self._once: dict[
            tuple[Any, ...], Choice
        ] = {}  # choices that hold for one message alone and were asked for ahead of it

    def choose(
        self,
        policy: Policy | Decider,
        axis: str,
        op: str,
        dtype: DType,
        shape: tuple[int, ...],
        name: str | None,
        phase: str | None,
        step: int,
        *,
        ahead: bool = False,
    ) -> Choice:
        """Choose the codec of an array of this dtype and shape, at the place of the model that the program has set.

        Policy and axis are the communicator's, which may get others. A question ``ahead`` of a message is followed by
        one for the message itself, which gets the same answer, even if the answer is for one message alone.
        """
        if policy is not self._policy:
            self._policy = policy
            self._known.clear()
        there, step = place(), policy.same_as_step(step)
        key = (axis, op, dtype, shape, name, phase, step, there)
        choice = self._known.get(key)
        if choice is None:
            choice = self._once.get(key) if ahead else self._once.pop(key, None)
        if choice is None:
            if len(self._known) > self._MOST:
                self._known.clear()
            nbytes = math.prod(shape) * dtype.itemsize
            where = (there.stage, there.layer, there.part)
            message = Message(axis, op, phase, dtype, nbytes, name, step, shape, *where, self._hosts)
            choice = policy.choose(message)
            if not choice.once:
                self._known[key] = choice
            elif ahead:
                self._once[key] = choice
        return choice

    def forget(self) -> None:
        """Drop the choices made so far: the policy is asked again about all messages."""
        self._known.clear()

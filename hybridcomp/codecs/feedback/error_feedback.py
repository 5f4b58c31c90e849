"""Error feedback: correct the input of a lossy codec by the error of its earlier messages.

The forms are in :mod:`.memories` and :mod:`.estimates`; here they are kept by key, saved and loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hybridcomp import arrays
from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.feedback.estimates import EstimateMemory
from hybridcomp.codecs.feedback.forms import FORMS, Form, parse_form
from hybridcomp.codecs.feedback.memories import (
    AcceleratedMemory,
    AverageMemory,
    MomentumMemory,
    PlainMemory,
)
from hybridcomp.codecs.feedback.memory import JoinedMemory, Memory, Scratch
from hybridcomp.codecs.late import device_codecs
from hybridcomp.codecs.registry import get_codec

if TYPE_CHECKING:
    from hybridcomp.device import Queue

__all__ = ["FORMS", "ErrorFeedback", "Form", "Key", "Memory", "parse_form"]

Key = tuple[str | int, ...]
Arrays = dict[str, npt.NDArray[Any]]
MEMORIES: dict[str, type[Memory]] = {
    cls.name: cls for cls in (PlainMemory, EstimateMemory, AverageMemory, MomentumMemory, AcceleratedMemory)
}
_FORM, _STEPS = "form", "steps"  # entries of a key in a state beside its arrays


class ErrorFeedback:
    """Memories of a lossy codec, by key: (axis, parameter or bucket name, ...).

    States are float32 (float64 for float64 data; 8 bits for ``loco``), zero at first and zero again when the count
    or dtype under a key changes.

    Args:
        codec: codec of :meth:`encode`, or its spec; None if only memories are used.
        form: ``"ef"``, ``"ef21"``, ``"loco"``, ``"dgc"`` or ``"ef-sgdm"``, or a spec with its parameters
            (``"loco:beta=0.9"``). None: callers of :meth:`memory` give it, key by key.
        options: the form's parameters: ``beta`` (0.8) and ``reset_steps`` (1024) of ``loco``, ``momentum`` (0.9)
            of ``dgc`` and ``ef-sgdm``.

    Raises:
        ValueError: an unknown form or parameter, or a value out of its range.
    """

    def __init__(
        self, codec: Codec | str | None = None, form: str | Form | None = "ef", **options: Any
    ) -> None:
        self.codec = None if codec is None else get_codec(codec)
        if form is None and options:
            raise ValueError(f"{', '.join(options)} belong to a form, and form is None")
        self.form = None if form is None else parse_form(form, **options)
        self._memories: dict[Key, Memory | Any] = {}
        self._scratch = Scratch()
        self._slots: Any = None  # states of devices: their Slots
        self._blends: dict[Key, tuple[Any, float]] = {}

    def blend(self, key: Key, momentum: Any | None, beta: float = 0.0) -> None:
        """Send, under a key, a momentum of which data are a part: ``beta * momentum + (1 - beta) * data``.

        For the form ``ef`` alone, and data that are this rank's own, not a sum of several ranks'.

        Args:
            key: a tuple of str and int.
            momentum: 1-D array of the memory's elements and dtype, where the data are: in host memory, or on their
                device. It is read in each step. None sends the data themselves again.
            beta: share of the momentum, from 0 to below 1.
        """
        if momentum is not None:
            self._blends[_checked(key)] = momentum, beta
            _let_go(self._memories.get(key))  # the next step sets it up
        elif self._blends.pop(key, None) is not None and key in self._memories:
            self._blended(self._memories[key], None, 0.0)

    @staticmethod
    def _blended(memory: Any, momentum: Any, beta: float) -> None:
        if memory.form.name != PlainMemory.name:
            raise ValueError(f"only the form 'ef' blends momenta, not {memory.form.name!r}")
        memory.blend(momentum, beta)

    def memory(
        self, key: Key, n: int, dtype: arrays.DTypeLike = DType.FLOAT32, form: str | Form | None = None
    ) -> Memory:
        """Return the memory under ``key``, for collectives, which correct and encode spans of an array.

        Args:
            key: a tuple of str and int.
            n: number of elements.
            dtype: dtype of the data; the memory has its accumulator's dtype.
            form: form of feedback for this key, where this object was made without one.

        Raises:
            ValueError: no form is known, or the key's memory (loaded, say) is of another form.
        """
        wanted = self._form(form)
        kind = arrays.as_dtype(dtype).accumulator
        found = self._memories.get(_checked(key))
        if found is not None and (not isinstance(found, Memory) or found.form != wanted):
            found = self._put(key, self._on_host(key, found, wanted))  # with its parameters
        if found is None or found.n != n or found.kind is not kind:
            found = self._put(key, MEMORIES[wanted.name](wanted, n, kind, self._scratch))
        if key in self._blends:
            self._blended(found, *self._blends[key])
        return found

    def begin_joined(
        self, keys: Sequence[Key], sizes: Sequence[int], dtype: arrays.DTypeLike, form: str | Form
    ) -> JoinedMemory:
        """Begin a step of several keys, whose arrays one operation carries; return their memories as one.

        Args:
            keys: keys of the arrays; at least one.
            sizes: number of elements of each array.
            dtype, form: as for :meth:`memory`.

        Raises:
            ValueError: as :meth:`memory`.
        """
        memories = [self.memory(key, n, dtype, form) for key, n in zip(keys, sizes, strict=True)]
        for memory in memories:
            memory.begin()
        return JoinedMemory(memories, self._scratch)

    def device_memory(
        self,
        key: Key,
        n: int,
        dtype: arrays.DTypeLike,
        queue: Queue,
        form: str | Form | None = None,
    ) -> Any:
        """Return the memory under ``key`` with its state on a device.

        A state elsewhere moves there, for which this waits.

        Args:
            key: a tuple of str and int.
            n: number of elements.
            dtype: dtype of the data.
            queue: queue of the device.
            form: form of feedback for this key, where this object was made without one.

        Returns:
            A :class:`~hybridcomp.codecs.device.DeviceMemory`.

        Raises:
            ValueError: as :meth:`memory`.
        """
        device = device_codecs()
        wanted = self._form(form)
        kind = arrays.as_dtype(dtype).accumulator
        found = self._memories.get(_checked(key))
        if self._slots is None:
            self._slots = device.Slots()
        made: type[Any] = device.MEMORIES[wanted.name]
        if found is not None and (found.n != n or found.kind is not kind):
            _same_form(json.dumps(list(key)), found.form, wanted)
            if not isinstance(found, Memory):
                found.drop()
            found = None
        if (
            found is None
            or isinstance(found, Memory)
            or found.form != wanted
            or found.runtime is not queue.runtime
        ):
            memory = made(wanted, n, kind, queue, self._slots)
            if found is not None:
                state = self._on_host(key, found, wanted)
                memory.load(state, queue)
                memory.steps = state.steps
            found = self._put(key, memory)
        if key in self._blends:
            self._blended(found, *self._blends[key])
        return found

    def _on_host(self, key: Key, found: Memory | Any, wanted: Form) -> Memory:
        """Return a memory as one of the host's, with the parameters of ``wanted``."""
        _same_form(json.dumps(list(key)), found.form, wanted)
        if isinstance(found, Memory) and found.form == wanted:
            return found
        memory = MEMORIES[wanted.name].restore(wanted, found.arrays(), self._scratch)
        memory.steps = found.steps
        if not isinstance(found, Memory):
            found.drop()
        return memory

    def residual(self, key: Key, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> npt.NDArray[Any]:
        """Return the residual under ``key``, to be changed in place: of ``ef`` and ``ef-sgdm`` only.

        Args:
            key: a tuple of str and int.
            n: number of elements.
            dtype: dtype of the data; the residual has its accumulator's dtype.

        Returns:
            1-D float32 or float64 of ``n`` elements, until the next :meth:`encode` under the key.

        Raises:
            ValueError: the form is neither of these.
        """
        memory = self.memory(key, n, dtype, "ef" if self.form is None else None)
        if not isinstance(memory, PlainMemory):
            raise ValueError(f"only the forms 'ef' and 'ef-sgdm' have a residual, not {memory.form.name!r}")
        return memory.error

    def owed(self, key: Key, n: int, where: slice) -> npt.NDArray[Any] | None:
        """Return a copy of some elements of the residual under ``key``.

        Args:
            key: a tuple of str and int.
            n: number of elements of the array that is sent.
            where: range of the elements to copy.

        Returns:
            1-D float32 or float64; None where the key has no state of this count and of the form ``ef``.
        """
        found = self._memories.get(_checked(key))
        if found is None or found.n != n or found.form.name != PlainMemory.name:
            return None
        error = found.error if isinstance(found, PlainMemory) else found.arrays()[""]
        copied: npt.NDArray[Any] = error[where].copy()
        return copied

    def encode(self, x: Any, key: Key, out: Any = None) -> Any:
        """Encode ``x`` with feedback: by the codec at the key's step (:meth:`Codec.at_step`).

        If the new state would not be finite everywhere (a gradient overflowed), the state stays as it was, so that
        a step which a gradient scaler skips does not spoil those after it.

        Args:
            x: array as :meth:`Codec.encode` takes it.
            key: a tuple of str and int.
            out: optional 1-D uint8 buffer for the message.

        Returns:
            The message, in ``x``'s library. It holds float32 (float64 for float64 data). Arrays on a device are
            encoded there, and their states are kept there.

        Raises:
            ValueError: this object has no codec, or no form; ``out`` is too small.
            CodecMismatchError: the codec cannot carry ``x``.
        """
        if self.codec is None:
            raise ValueError("this ErrorFeedback was made without a codec: it keeps memories only")
        src = arrays.flatten(x, device=True)
        if not src.dtype.is_float:
            return self.codec.encode(x, out)
        if arrays.on_device(x):
            device = device_codecs()
            return device.encode_with_feedback(self, self.codec, x, key, out)
        memory = self.memory(key, src.size, src.dtype)
        codec = self.codec.at_step(memory.begin())
        need = codec.bound(src.size, memory.kind)
        buffer = np.empty(need, np.uint8) if out is None else arrays.flatten(out, writable=True).data
        if buffer.dtype != np.uint8 or buffer.size < need:
            raise ValueError(f"out must be uint8 of at least {need} bytes, not {buffer.dtype}[{buffer.size}]")
        nbytes = memory.encode(codec, src, buffer)
        return arrays.like(buffer[:nbytes], src)

    def accumulate(self, key: Key, decoded_sum: Any) -> Any:
        """Return the values that the sum of all senders' messages of a step stands for; called by the receiver.

        Under ``ef21`` messages are differences: this adds their sum to the running sum of the senders' estimates
        and returns that. Under every other form messages hold the values themselves, and ``decoded_sum`` itself
        is returned.

        Every rank that sends under a key calls this after its :meth:`encode`, with the same sum: where that is
        not finite, the running sum stays as it was, and this object's last message is taken back, on all ranks.

        Args:
            key: the senders' key.
            decoded_sum: sum of the decoded messages; float32 (float64 for float64 data), any shape.

        Returns:
            The running sum, of the shape and library of ``decoded_sum``; a copy.

        Raises:
            ValueError: the sum has another size or dtype than the key's memory.
        """
        known = self._memories.get(_checked(key))
        form = known.form if self.form is None and known is not None else self._form(None)
        if form.name != EstimateMemory.name:
            return decoded_sum
        flat = arrays.flatten(decoded_sum, device=arrays.on_device(decoded_sum))
        if known is not None and (known.n, known.kind) != (flat.size, flat.dtype.accumulator):
            found = f"{flat.size} {flat.dtype.accumulator.label}"
            raise ValueError(
                f"the sum under {key} has {found}, and its memory has {known.n} {known.kind.label}"
            )
        if arrays.on_device(decoded_sum):
            return device_codecs().accumulate(self, decoded_sum, key, form)
        memory = self.memory(key, flat.size, flat.dtype, form)
        assert isinstance(memory, EstimateMemory)
        return arrays.like(memory.add(flat.data), flat).reshape(flat.shape)

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of all states, as arrays by keys in JSON: ``{'["dp", "layer.0.weight"]': array}``.

        Further entries of a key have its JSON and a suffix after a ``#``: further arrays, ``#steps`` where steps were
        counted, and ``#form``, the form's spec in bytes, where it is not ``ef``.
        """
        state: dict[str, npt.NDArray[Any]] = {}
        for key, memory in self._memories.items():
            text = json.dumps(list(key))
            state |= pack_key(text, memory.form, memory.steps, memory.arrays())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all states by those that :meth:`state_dict` gave (NumPy arrays or torch tensors).

        The form's parameters are this object's, whatever those of the saved ones were.

        Raises:
            ValueError: a key or an array that no state has, or a state of another form than this object's.
        """
        loaded: dict[Key, Memory | Any] = {}
        for text, (saved, steps, parts) in unpack_keys(state).items():
            form = self.form or saved
            _same_form(text, saved, form)
            try:
                memory = MEMORIES[form.name].restore(form, parts, self._scratch)
            except ValueError as error:
                raise ValueError(f"residual {text} cannot be of the form {form.name!r}: {error}") from error
            memory.steps = steps
            loaded[_key_of(text)] = memory
        self._let_all_go()
        self._memories, self._slots = loaded, None

    def clear(self) -> None:
        """Drop all states."""
        self._let_all_go()
        self._memories.clear()
        self._blends.clear()
        self._scratch.clear()
        self._slots = None

    def _put(self, key: Key, memory: Any) -> Any:
        """Put a memory under a key, in the place of another one, and return it."""
        _let_go(self._memories.get(key))
        self._memories[key] = memory
        return memory

    def _let_all_go(self) -> None:
        for memory in self._memories.values():
            _let_go(memory)

    def __len__(self) -> int:
        return len(self._memories)

    def _form(self, given: str | Form | None) -> Form:
        if given is None:
            if self.form is None:
                raise ValueError("form must be given: this ErrorFeedback was made without one")
            return self.form
        form = parse_form(given)
        if self.form is not None and form != self.form:
            raise ValueError(f"form must be {self.form.spec!r}, this ErrorFeedback's, not {form.spec!r}")
        return form


def pack_key(text: str, form: Form, steps: int, parts: Arrays) -> Arrays:
    """Pack the state of one key into arrays."""
    packed = {f"{text}#{name}" if name else text: array for name, array in parts.items()}
    if steps:
        packed[f"{text}#{_STEPS}"] = np.array(steps, np.int64)
    if form.name != PlainMemory.name:
        packed[f"{text}#{_FORM}"] = np.frombuffer(form.spec.encode(), np.uint8).copy()
    return packed


def unpack_keys(state: Mapping[str, Any]) -> dict[str, tuple[Form, int, Arrays]]:
    """Unpack a state: return its keys in JSON, each with its form, steps and arrays.

    Raises:
        ValueError: a malformed key, form or number of steps.
    """
    found: dict[str, Arrays] = {}
    for full, value in state.items():
        # JSON of a list ends with a bracket, so a # after the last one is ours.
        text, name = (full, "") if full.endswith("]") else full.rpartition("#")[::2]
        _key_of(text)
        flat: Flat = arrays.flatten(value)
        found.setdefault(text, {})[name] = flat.data
        if flat.dtype is DType.BFLOAT16:
            raise ValueError(f"residual {full} is bfloat16, which no form keeps")
    return {text: _described(text, parts) for text, parts in found.items()}


def _let_go(memory: Memory | Any) -> None:
    """Have those who have kept a memory from one step to the next ask for it again."""
    if isinstance(memory, Memory):
        memory.native.version += 1


def _described(text: str, parts: Arrays) -> tuple[Form, int, Arrays]:
    spec = parts.pop(_FORM, None)
    count = parts.pop(_STEPS, np.zeros(1, np.int64))
    if count.size != 1 or count.dtype.kind not in "iu" or count[0] < 0:
        raise ValueError(f"residual {text} has no number of steps: {count!r}")
    if spec is not None and spec.dtype != np.uint8:
        raise ValueError(f"residual {text} has a form that is not text: {spec!r}")
    form = parse_form(PlainMemory.name if spec is None else spec.tobytes().decode(errors="replace"))
    return form, int(count[0]), parts


def _same_form(text: str, saved: Form, wanted: Form) -> None:
    if saved.name != wanted.name:
        raise ValueError(
            f"the memory of {text} is of the form {saved.spec!r}, and {wanted.spec!r} is asked for: "
            "load it where its form is in use, or clear() it"
        )


def keys_of(states: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return all keys of some states, in the order in which they come."""
    return list(dict.fromkeys(text for state in states for text in state))


def _checked(key: Key) -> Key:
    if not isinstance(key, tuple) or not all(isinstance(part, str | int) for part in key):
        raise TypeError(f"a key is a tuple of str and int, not {key!r}")
    return key


def _key_of(text: str) -> Key:
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError):
        parts = None
    if not isinstance(parts, list) or not all(isinstance(part, str | int) for part in parts):
        raise ValueError(f"malformed residual key {text!r:.80}: not a JSON list of strings and integers")
    return tuple(parts)

"""Define the message that a policy is asked about, and the choice that it returns."""

from __future__ import annotations

from dataclasses import dataclass

from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec

OPS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
)
ROOTED = {
    "broadcast": "broadcasts",
    "reduce": "reductions to one rank",
    "gather": "gathers",
    "scatter": "scatters",
}
PHASES = ("forward", "backward")

MOMENTUM = "momentum"
"""Section of a policy for the momenta that optimizers exchange in the place of gradients, and axis of their traffic."""


@dataclass(frozen=True, slots=True)
class Message:
    """Message before it is sent.

    Attributes:
        axis: the mesh axis (``dp``, ``tp``, ``pp``) of the communicator.
        op: one of :data:`OPS`.
        phase: ``"forward"``, ``"backward"``, or None where that is not known.
        dtype: element type.
        nbytes: bytes before compression.
        name: name of the parameter or bucket, None for an activation or an anonymous buffer.
        step: training step, for warm-up; None where it is not known.
        shape: the tensor's shape, None or 1-D for a flat buffer.
        stage, layer, part: place in the model, as :class:`~hybridcomp.policy.places.Place` has it; None where the
            program does not say it.
        hosts: number of hosts that the communicator's ranks are on; None where it is not known.
        together: bytes that travel as one operation with this message; None if it travels alone.
        remembers: whether error feedback may keep a residual under the name; False where the next message of that name
            is in other coordinates.
    """

    axis: str
    op: str
    phase: str | None
    dtype: DType
    nbytes: int
    name: str | None = None
    step: int | None = None
    shape: tuple[int, ...] | None = None
    stage: int | None = None
    layer: int | None = None
    part: str | None = None
    hosts: int | None = None
    together: int | None = None
    remembers: bool = True

    @property
    def kept_by(self) -> str | None:
        """Return the name by which error feedback keeps a residual; None where it keeps none."""
        return self.name if self.remembers else None

    @property
    def dims(self) -> tuple[int, ...]:
        """Return the shape, that of a flat buffer where none is known."""
        return self.shape or (self.nbytes // self.dtype.itemsize,)

    @property
    def operation_bytes(self) -> int:
        """Return the bytes of the operation in which the message travels."""
        return max(self.nbytes, self.together or 0)


@dataclass(frozen=True, slots=True)
class Choice:
    """Answer of a policy.

    Attributes:
        codec: codec of the message; ``none`` sends it as it is.
        feedback: spec of a form of error feedback (``"ef"``, ``"loco:beta=0.9"``) or None.
        reason: reason for this codec, in a few words, for ``stats()``.
        once: whether it is for one message alone: the policy is to be asked again about the next one of the kind.
        algorithm: algorithm of the operation, wherever it can be used; None to choose.
        label: name under which statistics count the message; None for the codec's spec.
        min_bytes: smaller messages are not to be encoded, which an operation looks to whose ranks know only the sizes
            of their own parts.
    """

    codec: Codec
    feedback: str | None
    reason: str
    once: bool = False
    algorithm: str | None = None
    label: str | None = None
    min_bytes: int = 0

    @property
    def counted_as(self) -> str:
        """Return the name under which statistics count the message."""
        return self.label or self.codec.spec

    @property
    def compresses(self) -> bool:
        """Tell whether the codec is anything other than ``none``."""
        return self.codec.name != "none"

    @property
    def encodes(self) -> bool:
        """Tell whether messages are encoded: ``none`` with feedback sends, unencoded, what earlier messages lacked."""
        return self.compresses or self.feedback is not None

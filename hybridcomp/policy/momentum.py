"""Find feedback with momentum in a policy, which some senders must not have."""

from __future__ import annotations

from hybridcomp.arrays import DType
from hybridcomp.codecs import parse_form
from hybridcomp.errors import PolicyError
from hybridcomp.policy.message import Message
from hybridcomp.policy.rules import Policy


def feedback_with_momentum(policy: Policy, axis: str, op: str) -> str | None:
    """Return the feedback of an operation, if it has momentum in some step."""
    for step in policy.changes:
        # A matrix, as some codecs take no vector, with a name that no pattern of exclude has but one for all names.
        message = Message(
            axis, op, "backward", DType.FLOAT32, 2**40, name="", step=step, shape=(2**19, 2**19)
        )
        feedback = policy.choose(message).feedback
        if feedback is not None and parse_form(feedback).options.get("momentum"):
            return feedback
    return None


def check_differences(policy: Policy, axis: str, how: str = "") -> None:
    """Check that all-reduces of differences of parameters have no feedback with momentum, which would add to them.

    Args:
        policy, axis: policy, and mesh axis of the replicas.
        how: setting by which replicas synchronise, for the error, with a space behind it.

    Raises:
        PolicyError: they have; says what is allowed.
    """
    feedback = feedback_with_momentum(policy, axis, "all_reduce")
    if feedback is not None:
        raise PolicyError(
            f"policy {policy.name}: feedback {feedback} of {axis} has momentum, and {how}replicas send differences "
            'of parameters, of which it would make others: give feedback = "ef", "loco" or "ef21"'
        )

"""Read the options of an operation in any of the forms that torch passes: an options object, or its parts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import AllreduceOptions, ReduceOp


class OperationOptions(NamedTuple):
    """The options of an operation.

    Attributes:
        op: the reduce operation; None is a sum.
        root: the rank in the group that sends to, or receives from, all.
        timeout: seconds that a wait may take; None is the group's own timeout.
        waits: whether the caller waits as soon as it has the work.
    """

    op: Any = None
    root: int = 0
    timeout: float | None = None
    waits: bool = False


NO_OPTIONS = OperationOptions()
_NO_TIME = timedelta(0)
_made: Any = tuple.__new__  # a named tuple's own is a call of Python's more


def operation_options(*given: Any) -> OperationOptions:
    """Sort arguments into options by their types.

    Args:
        given: options objects, reduce operations, roots, timeouts, or None, in any order.
    """
    op: Any = None
    root: int = 0
    timeout: timedelta | None = None
    waits = False
    for value in given:
        if value is None:
            continue
        if value.__class__ is AllreduceOptions:  # the most frequent
            op, timeout, waits = value.reduceOp, value.timeout, not getattr(value, "asyncOp", True)
        elif isinstance(value, timedelta):
            timeout = value
        elif isinstance(value, (ReduceOp, ReduceOp.RedOpType)):
            op = value
        elif isinstance(value, int):
            root = value
        else:
            op = getattr(value, "reduceOp", op)
            root = getattr(value, "rootRank", root)
            timeout = getattr(value, "timeout", timeout)
            waits = not getattr(value, "asyncOp", True)
    seconds = None if timeout is None or timeout <= _NO_TIME else timeout.total_seconds()
    made: OperationOptions = _made(OperationOptions, (op, root, seconds, waits))
    return made

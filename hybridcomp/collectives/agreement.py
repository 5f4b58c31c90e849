"""What all ranks must have in common, checked when a communicator is made."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.awareness import Awareness
from hybridcomp.collectives.debug import LEVELS, VARIABLE
from hybridcomp.collectives.engine import Pending, Steps, engine
from hybridcomp.errors import MismatchError
from hybridcomp.policy import Policy

_NAME_BYTES = 96


class Agreement(NamedTuple):
    """What the ranks of a communicator have agreed on.

    Attributes:
        awareness: whether every rank's MPI takes device pointers: both ends of a message treat it alike.
        key: a random number of 64 bits, which tells the communicator from others.
        on_host: no rank's arrays can lie on a device.
    """

    awareness: Awareness
    key: int
    on_host: bool


def duplicate(comm: MPI.Comm, axis: str, timeout: float) -> MPI.Comm:
    """Duplicate ``comm``, as soon as all of its ranks are here. Collective.

    Args:
        comm: of the caller.
        axis: for the message.
        timeout: seconds to wait for the other ranks.

    Raises:
        CollectiveTimeoutError: they have not all come.
    """
    # Not by an Idup: one that stays unmatched confuses Open MPI when it makes the next communicator.
    request = comm.Ibarrier()

    def steps() -> Steps:
        yield Pending([request], [-1])

    rank, size = comm.Get_rank(), comm.Get_size()
    what = f"making a communicator on axis {axis!r}, rank {rank} of {size},"
    engine().start(steps(), what, timeout).wait()
    return comm.Dup()


def agree(comm: MPI.Comm, policy: Policy, mine: Awareness, detail: bool, *, on_host: bool) -> Agreement:
    """Check that every rank of ``comm`` has the same policy and debug level. Collective.

    Args:
        comm: whose ranks.
        policy: of this rank.
        mine: whether this rank's MPI takes device pointers.
        detail: this rank compares operations.
        on_host: this rank's arrays cannot lie on a device.

    Returns:
        What holds for all ranks.

    Raises:
        MismatchError: on every rank; names the ranks and both policies, or levels.
    """
    card = np.zeros(32 + _NAME_BYTES + 12, np.uint8)
    card[:32] = np.frombuffer(bytes.fromhex(policy.digest), np.uint8)
    name = policy.name.encode()[-_NAME_BYTES:]
    card[32 : 32 + len(name)] = np.frombuffer(name, np.uint8)
    card[-12:-4] = np.frombuffer(secrets.token_bytes(8), np.uint8)
    card[-4:] = detail, on_host, mine.messages, mine.collectives
    cards = np.empty((comm.Get_size(), card.size), np.uint8)
    comm.Allgather(card, cards)
    levels = cards[:, -4].tolist()
    if len(set(levels)) > 1:
        other = levels.index(1 - levels[0])
        raise MismatchError(
            f"the ranks have different debug levels: rank 0 has {VARIABLE}={LEVELS[levels[0]]}, "
            f"rank {other} has {LEVELS[levels[other]]}; give all ranks the same"
        )
    different = [r for r in range(len(cards)) if (cards[r, :32] != cards[0, :32]).any()]
    if different:
        other = different[0]
        raise MismatchError(
            f"the ranks have different policies: rank 0 has {_name(cards[0])!r} ({_digest(cards[0])}), "
            f"rank {other} has {_name(cards[other])!r} ({_digest(cards[other])}); give all ranks the same policy"
        )
    on_host, messages, collectives = cards[:, -3:].min(axis=0).astype(bool).tolist()
    why = mine.why if messages == mine.messages else "another rank's MPI does not"
    key = int.from_bytes(cards[0, -12:-4].tobytes(), "little")
    return Agreement(Awareness(messages, collectives, why), key, on_host)


def _name(card: ByteArray) -> str:
    return bytes(card[32:-12]).rstrip(b"\0").decode(errors="replace")


def _digest(card: ByteArray) -> str:
    return bytes(card[:4]).hex()


def same_text(comm: MPI.Comm, text: str) -> str:
    """Give every rank of ``comm`` rank 0's text. Collective."""
    data = np.frombuffer(text.encode(), np.uint8).copy()
    size = np.array([data.size], np.int64)
    comm.Bcast(size)
    if comm.Get_rank():
        data = np.empty(int(size[0]), np.uint8)
    comm.Bcast(data)
    return data.tobytes().decode()

"""What all ranks must have in common, checked when a communicator is made."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from hybridcomp.arrays import ByteArray
from hybridcomp.collectives.awareness import Awareness
from hybridcomp.errors import MismatchError
from hybridcomp.policy import Policy

_NAME_BYTES = 96


def agree(comm: MPI.Comm, policy: Policy, mine: Awareness) -> Awareness:
    """Check that every rank of ``comm`` has the same policy. Collective.

    Args:
        comm: whose ranks.
        policy: of this rank.
        mine: whether this rank's MPI takes device pointers.

    Returns:
        Whether every rank's does: both ends of a message treat it alike.

    Raises:
        MismatchError: on every rank; names the ranks and both policies.
    """
    card = np.zeros(32 + _NAME_BYTES + 2, np.uint8)
    card[:32] = np.frombuffer(bytes.fromhex(policy.digest), np.uint8)
    name = policy.name.encode()[-_NAME_BYTES:]
    card[32 : 32 + len(name)] = np.frombuffer(name, np.uint8)
    card[-2:] = mine.messages, mine.collectives
    cards = np.empty((comm.Get_size(), card.size), np.uint8)
    comm.Allgather(card, cards)
    different = [r for r in range(len(cards)) if (cards[r, :32] != cards[0, :32]).any()]
    if different:
        other = different[0]
        raise MismatchError(
            f"the ranks have different policies: rank 0 has {_name(cards[0])!r} ({_digest(cards[0])}), "
            f"rank {other} has {_name(cards[other])!r} ({_digest(cards[other])}); give all ranks the same policy"
        )
    messages, collectives = cards[:, -2:].min(axis=0).astype(bool).tolist()
    why = mine.why if messages == mine.messages else "another rank's MPI does not"
    return Awareness(messages, collectives, why)


def _name(card: ByteArray) -> str:
    return bytes(card[32:-2]).rstrip(b"\0").decode(errors="replace")


def _digest(card: ByteArray) -> str:
    return bytes(card[:4]).hex()

"""Divide a step's micro-batches among replicas by their speed. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.errors import ConfigError, printable
from hybridcomp.files import checked, parse_line, read_bytes

Shares = tuple[int, ...]
"""Micro-batches of each replica in a step."""


def divide(total: int, speeds: Sequence[float], least: int) -> Shares:
    """Divide micro-batches so that the last replica to end its own ends as early as it can.

    Args:
        total: number of micro-batches of a step; at least ``least`` for each replica.
        speeds: micro-batches per second of each replica, above 0.
        least: fewest micro-batches of a replica.

    Returns:
        The micro-batches of each replica. Where two would end the next one at the same time, the first has it.
    """
    shares = [least] * len(speeds)
    for _ in range(total - sum(shares)):
        ends = [(share + 1) / speed for share, speed in zip(shares, speeds, strict=True)]
        shares[ends.index(min(ends))] += 1
    return tuple(shares)


def decide(shares: Shares, speeds: Sequence[float], least: int, gain: float) -> Shares:
    """Return the shares to have from now on: others only where they save ``gain`` of a step's time.

    Args:
        shares: present shares.
        speeds, least: see :func:`divide`.
        gain: part of the time that the slowest replica takes with the present shares.
    """
    better = divide(sum(shares), speeds, least)

    def seconds(each: Shares) -> float:
        return max(share / speed for share, speed in zip(each, speeds, strict=True))

    return better if seconds(better) < (1 - gain) * seconds(shares) else shares


def parse_shares(text: str) -> Shares:
    """Parse ``6-4-3-3``.

    Raises:
        ValueError: the text is something else.
    """
    try:
        return tuple(int(part) for part in text.split("-"))
    except ValueError:
        raise ValueError(f"shares must be numbers such as 6-4-3-3, not {text!r}") from None


def check_shares(shares: Shares, replicas: int, micro_batches: int) -> None:
    """Check the shares of a run.

    Args:
        shares: micro-batches of each replica.
        replicas: number of replicas.
        micro_batches: micro-batches of a replica, where all have the same number.

    Raises:
        ValueError: there are not so many replicas, one has no micro-batch, or the sum is another.
    """
    if len(shares) != replicas or min(shares) < 1 or sum(shares) != replicas * micro_batches:
        raise ValueError(
            f"shares must be of {replicas} replicas, each at least 1, and {replicas * micro_batches} together "
            f"(dp * micro_batches), not {'-'.join(map(str, shares))}"
        )


def read_shares(path: str, replicas: int, micro_batches: int) -> list[tuple[int, Shares]]:
    """Read the shares that a run had, from its ``metrics.jsonl``.

    Returns:
        Pairs of a step, from 0, and the shares from that step on; in the order of steps.

    Raises:
        ConfigError: the file cannot be read, has no shares, or those of another run (:func:`check_shares`).
    """
    name = f"frozen: {printable(path)}"
    found: list[tuple[int, Shares]] = []
    for number, line in enumerate(read_bytes(path, what="frozen:").split(b"\n"), 1):
        if not line.strip():
            continue
        row = parse_line(line, name, number, {"kind": str})
        if row["kind"] != "train" or not row.get("replicas"):
            continue
        told = checked(row, {"step": int, "replicas": dict}, f"{name}: line {number}")["replicas"]
        if told.get("shares"):
            checked(told, {"shares": [int]}, f"{name}: line {number}, key replicas")
            found.append((row["step"], tuple(told["shares"])))
    if not found:
        raise ConfigError(f"{name} has no shares: give the metrics.jsonl of a run with --sync elastic")
    for _, shares in found:
        try:
            check_shares(shares, replicas, micro_batches)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
    return sorted(found)

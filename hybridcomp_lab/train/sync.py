"""Read the method by which replicas synchronise, and check its needs of a configuration. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hybridcomp.codecs import get_codec
from hybridcomp.errors import ConfigError
from hybridcomp_lab.train.config import FLUSHED, TrainConfig
from hybridcomp_lab.train.gossip.graph import make_graph
from hybridcomp_lab.train.shares import Shares, check_shares, parse_shares, read_shares


@dataclass(frozen=True, kw_only=True)
class Sync:
    """Method by which replicas synchronise.

    Attributes:
        method: one of :data:`METHODS`.
        every: steps from one synchronisation of a parameter to its next.
    """

    method: ClassVar[str]
    every: int


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Sync):
    """DiLoCo and its streaming form: :class:`hybridcomp.torch.DiLoCo`.

    Attributes:
        fragments: number of parts of each rank's parameters, whose outer steps take turns.
        delay: steps that go on while a part is averaged.
        alpha: share of its own values that a replica keeps in an outer step.
        lr, momentum: settings of the outer optimizer.
    """

    method = "diloco"
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    lr: float = 0.7
    momentum: float = 0.9


@dataclass(frozen=True, kw_only=True)
class LocalSGD(DiLoCo):
    """Local SGD, :class:`hybridcomp.torch.LocalSGD`: an outer step gives the mean of the parameters.

    It is the last mean less the mean of the differences to it.
    """

    method = "local_sgd"
    fragments: int = field(default=1, init=False)
    delay: int = field(default=0, init=False)
    alpha: float = field(default=0.0, init=False)
    lr: float = field(default=1.0, init=False)
    momentum: float = field(default=0.0, init=False)


@dataclass(frozen=True, kw_only=True)
class Elastic(DiLoCo):
    """Adaptive elastic SGD: each replica has micro-batches of a step by its speed, :mod:`.optimizer.elastic`.

    Attributes:
        lr, momentum: settings of the outer optimizer; with 1 and 0 an outer step gives the parameters' weighted mean.
        least: fewest micro-batches of a replica.
        gain: smallest part of a step that other shares must save before they are taken.
        shares: micro-batches of each replica, ``6-4-3-3``, for the whole run; empty: decided by measured times.
        frozen: path of an earlier run's metrics, whose shares are repeated; empty: none.
    """

    method = "elastic"
    fragments: int = field(default=1, init=False)
    delay: int = field(default=0, init=False)
    alpha: float = field(default=0.0, init=False)
    lr: float = 1.0
    momentum: float = 0.0
    least: int = 1
    gain: float = 0.05
    shares: str = ""
    frozen: str = ""


@dataclass(frozen=True, kw_only=True)
class Gossip(Sync):
    """Mixing of parameters with neighbours' in a graph of the replicas, :mod:`hybridcomp_lab.train.gossip`.

    Attributes:
        rule: value of the key ``method``: ``plain``, ``powergossip`` or ``choco``.
        rank: rank of PowerGossip's approximations.
        codec: spec of Choco's codec.
        gamma: Choco's factor on the known differences to neighbours.
        graph: graph of the replicas: see :func:`hybridcomp_lab.train.gossip.graph.make_graph`.
    """

    method = "gossip"
    every: int = 1
    rule: str = "plain"
    rank: int = 1
    codec: str = "topk:ratio=0.01"
    gamma: float = 0.0375  # as Vogels et al. (arXiv 2008.01425) tuned it for the 1 % of largest magnitude
    graph: str = "ring"


@dataclass(frozen=True, kw_only=True)
class Event(Sync):
    """Gossip of only those tensors that have changed by enough, :mod:`hybridcomp_lab.train.gossip.event`.

    Attributes:
        horizon: factor of a tensor's threshold in each step.
        warmup: number of steps in which all tensors are sent.
        reach: number of steps' change after which a tensor is sent.
        stale: ``mix``: mix with tensors received earlier, too; ``skip``: with new ones; ``pair``: with new ones, or
            where this replica's own is new.
        graph: graph of the replicas, as in :class:`Gossip`.
        reads: ``ordered``: read the neighbours' puts up to the same step; ``free``: read the puts that have arrived.
    """

    method = "event"
    every: int = field(default=1, init=False)
    horizon: float = 1.0
    warmup: int = 30
    reach: float = 1.0
    stale: str = "mix"
    graph: str = "ring"
    reads: str = "ordered"


METHODS: dict[str, type[Sync]] = {kind.method: kind for kind in (LocalSGD, DiLoCo, Elastic, Gossip, Event)}
"""Kinds of synchronisation by name."""

OF_RULE: dict[str, frozenset[str]] = {
    "plain": frozenset(),
    "powergossip": frozenset({"rank"}),
    "choco": frozenset({"codec", "gamma"}),
}
"""Rules of gossip, each with the keys that are its own."""

READS = ("ordered", "free")
"""Moments at which replicas read the tensors that neighbours have put into their memory."""

STALE = ("mix", "skip", "pair")
"""Uses of tensors that replicas have received before."""

_FIELDS = {"method": "rule"}  # keys with another name here
_LISTS = ("codec", "graph", "frozen")  # keys whose values may have commas


def parse_sync(text: str) -> Sync:
    """Parse ``local_sgd:every=16``, ``diloco:every=32,fragments=4`` or ``gossip:method=choco,graph=0-1,1-2``.

    Raises:
        ConfigError: the text is wrong; says what is allowed.
    """
    method, _, options = text.partition(":")
    if method not in METHODS:
        raise ConfigError(f"sync {text!r}: the method must be one of {', '.join(METHODS)}, not {method!r}")
    fields = {_key(f): f for f in dataclasses.fields(METHODS[method]) if f.init}
    given = _split(text, options, list(fields))
    if "every" not in given and "every" in fields and fields["every"].default is dataclasses.MISSING:
        raise ConfigError(f"sync {text!r} lacks every, as in {method}:every=32")
    values = {
        fields[key].name: _value(text, key, str(fields[key].type), value) for key, value in given.items()
    }
    sync = METHODS[method](**values)  # type: ignore[arg-type]  # as _value made them
    _check_values(text, sync)
    if isinstance(sync, Gossip):
        _check_gossip(text, sync, given)
    return sync


def _key(of: dataclasses.Field[Any]) -> str:
    return next((key for key, name in _FIELDS.items() if name == of.name), of.name)


def _split(text: str, options: str, keys: list[str]) -> dict[str, str]:
    """Return the values of options by key."""
    found: dict[str, str] = {}
    last = ""
    for part in filter(None, options.split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key in found:
            raise ConfigError(f"sync {text!r}: {key} stands there twice")
        if key in keys:
            found[key] = value
            last = key
        elif last in _LISTS:
            found[last] += f",{part}"
        else:
            raise ConfigError(f"sync {text!r}: {part!r} must be KEY=VALUE; keys: {', '.join(keys)}")
    return found


def _value(text: str, key: str, kind: str, value: str) -> int | float | str:
    kinds: dict[str, type[int | float | str]] = {"int": int, "float": float, "str": str}
    try:
        return kinds[kind](value)
    except ValueError:
        kind = {"int": "an integer", "float": "a number"}[kind]
        raise ConfigError(f"sync {text!r}: {key} must be {kind}, not {value!r}") from None


def _check_values(text: str, sync: Sync) -> None:
    every = sync.every
    allowed: dict[str, tuple[Callable[[Any], bool], str]] = {
        "every": (lambda value: value >= 1, "at least 1"),
        "fragments": (lambda value: 1 <= value <= every, f"from 1 to every ({every})"),
        "delay": (lambda value: 0 <= value < every, f"from 0, and below every ({every})"),
        "alpha": (lambda value: 0 <= value <= 1, "from 0 to 1"),
        "lr": (lambda value: 0 < value < math.inf, "positive and finite"),
        "momentum": (lambda value: 0 <= value < 1, "at least 0, and below 1"),
        "rule": (lambda value: value in OF_RULE, f"one of {', '.join(OF_RULE)}"),
        "rank": (lambda value: value >= 1, "at least 1"),
        "horizon": (lambda value: 0 <= value <= 1, "from 0 to 1"),
        "warmup": (lambda value: value >= 0, "at least 0"),
        "reach": (lambda value: 0 < value < math.inf, "positive and finite"),
        "stale": (lambda value: value in STALE, f"one of {', '.join(STALE)}"),
        "reads": (lambda value: value in READS, f"one of {', '.join(READS)}"),
        "gamma": (lambda value: 0 < value <= 1, "above 0, and at most 1"),
        "least": (lambda value: value >= 1, "at least 1"),
        "gain": (lambda value: 0 <= value < 1, "at least 0, and below 1"),
    }
    for each in dataclasses.fields(sync):
        value = getattr(sync, each.name)
        right, words = allowed.get(each.name, (lambda _: True, ""))
        if each.init and not right(value):
            raise ConfigError(f"sync {text!r}: {_key(each)} must be {words}, not {value}")


def _check_gossip(text: str, sync: Gossip, given: Mapping[str, str]) -> None:
    for rule, keys in OF_RULE.items():
        for key in sorted(keys & given.keys()):
            if rule != sync.rule:
                raise ConfigError(f"sync {text!r}: {key} is of method {rule}, not of {sync.rule}")
    try:
        get_codec(sync.codec)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"sync {text!r}: codec {sync.codec}: {error}") from error


def check_sync(text: str, config: TrainConfig) -> None:
    """Check a sync, and that the rest of a configuration suits it.

    Raises:
        ConfigError: a setting does not suit it; names the setting, and what is allowed.
    """
    sync = parse_sync(text)
    blocks = min(config.cut)
    if config.dp < 2:
        raise ConfigError(f"sync {text} is of replicas: dp must be at least 2, not {config.dp}")
    if config.schedule not in FLUSHED:
        raise ConfigError(
            f"sync {text} comes between whole steps: schedule must be one of {', '.join(FLUSHED)}, "
            f"not {config.schedule}"
        )
    if config.shard != "none":
        raise ConfigError(
            f"sync {text} has whole replicas, which differ: shard must be none, not {config.shard}"
        )
    if config.experts:
        raise ConfigError(
            f"sync {text} has replicas that do not meet in a step, as experts ({config.experts}) do: leave one out"
        )
    if config.tie_embeddings and config.pp > 1:
        raise ConfigError(
            f"sync {text} sums no gradients over replicas, as those of an embedding are that two stages share: "
            "tie_embeddings must be false, or pp 1"
        )
    if isinstance(sync, DiLoCo) and sync.fragments > blocks:
        raise ConfigError(
            f"sync {text}: fragments ({sync.fragments}) must be at most the layers of a stage ({blocks})"
        )
    if isinstance(sync, Elastic):
        _check_elastic(text, sync, config)
    if isinstance(sync, Gossip | Event):
        if config.backend != "hybridcomp":
            raise ConfigError(
                f"sync {text} has replicas send to neighbours over MPI: backend must be hybridcomp, "
                f"not {config.backend}"
            )
        make_graph(sync.graph, config.dp)
    if isinstance(sync, Event) and sync.reads == "free" and config.tp > 1:
        # Parameters that are not split are on each of them, and must stay alike there.
        raise ConfigError(
            f"sync {text} has each rank take what has arrived, which ranks of one replica may not do apart: reads must "
            f"be ordered, or tp 1, not {config.tp}"
        )


def frozen_shares(config: TrainConfig) -> list[tuple[int, Shares]]:
    """Read the shares of an earlier run that a run repeats, each with the step from which on it holds; often none.

    Raises:
        ValueError: the file has none that suit; see :func:`.read_shares`.
    """
    sync = None if config.sync is None else parse_sync(config.sync)
    if not isinstance(sync, Elastic) or not sync.frozen:
        return []
    return read_shares(sync.frozen, config.dp, config.micro_batches)


def _check_elastic(text: str, sync: Elastic, config: TrainConfig) -> None:
    if config.pp > 1:
        raise ConfigError(
            f"sync {text} gives replicas different numbers of micro-batches, which a pipeline's schedule is made for: "
            f"pp must be 1, not {config.pp}"
        )
    if not sync.least <= config.micro_batches or config.micro_batches < 2:
        raise ConfigError(
            f"sync {text} moves micro-batches from one replica to another: micro_batches must be at least 2, and at "
            f"least least ({sync.least}), not {config.micro_batches}"
        )
    if sync.shares and sync.frozen:
        raise ConfigError(f"sync {text}: shares and frozen both say what replicas have: leave one out")
    try:
        if sync.shares:
            check_shares(parse_shares(sync.shares), config.dp, config.micro_batches)
        frozen_shares(config)
    except ValueError as error:
        raise ConfigError(f"sync {text}: {error}") from error

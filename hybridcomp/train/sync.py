"""Read how rarely replicas synchronise, and check what it needs of a configuration. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from hybridcomp.errors import ConfigError
from hybridcomp.train.config import FLUSHED, TrainConfig

METHODS = {"local_sgd": ("every",), "diloco": ("every", "fragments", "delay", "alpha", "lr", "momentum")}
"""Methods of rare synchronisation, each with the names of its options."""


@dataclass(frozen=True)
class Sync:
    """A method of rare synchronisation: :class:`hybridcomp.torch.LocalSGD`, :class:`hybridcomp.torch.DiLoCo`.

    Attributes:
        method: of :data:`METHODS`.
        every: steps from one outer step of a parameter to its next.
        fragments: parts of each rank's parameters, whose outer steps take turns.
        delay: steps that go on while a part is averaged.
        alpha: the share of its own values that a replica keeps in an outer step.
        lr, momentum: of the outer optimizer.
    """

    method: str
    every: int
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    lr: float = 0.7
    momentum: float = 0.9


def parse_sync(text: str) -> Sync:
    """Parse ``local_sgd:every=16`` or ``diloco:every=32,fragments=4``.

    Raises:
        ConfigError: says what is wrong, and what is allowed.
    """
    method, _, options = text.partition(":")
    if method not in METHODS:
        raise ConfigError(f"sync {text!r}: the method must be one of {', '.join(METHODS)}, not {method!r}")
    values: dict[str, int | float] = {}
    for part in filter(None, options.split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in METHODS[method]:
            raise ConfigError(
                f"sync {text!r}: {part!r} must be KEY=NUMBER; keys: {', '.join(METHODS[method])}"
            )
        if key in values:
            raise ConfigError(f"sync {text!r}: {key} stands there twice")
        values[key] = _number(text, key, value)
    if "every" not in values:
        raise ConfigError(f"sync {text!r} lacks every, as in {method}:every=32")
    if (
        method == "local_sgd"
    ):  # the mean of the parameters is the last one less the mean of the differences to it
        values |= {"lr": 1.0, "momentum": 0.0}
    sync = Sync(method, **values)  # type: ignore[arg-type]  # as _number has made them
    _check_numbers(text, sync)
    return sync


def _number(text: str, key: str, value: str) -> int | float:
    whole = next(field.type for field in dataclasses.fields(Sync) if field.name == key) == "int"
    try:
        return int(value) if whole else float(value)
    except ValueError:
        kind = "an integer" if whole else "a number"
        raise ConfigError(f"sync {text!r}: {key} must be {kind}, not {value!r}") from None


def _check_numbers(text: str, sync: Sync) -> None:
    every = sync.every
    allowed = {
        "every": (every >= 1, "at least 1"),
        "fragments": (1 <= sync.fragments <= every, f"from 1 to every ({every})"),
        "delay": (0 <= sync.delay < every, f"from 0, and below every ({every})"),
        "alpha": (0 <= sync.alpha <= 1, "from 0 to 1"),
        "lr": (0 < sync.lr < math.inf, "positive and finite"),
        "momentum": (0 <= sync.momentum < 1, "at least 0, and below 1"),
    }
    for key, (right, words) in allowed.items():
        if not right:
            raise ConfigError(f"sync {text!r}: {key} must be {words}, not {getattr(sync, key)}")


def check_sync(text: str, config: TrainConfig) -> None:
    """Check a sync, and that the rest of a configuration goes with it.

    Raises:
        ConfigError: names what does not, and what is allowed.
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
    if sync.fragments > blocks:
        raise ConfigError(
            f"sync {text}: fragments ({sync.fragments}) must be at most the layers of a stage ({blocks})"
        )

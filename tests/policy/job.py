"""Run a rule that adapts on ranks that send arrays of a test's making."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hybridcomp.arrays import DType
from hybridcomp.policy import Message
from hybridcomp.policy.adapt.adaptation import Adaptation
from hybridcomp.policy.toml import parse_policy

DCT = '{ codec = "threshold", feedback = "ef", adapt = "dct:OPTIONS" }'
SIDCO = '{ codec = "sidco:ratio=0.01", feedback = "ef", adapt = "sidco:OPTIONS" }'
NAMES = ("first", "second")


def rule(text: str, options: str = ""):
    policy = parse_policy(
        f"dp.all_reduce = {text.replace(':OPTIONS', f':{options}' if options else '')}", "it"
    )
    found = policy.adapting("dp", "all_reduce")
    assert found is not None
    return policy, found


class Job:
    """Ranks that send arrays of a test's making, one step after the other."""

    def __init__(
        self, policy, found, values: Callable[[int, int, str], np.ndarray], ranks: int = 3, place: int = 1
    ):
        self.values, self.now, self.ranks = values, 0.0, ranks
        self.offers: dict[int, list[np.ndarray]] = {}
        self.sent = [0] * ranks
        self.seconds: Callable[[str], float] = lambda codec: 1.0
        self.each = [
            Adaptation(
                found.adapt,
                found.codecs,
                policy,
                "dp",
                "all_reduce",
                lambda v, r=rank: self._gather(v, r),
                place=place,
                writes=rank == 0,
                clock=lambda: self.now,
            )
            for rank in range(ranks)
        ]
        self.codecs: list[str] = []

    def _gather(self, values: np.ndarray, rank: int) -> Callable[[], np.ndarray]:
        number = self.sent[rank]
        self.sent[rank] += 1
        self.offers.setdefault(number, []).append(values)
        return lambda: np.array(self.offers[number])

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            chosen = set()
            for rank, one in enumerate(self.each):
                one.begin(step)
                for name in NAMES:
                    values = self.values(step, rank, name)
                    about = Message(
                        "dp", "all_reduce", "backward", DType.FLOAT32, 4 * values.size, name, step
                    )
                    chosen.add(one.choose(about).codec.spec.removesuffix(":values=none"))
                    if one.measuring:
                        one.observe(name, values[one.sample(values.size)], values.size)
            spec = " ".join(sorted(chosen))
            self.codecs.append(spec)
            self.now += self.seconds(spec)


def drawn(step: int, rank: int, name: str, n: int = 4000) -> np.ndarray:
    """Return heavy-tailed values, as gradients are."""
    values = np.random.default_rng([step, rank, len(name)]).standard_t(3, n)
    return values.astype(np.float32)

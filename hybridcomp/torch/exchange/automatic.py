"""Let the policy ``auto`` decide for a process group of torch's: its exchanges carry the ranks' measurements."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from hybridcomp.collectives.figures import check_figures, check_inside, check_sizes
from hybridcomp.collectives.stats import StatTable
from hybridcomp.errors import ConfigError
from hybridcomp.perfmodel import Profile, load_profile
from hybridcomp.policy import Policy
from hybridcomp.policy.auto.cost import Place
from hybridcomp.policy.auto.decider import Array, Decider
from hybridcomp.policy.auto.freeze import freezer
from hybridcomp.policy.auto.reviews import Reviews
from hybridcomp.schedules.topology import Topology
from hybridcomp.torch.exchange.group import ExchangeGroup
from hybridcomp.torch.exchange.pipeline import Pipeline
from hybridcomp.torch.exchange.worker import Worker

_SECONDS = 300.0  # longest time of an exchange of measurements
_WHERE = "in the larger group"


class Automatic:
    """The decisions of one group.

    Args:
        table: statistics of its operations.
        worker: the thread that runs them.
        pipeline: pipeline of its batches.
        group: group that moves its bytes.
        topology: hosts of its ranks.
    """

    def __init__(
        self, table: StatTable, worker: Worker, pipeline: Pipeline, group: ExchangeGroup, topology: Topology
    ) -> None:
        self._table, self._worker, self._pipeline, self._group = table, worker, pipeline, group
        self._topology = topology
        self._together = group
        self._reviews: Reviews | None = None
        self._due = 0

    def join(self, larger: ExchangeGroup, policy: Policy) -> None:
        """Decide together with the other groups of a larger one from now on; collective over that.

        Raises:
            ValueError: on all ranks; the larger group lacks a rank of a group, or these have unlike numbers of ranks.
            MismatchError: on all ranks; their policies differ.
        """
        larger.check_alike(policy)
        outside = next((i for i, rank in enumerate(self._group.ranks) if rank not in larger.ranks), -1)
        told = larger.gathered(np.array([outside, self._group.size], np.float64)).astype(np.int64)
        check_inside(told[:, 0], _WHERE)
        check_sizes(told[:, 1], _WHERE)
        self._together = larger

    @property
    def deciding(self) -> int:
        """Return the number of ranks that decide together."""
        return self._together.size

    def begin(self, policy: Policy | None) -> Decider | None:
        """Return the decider of a policy; None where it leaves nothing to decide. Collective where it does.

        Raises:
            ConfigError: rank 0's profile cannot be read.
        """
        size = self._group.size
        if policy is None or not policy.decides or size == 1:
            return None
        wrong, profile = self._together.first_text(_own_profile()).split("\n", 1)
        if wrong:
            raise ConfigError(profile)
        known = Profile.from_bytes(profile.encode(), "rank 0's")
        place = Place(size, self._topology.count, self._topology.largest, compiled=False)
        decider = Decider(policy, known, place)
        if policy.auto is not None and policy.auto.freeze is not None and self._together.rank == 0:
            freezer.add(policy.auto, decider)
        self._reviews = Reviews(
            decider, lambda: [row.measured for row in self._table.rows()], self.gather, lambda: None
        )
        return decider

    def review(self, operation: int) -> None:
        """Run the review, if it is due, before the operation of this number."""
        if self._reviews is not None and operation >= self._due:
            self._due = operation + self._reviews.review(operation)

    def gather(self, values: Array) -> Callable[[], Array]:
        """Gather the deciding ranks' values once started operations have ended.

        Returns:
            Function that waits for the values, and returns them: float64 [ranks, n].
        """
        future: Future[Array] = Future()
        together = self._together

        def run() -> None:
            try:
                self._pipeline.flush()
                if together is not self._group:
                    counts = together.gathered(np.array([values.size], np.float64))[:, 0]
                    check_figures(counts.astype(np.int64), _WHERE)
                future.set_result(together.gathered(values))
            except BaseException as error:  # a task must not raise
                future.set_exception(error)

        self._worker.submit(run)
        return lambda: future.result(_SECONDS)


def _own_profile() -> str:
    """Return this rank's profile behind an empty line, or an error behind another."""
    try:
        return f"\n{load_profile().to_toml()}"
    except ConfigError as error:
        return f"wrong\n{error}"

"""Let ranks measure unlike times, by which groups that decide for themselves decide apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from hybridcomp.policy.adapt.gravac import GravacController
from hybridcomp.policy.auto import reviews


@contextmanager
def unlike_times() -> Iterator[None]:
    """Let even ranks find less compression faster, and odd ones more of it, after a few operations."""
    even = dist.get_rank() % 2 == 0
    since, figures = reviews.Reviews._since, GravacController.figures

    def unlike_since(self, before, decisions):
        seconds = [1.0 if even == decision.choice.codec.lossless else 2.0 for decision in decisions]
        counted = since(self, before, decisions)
        return [
            (calls, nbytes, each * nbytes) for (calls, nbytes, _), each in zip(counted, seconds, strict=True)
        ]

    def unlike_figures(self, _):
        return figures(self, 1.0 if even or self.sent is None else self.sent**2)

    with (
        mock.patch.multiple(reviews, _LEAST_COUNTED=2, _MOST_COUNTED=2, _ROUNDS=1),
        mock.patch.object(reviews.Reviews, "_since", unlike_since),
        mock.patch.object(GravacController, "figures", unlike_figures),
    ):
        yield

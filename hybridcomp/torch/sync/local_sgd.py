"""Local SGD: replicas train apart, and their parameters are averaged after some steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hybridcomp.torch.backend.options import PolicyLike
from hybridcomp.torch.sync.semi_sync import SemiSync


class LocalSGD(SemiSync):
    """A context manager that averages the parameters of all replicas every ``every`` steps of the optimizer.

    Local SGD of Stich, "Local SGD Converges Fast and Communicates Little" (arXiv 1805.09767), as
    ``torchft.local_sgd.LocalSGD`` has it. Replicas send how their parameters have changed since the last average, which
    they keep a copy of: changes stand coarser codecs than parameters do. States of optimizers, and buffers, are not
    averaged.

    .. code-block:: python

        with hct.LocalSGD(model, optimizer, every=16):
            for x, y in batches:
                optimizer.zero_grad()
                loss(model(x), y).backward()    # no DDP
                optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        every: int,
        policy: PolicyLike | None = None,
        process_group: Any = None,
        axis: str = "dp",
        init_sync: bool = True,
    ) -> None:
        """Copy the model's parameters.

        Args:
            model: model that is not in DDP, with parameters of any floating-point or complex type, DTensors
                too, of which each rank averages its own part. Those that require no gradient are left alone.
            optimizer: optimizer whose steps are counted; None is the one that has parameters of the model. Where
                several have, it is the one that steps last.
            every: steps from one average to the next; torchft's ``sync_every``.
            policy: policy as :func:`hybridcomp.load_policy` takes it, whose section of ``axis`` says how ``all_reduce``
                is compressed; None is that of :func:`hybridcomp.torch.set_policy` or ``HYBRIDCOMP_POLICY``, else
                ``hybrid``: 4 bits with error feedback. Its ``warmup_steps`` are averages. The same on all ranks.
            process_group: the replicas; None is the default group.
            axis: the policy's section.
            init_sync: whether replicas begin with rank 0's parameters and buffers, at the first ``with``; not after
                :meth:`load_state_dict`.

        Raises:
            ValueError: ``every`` is below 1, or the model has nothing to train.
            PolicyError: the policy cannot be read, or has feedback with momentum.
        """
        super().__init__(
            model,
            optimizer,
            # The mean of the parameters is the last one less the mean of the differences to it.
            lambda parameters: torch.optim.SGD(parameters.values(), lr=1.0),
            every=every,
            policy=policy,
            process_group=process_group,
            axis=axis,
            init_sync=init_sync,
        )

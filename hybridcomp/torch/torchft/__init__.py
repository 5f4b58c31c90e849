"""hybridcomp for torchft: replicas come and go from step to step, and what they send is compressed.

.. code-block:: python

    import hybridcomp.torch.torchft as hft
    from torchft import Manager
    from torchft.optim import OptimizerWrapper

    manager = Manager(pg=hft.ProcessGroupGloo(policy="hybrid"), min_replica_size=2, ...)   # was: torchft's own
    ddp = hft.DistributedDataParallel(manager, model)                                      # was: torchft's own
    optimizer = OptimizerWrapper(manager, torch.optim.AdamW(ddp.parameters()))

Membership, quorum and live recovery are torchft's. Error feedback is kept by parameter from quorum to quorum.
"""

from __future__ import annotations

try:
    import torchft as _torchft  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(
        f"hybridcomp.torch.torchft takes torchft, which is not installed: pip install torchft-nightly ({error})"
    ) from error

from hybridcomp.torch.torchft.ddp import DistributedDataParallel
from hybridcomp.torch.torchft.groups import ProcessGroupGloo, ProcessGroupNCCL
from hybridcomp.torch.torchft.rarely import DiLoCo, LocalSGD

__all__ = ["DiLoCo", "DistributedDataParallel", "LocalSGD", "ProcessGroupGloo", "ProcessGroupNCCL"]

del _torchft

"""Synchronise replicas rarely: local SGD, DiLoCo and its streaming form."""

from hybridcomp.torch.sync.diloco import DiLoCo
from hybridcomp.torch.sync.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]

"""Optimizers whose ranks exchange their momentum in the place of the gradient: 1-bit Adam and its family."""

from hybridcomp.torch.momentum.adam import OnebitAdam
from hybridcomp.torch.momentum.deepspeed import deepspeed_optimizer
from hybridcomp.torch.momentum.lamb import OnebitLamb
from hybridcomp.torch.momentum.zero_one import ZeroOneAdam

__all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam", "deepspeed_optimizer"]

"""A communication hook for ``DistributedDataParallel``, over hybridcomp, gloo, NCCL or any other backend."""

from hybridcomp.torch.hook.state import HookState, comm_hook

__all__ = ["HookState", "comm_hook"]

"""Average the gradients of ``DistributedDataParallel`` by a hook, over hybridcomp, gloo, NCCL or any other backend."""

from hybridcomp.torch.hook.state import HookState, comm_hook

__all__ = ["HookState", "comm_hook"]

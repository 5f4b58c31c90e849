"""The process group: torch.distributed's interface to a communicator."""

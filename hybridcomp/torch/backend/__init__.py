"""The process group: what torch.distributed calls, over a communicator."""

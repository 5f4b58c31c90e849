"""Cases that run on every rank of a group; tests.torch.worker runs them."""

"""GPT trainer: data, tensor and pipeline parallelism on PyTorch's own parallel stack, over MPI.

The package has one short file per concern; :mod:`.trainer` holds the loop, :mod:`.start` the checks before it.
Importing this package imports no torch.
"""

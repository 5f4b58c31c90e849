"""The GPT trainer: data, tensor and pipeline parallelism on PyTorch's own parallel stack, over MPI.

One short file per concern; :mod:`.trainer` holds the loop, :mod:`.start` what happens before it.
Importing this package imports no torch.
"""

"""Linear codecs on devices: the kernels, and the rounds of their reductions."""

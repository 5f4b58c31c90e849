"""FSDP2 with compressed communication: see :func:`compress_fsdp`."""

from hybridcomp.torch.fsdp.state import FSDPCompression, compress_fsdp

__all__ = ["FSDPCompression", "compress_fsdp"]

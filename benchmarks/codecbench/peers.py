"""Other libraries' ways to compress, behind one interface: torch, zfpy, zstandard, hivemind, numcodecs.

Each is used as its documentation shows, on one thread, and makes its own buffers, as it does for its users. Nothing
here is needed to run hybridcomp; a peer that is not installed is a row that says so.
"""

from __future__ import annotations

import abc
import importlib.metadata
import importlib.util
import math
import warnings
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

BLOCK = 128  # elements that share a scale in the plain-torch int8, as in ours


class Peer(abc.ABC):
    """A way to compress float32 that is not ours.

    Attributes:
        name: name in the results.
        needs: module without which it cannot run.
        family: group that it is shown in.
    """

    name: ClassVar[str]
    needs: ClassVar[str]
    family: ClassVar[str]

    @classmethod
    def missing(cls) -> str | None:
        """Return why the peer cannot run here; None if it can."""
        return None if importlib.util.find_spec(cls.needs) else "not installed"

    @abc.abstractmethod
    def encode(self, x: Floats) -> Any:
        """Compress ``x``; :meth:`decode` gets the returned object and nothing else."""

    @abc.abstractmethod
    def decode(self, coded: Any, n: int) -> Floats:
        """Return the ``n`` decoded values."""

    @abc.abstractmethod
    def nbytes(self, coded: Any) -> int:
        """Return the bytes that would have to be sent."""


# -- torch -------------------------------------------------------------------------------------------------


class _Torch(Peer):
    needs = "torch"

    def __init__(self) -> None:
        import torch  # noqa: PLC0415

        self.torch = torch

    def nbytes(self, coded: Any) -> int:
        return sum(part.numel() * part.element_size() for part in coded)


class TorchInt8(_Torch):
    name = f"torch eager int8, blocks of {BLOCK}"
    family = "integer"

    def encode(self, x: Floats) -> Any:
        torch = self.torch
        flat = torch.from_numpy(x)
        blocks = torch.nn.functional.pad(flat, (0, -x.size % BLOCK)).view(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True).div_(127)
        integers = (blocks / scale.clamp_min(1e-30)).round_().to(torch.int8)
        return integers, scale

    def decode(self, coded: Any, n: int) -> Floats:
        integers, scale = coded
        return (integers.to(self.torch.float32) * scale).view(-1)[:n].numpy()


class _TorchCast(_Torch):
    family = "cast"
    dtype: ClassVar[str]

    def encode(self, x: Floats) -> Any:
        return (self.torch.from_numpy(x).to(getattr(self.torch, self.dtype)),)

    def decode(self, coded: Any, n: int) -> Floats:
        return coded[0].to(self.torch.float32).numpy()


class TorchFloat16(_TorchCast):
    name = "torch .to(float16)"
    dtype = "float16"


class TorchBFloat16(_TorchCast):
    name = "torch .to(bfloat16)"
    dtype = "bfloat16"


class TorchTopK(_Torch):
    name = "torch topk 1 %"
    family = "sparse"

    def encode(self, x: Floats) -> Any:
        flat = self.torch.from_numpy(x)
        indices = flat.abs().topk(math.ceil(x.size / 100), sorted=False).indices
        return indices.to(self.torch.int32), flat[indices]

    def decode(self, coded: Any, n: int) -> Floats:
        indices, values = coded
        return self.torch.zeros(n).index_copy_(0, indices.long(), values).numpy()


class TorchSign(_Torch):
    """Signs packed into bytes, and one mean magnitude for all."""

    name = "torch sign, packed"
    family = "integer"

    def encode(self, x: Floats) -> Any:
        torch = self.torch
        flat = torch.from_numpy(x)
        mean = flat.abs().mean().view(1)
        bits = torch.nn.functional.pad((flat >= 0).to(torch.uint8), (0, -x.size % 8)).view(-1, 8)
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
        return (bits * weights).sum(1, dtype=torch.uint8), mean

    def decode(self, coded: Any, n: int) -> Floats:
        packed, mean = coded
        torch = self.torch
        bits = packed.unsqueeze(1).bitwise_right_shift(torch.arange(8, dtype=torch.uint8)).bitwise_and_(1)
        return ((bits.view(-1)[:n].to(torch.float32) * 2 - 1) * mean).numpy()


# -- libraries ---------------------------------------------------------------------------------------------


class Zfpy(Peer):
    name = "zfpy rate 8"
    needs = "zfpy"
    family = "error-bounded"

    def __init__(self) -> None:
        import zfpy  # noqa: PLC0415

        self.zfpy = zfpy

    def encode(self, x: Floats) -> Any:
        return self.zfpy.compress_numpy(x, rate=8)

    def decode(self, coded: Any, n: int) -> Floats:
        return self.zfpy.decompress_numpy(coded)

    def nbytes(self, coded: Any) -> int:
        return len(coded)


class Zstandard(Peer):
    name = "zstandard level 3"
    needs = "zstandard"
    family = "exact"

    def __init__(self) -> None:
        import zstandard  # noqa: PLC0415

        self._compressor = zstandard.ZstdCompressor(level=3)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, x: Floats) -> Any:
        return self._compressor.compress(x.data)

    def decode(self, coded: Any, n: int) -> Floats:
        return np.frombuffer(self._decompressor.decompress(coded), np.float32)

    def nbytes(self, coded: Any) -> int:
        return len(coded)


class _Hivemind(Peer):
    needs = "hivemind"
    scheme: ClassVar[str]

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit.script is deprecated; hivemind decorates with it
            from hivemind import compression  # noqa: PLC0415
            from hivemind.compression import quantization  # noqa: PLC0415
        # hivemind 1.1.12 makes an int of an array of one element, which NumPy 2.4 refuses.
        quantization.int = lambda value: value.item() if isinstance(value, np.ndarray) else int(value)
        self._info = compression.CompressionInfo.from_tensor
        self._coder = getattr(compression, self.scheme)()

    def encode(self, x: Floats) -> Any:
        import torch  # noqa: PLC0415

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's quantized tensors are deprecated
            tensor = torch.from_numpy(x)
            return self._coder.compress(tensor, self._info(tensor))

    def decode(self, coded: Any, n: int) -> Floats:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tensors over read-only memory
            return self._coder.extract(coded).numpy()

    def nbytes(self, coded: Any) -> int:
        return len(coded.buffer)


class HivemindUniform8(_Hivemind):
    name = "hivemind Uniform8BitQuantization"
    family = "integer"
    scheme = "Uniform8BitQuantization"


class HivemindBlockwise8(_Hivemind):
    name = "hivemind BlockwiseQuantization"
    family = "integer"
    scheme = "BlockwiseQuantization"

    @classmethod
    def missing(cls) -> str | None:
        if importlib.util.find_spec("bitsandbytes") is None:
            return "bitsandbytes is not installed"
        return super().missing()


class HivemindFloat16(_Hivemind):
    name = "hivemind Float16Compression"
    family = "cast"
    scheme = "Float16Compression"


class _Numcodecs(Peer):
    """One or more numcodecs filters in a row: ``steps`` makes them for the data at hand."""

    needs = "numcodecs"

    def __init__(self) -> None:
        self.numcodecs = _import_numcodecs()
        self.numcodecs.blosc.set_nthreads(1)

    @abc.abstractmethod
    def steps(self, x: Floats) -> list[Any]:
        """Return the filters, first to last."""

    def encode(self, x: Floats) -> Any:
        steps = self.steps(x)
        coded: Any = x
        for step in steps:
            coded = step.encode(coded)
        return coded, steps

    def decode(self, coded: Any, n: int) -> Floats:
        data, steps = coded
        for step in reversed(steps):
            data = step.decode(data)
        return np.frombuffer(data, np.float32) if isinstance(data, bytes) else data.view(np.float32)

    def nbytes(self, coded: Any) -> int:
        return memoryview(coded[0]).nbytes

    def _blosc(self, name: str) -> Any:
        return self.numcodecs.Blosc(cname=name, clevel=5, shuffle=self.numcodecs.Blosc.SHUFFLE)


class BloscLz4(_Numcodecs):
    name = "numcodecs Blosc lz4, shuffle"
    family = "exact"

    def steps(self, x: Floats) -> list[Any]:
        return [self._blosc("lz4")]


class BloscZstd(_Numcodecs):
    name = "numcodecs Blosc zstd, shuffle"
    family = "exact"

    def steps(self, x: Floats) -> list[Any]:
        return [self._blosc("zstd")]


class FixedScaleOffset8(_Numcodecs):
    """Rounding to 8 bits with one scale for all values."""

    name = "numcodecs FixedScaleOffset int8"
    family = "integer"

    def steps(self, x: Floats) -> list[Any]:
        scale = 127 / max(float(x.max()), -float(x.min()), 1e-30)
        return [self.numcodecs.FixedScaleOffset(offset=0, scale=scale, dtype="f4", astype="i1")]


class Quantize3(_Numcodecs):
    """Rounding with an absolute error below 10^-3, then Blosc, without which it saves nothing."""

    name = "numcodecs Quantize 3 digits, Blosc zstd"
    family = "error-bounded"

    def steps(self, x: Floats) -> list[Any]:
        return [self.numcodecs.Quantize(digits=3, dtype="f4"), self._blosc("zstd")]


class BitRound7(_Numcodecs):
    """Rounding to 7 bits of the mantissa, as bfloat16 has, then Blosc, without which it saves nothing."""

    name = "numcodecs BitRound 7, Blosc zstd"
    family = "cast"

    def steps(self, x: Floats) -> list[Any]:
        return [self.numcodecs.BitRound(keepbits=7), self._blosc("zstd")]


def _import_numcodecs() -> Any:
    """Import numcodecs, whose 0.16 cannot read the version of a zfpy from a post release: it gets the plain one."""
    found = importlib.metadata.version

    def plain(package: str) -> str:
        return found(package).partition(".post")[0]

    importlib.metadata.version = plain
    try:
        import numcodecs  # noqa: PLC0415
        import numcodecs.blosc  # noqa: PLC0415
    finally:
        importlib.metadata.version = found
    return numcodecs


PEERS: list[type[Peer]] = [
    TorchInt8,
    TorchSign,
    TorchFloat16,
    TorchBFloat16,
    TorchTopK,
    Zfpy,
    Zstandard,
    HivemindUniform8,
    HivemindBlockwise8,
    HivemindFloat16,
    BloscLz4,
    BloscZstd,
    FixedScaleOffset8,
    Quantize3,
    BitRound7,
]

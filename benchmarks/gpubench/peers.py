"""Peers of the device codecs: torch's own operations on the GPU, and nvCOMP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Encode = Callable[[Any], Any]
Decode = Callable[[Any], Any]


def torch_peers() -> dict[str, tuple[str, Encode, Decode]]:
    """Return by name our codec with the same result, and the peer's encode and decode of a float32 CUDA tensor."""
    import torch  # noqa: PLC0415  (only on a GPU)

    def blocks(x: Any, limit: int) -> tuple[Any, Any]:
        rows = x.view(-1, 128)
        peak = rows.abs().amax(1, keepdim=True)
        return (rows * (limit / peak)).round_().to(torch.int8), peak / limit

    def int4(x: Any) -> tuple[Any, Any]:
        q, scale = blocks(x, 7)
        return (q[:, :64] & 15) | (q[:, 64:] << 4), scale

    def from_int4(coded: tuple[Any, Any]) -> Any:
        q, scale = coded
        low = (q << 4) >> 4
        return (torch.cat((low, q >> 4), 1).float() * scale).view(-1)

    powers = 2 ** torch.arange(8, device="cuda", dtype=torch.uint8)

    def sign(x: Any) -> tuple[Any, Any]:
        rows = x.view(-1, 1024)
        bits = (rows < 0).view(-1, 8).to(torch.uint8)
        return (bits * powers).sum(1, dtype=torch.uint8), rows.abs().mean(1, keepdim=True)

    def from_sign(coded: tuple[Any, Any]) -> Any:
        bits, mean = coded
        signs = 1 - 2 * ((bits.unsqueeze(1) & powers) != 0).float()
        return (signs.view(-1, 1024) * mean).view(-1)

    def fp8(x: Any) -> tuple[Any, Any]:
        rows = x.view(-1, 128)
        scale = rows.abs().amax(1, keepdim=True) / 448
        return (rows / scale).to(torch.float8_e4m3fn), scale

    def topk(x: Any) -> tuple[Any, Any, int]:
        places = x.abs().topk(max(1, x.numel() // 100)).indices
        return places, x[places], x.numel()

    def threshold(x: Any) -> tuple[Any, Any, int]:
        places = (x.abs() >= 2.5758).nonzero().view(-1)
        return places, x[places], x.numel()

    def scattered(coded: tuple[Any, Any, int]) -> Any:
        places, values, n = coded
        return torch.zeros(n, device="cuda").index_copy_(0, places, values)

    def scaled(coded: tuple[Any, Any]) -> Any:
        return (coded[0].float() * coded[1]).view(-1)

    return {
        "torch int8, blocks of 128": ("int8", lambda x: blocks(x, 127), scaled),
        "torch int4, blocks of 128": ("int4", int4, from_int4),
        "torch sign, blocks of 1024": ("sign", sign, from_sign),
        "torch float8_e4m3fn, blocks of 128": ("fp8:e4m3", fp8, scaled),
        "torch topk 1 %": ("topk:ratio=0.01", topk, scattered),
        "torch threshold": ("threshold:abs=2.5758", threshold, scattered),
        "torch .to(float16)": ("fp16", lambda x: x.half(), lambda h: h.float()),
    }


def nvcomp_peers() -> dict[str, tuple[str, Encode, Decode]]:
    """Return nvCOMP's lossless codecs of the same bytes; none if nvCOMP is not installed, or incomplete."""
    try:
        from nvidia import nvcomp  # noqa: PLC0415  (only on a GPU)
    except ImportError as error:
        print(f"# nvCOMP is not measured: {error}")
        return {}

    def peer(algorithm: str) -> tuple[Encode, Decode]:
        @functools.cache  # made when first used, so that an error counts as the peer's own
        def codec() -> Any:
            return nvcomp.Codec(algorithm=algorithm, cuda_stream=torch.cuda.current_stream().cuda_stream or 1)

        return lambda x: codec().encode(nvcomp.as_array(x)), lambda coded: codec().decode(coded)

    import torch  # noqa: PLC0415  (only on a GPU)

    names = ("LZ4", "Snappy", "Zstd", "Bitcomp", "Cascaded", "ANS")
    beside = {"Zstd": "lossless", "Bitcomp": "mpc", "Cascaded": "mpc"}
    return {f"nvCOMP {name}": (beside.get(name, "lossless"), *peer(name)) for name in names}

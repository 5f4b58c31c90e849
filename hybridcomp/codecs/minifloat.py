"""``fp8``, ``mxfp8`` and ``mxfp4``: floating-point numbers of 8 or 4 bits in blocks that share a scale.

The element formats are those of OCP's "8-bit Floating Point Specification (OFP8)" 1.0 and "Microscaling Formats
(MX) Specification" 1.0: E4M3 (to 448, no infinity), E5M2 (to 57344) and E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6).

*   ``fp8``: a block's scale is its largest magnitude over the format's largest number, a float32. An element x
    becomes x * (largest number / largest magnitude), rounded to nearest even.
*   ``mxfp8``, ``mxfp4``: blocks of 32; the scale is 2^(floor(log2(largest magnitude)) - e), with e the exponent
    of the format's largest number (8, 15 and 2), stored as E8M0: a byte s for 2^(s - 127). An element becomes
    x / scale, rounded to nearest even; a result beyond the largest number becomes the largest number.

An element decodes to its number times the scale, in float32. Doubles are rounded to float32 first. A block that
holds NaN, infinity or a magnitude beyond float32 decodes to NaN throughout (its scale is NaN: 255 in E8M0); a
block whose largest magnitude is below 2^-90 decodes to zeros (its scale is the byte 0 or 0.0), which keeps
denormal numbers, and processor modes that flush them, out of the arithmetic.

Payload: uint32 block (32 for MX), uint32 format (0 E4M3, 1 E5M2, 2 E2M1), a scale per block (float32, or a
byte), then the elements: a byte each, or for E2M1 two in a byte, element 2j in the low half of byte j.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hybridcomp import arrays
from hybridcomp.arrays import DType
from hybridcomp.codecs import checks
from hybridcomp.codecs.kernel_codec import KernelCodec
from hybridcomp.codecs.quantize import MAX_BLOCK
from hybridcomp.codecs.table import register
from hybridcomp.wire import HEADER_BYTES

_PREFIX_BYTES = 8
MX_BLOCK = 32


class _MinifloatCodec(KernelCodec):
    """Base class of the three formats: the layout, and everything but the parameters."""

    bits: ClassVar[int] = 8
    mx: ClassVar[bool]
    carries_values = True

    def __init__(self, format: str, block: int) -> None:
        self._format = format
        self._block = block

    def bound(self, n: int, dtype: arrays.DTypeLike = DType.FLOAT32) -> int:
        scales = -(-n // self._block) * (1 if self.mx else 4)
        return HEADER_BYTES + _PREFIX_BYTES + scales + (n * self.bits + 7) // 8


def _format8(value: Any) -> str:
    if value not in ("e4m3", "e5m2"):
        raise ValueError(f"format must be 'e4m3' or 'e5m2', not {value!r}")
    return str(value)


@register
class Float8Codec(_MinifloatCodec):
    """Codec of 8-bit floats: relative L2 error about 2.6 % (E4M3) or 5.1 % (E5M2) on Gaussian data.

    Args:
        format: ``"e4m3"``, the more precise, or ``"e5m2"``, the wider.
        block: elements that share a scale; a multiple of 8 from 8 to 65536.
    """

    name = "fp8"
    wire_id = 7
    examples = (
        "fp8",
        "fp8:e5m2,block=24",
        "fp8:e4m3,block=65536",
    )
    mx = False

    def __init__(self, format: str = "e4m3", block: int = 128) -> None:
        super().__init__(_format8(format), checks.integer("block", block, 8, MAX_BLOCK, step=8))

    @property
    def format(self) -> str:
        """Return the elements' format."""
        return self._format

    @property
    def block(self) -> int:
        """Return the number of elements that share a scale."""
        return self._block

    @property
    def params(self) -> dict[str, Any]:
        return {"format": self._format, "block": self._block}


@register
class MXFP8Codec(_MinifloatCodec):
    """OCP MXFP8, 8.25 bits an element: scales are powers of two, so exact, and data of few bits stay exact.

    Args:
        format: ``"e4m3"``, the more precise, or ``"e5m2"``, the wider.
    """

    name = "mxfp8"
    wire_id = 8
    examples = (
        "mxfp8",
        "mxfp8:e5m2",
    )
    mx = True

    def __init__(self, format: str = "e4m3") -> None:
        super().__init__(_format8(format), MX_BLOCK)

    @property
    def format(self) -> str:
        """Return the elements' format."""
        return self._format

    @property
    def params(self) -> dict[str, Any]:
        return {"format": self._format}


@register
class MXFP4Codec(_MinifloatCodec):
    """OCP MXFP4, 4.25 bits an element: E2M1 with scales that are powers of two."""

    name = "mxfp4"
    wire_id = 9
    bits = 4
    mx = True

    def __init__(self) -> None:
        super().__init__("e2m1", MX_BLOCK)

    @property
    def params(self) -> dict[str, Any]:
        return {}

"""Codecs to measure, their promises about errors, and the speeds that were asked for.

A promise is checked before a speed is printed. A codec without a row here is measured with its defaults, and promises
what its class says: every bit if it is lossless.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridcomp.codecs import Codec, get_codec, own_names


@dataclass(frozen=True)
class Expect:
    """Promises about decode(encode(x)); a field that is None promises nothing.

    Attributes:
        exact: every bit comes back, on every data set.
        l2: largest relative L2 error on Gaussian data.
        peak: largest error of an element relative to the largest magnitude, on every data set.
        absolute: largest error of an element, on every data set.
        span: largest error of an element relative to the range of the values, on every data set.
        kept: each element is the input's, bit for bit, or zero, on every data set.
        ratio: the share of elements that is sent is 0.8 to 1.25 times this, on every data set.
    """

    exact: bool = False
    l2: float | None = None
    peak: float | None = None
    absolute: float | None = None
    span: float | None = None
    kept: bool = False
    ratio: float | None = None


@dataclass(frozen=True)
class Entry:
    """A codec to measure.

    Attributes:
        spec: spec string, as the results name it.
        family: group that it is shown in.
        expect: promises about its error.
        by_tensor: whether data that came as tensors (gradients) is encoded tensor by tensor, each in its shape.
    """

    spec: str
    family: str
    expect: Expect
    by_tensor: bool = False

    def codec(self) -> Codec:
        return get_codec(self.spec)


_ROWS = [
    Entry("none", "exact", Expect(exact=True)),
    Entry("lossless", "exact", Expect(exact=True)),
    Entry("mpc", "exact", Expect(exact=True)),
    Entry("exponent", "exact", Expect(exact=True)),
    Entry("fp16", "cast", Expect(l2=3e-4, peak=2**-11)),
    Entry("bf16", "cast", Expect(l2=2e-3, peak=2**-8)),
    Entry("int8", "integer", Expect(l2=0.0075, peak=1 / 253)),
    Entry("int8:rounding=stochastic", "integer", Expect(l2=0.012, peak=1 / 126)),
    Entry("int4", "integer", Expect(l2=0.13, peak=1 / 13.9)),
    Entry("int4:rounding=stochastic", "integer", Expect(l2=0.18, peak=1 / 6.9)),
    Entry("int4:hadamard=true", "integer", Expect(l2=0.13)),
    Entry("int2", "integer", Expect(l2=0.8, peak=0.501)),
    Entry("int2:symmetric=false", "integer", Expect(l2=0.6, peak=0.34)),
    Entry("sign", "integer", Expect(l2=0.61)),
    Entry("fp8:e4m3", "small float", Expect(l2=0.03, peak=2**-4)),
    Entry("fp8:e5m2", "small float", Expect(l2=0.06, peak=2**-3)),
    Entry("mxfp8", "small float", Expect(l2=0.04, peak=2**-3)),
    Entry("mxfp4", "small float", Expect(l2=0.15, peak=2**-2)),
    Entry("zfp:rate=8", "error-bounded", Expect(l2=0.06)),
    Entry("zfp:rate=16", "error-bounded", Expect(l2=3e-4)),
    Entry("bounded:abs=1e-3", "error-bounded", Expect(absolute=1e-3)),
    Entry("bounded:rel=1e-3", "error-bounded", Expect(span=1e-3)),
    Entry("bounded:abs=1e-3,coder=lz", "error-bounded", Expect(absolute=1e-3)),
    Entry("bounded:abs=1e-3,coder=huffman", "error-bounded", Expect(absolute=1e-3)),
    Entry("topk:ratio=0.01", "sparse", Expect(kept=True)),
    Entry("topk:ratio=0.01,values=bf16", "sparse", Expect(l2=1.0)),
    Entry("threshold:abs=2.5758", "sparse", Expect(kept=True)),  # 1 % of Gaussian values
    Entry("threshold:rel=3.0", "sparse", Expect(kept=True)),
    Entry("sidco:ratio=0.01", "sparse", Expect(kept=True, ratio=0.01)),
    Entry("sidco:ratio=0.001", "sparse", Expect(kept=True, ratio=0.001)),
    Entry("randomblock", "sparse", Expect(kept=True)),
    Entry("powersgd:rank=4", "low rank", Expect(l2=1.0), by_tensor=True),
    Entry("lattice:bits=8", "homomorphic", Expect(peak=1 / 253)),
    Entry("sketch", "homomorphic", Expect(exact=True)),
]
_THERE = {entry.codec().name for entry in _ROWS}
ENTRIES = [
    *_ROWS,
    *(
        Entry(name, "other", Expect(exact=get_codec(name).lossless))
        for name in own_names()
        if name not in _THERE
    ),
]


MEMCPY = "memcpy"


@dataclass(frozen=True)
class Asked:
    """A speed that was asked for, at 64 MiB of float32 on one thread.

    Attributes:
        spec: spec of the codec.
        operation: ``encode``, ``decode`` or ``decode_add``.
        times: least ratio of its speed to that of ``than``.
        than: memcpy of the input, a peer's name, or the instruction set with which it is compared.
        isas: instruction sets for which it was asked.
    """

    spec: str
    operation: str
    times: float
    than: str = MEMCPY
    isas: tuple[str, ...] = ("avx512", "avx2")


def _each(specs: str, operations: str, times: float, than: str = MEMCPY, *isas: str) -> list[Asked]:
    return [
        Asked(spec, operation, times, than, isas or Asked.isas)
        for spec in specs.split()
        for operation in operations.split()
    ]


ASKED = [
    *_each("int8 int4 int2 sign", "encode decode_add", 1.3),
    *_each("fp16 bf16", "encode decode_add", 1.0),
    *_each("fp8:e4m3 fp8:e5m2 mxfp8 mxfp4", "encode decode_add", 0.7),
    *_each("threshold:abs=2.5758 threshold:rel=3.0", "encode", 1.0),
    *_each("sidco:ratio=0.01 sidco:ratio=0.001", "encode", 0.9),
    *_each("topk:ratio=0.01", "encode", 0.7),
    *_each("topk:ratio=0.01", "encode", 20, "torch topk 1 %"),
    *_each("zfp:rate=8", "encode decode", 3, "zfpy rate 8"),
    *_each("mpc", "encode decode", 0.15),
    *_each("bounded:abs=1e-3 bounded:rel=1e-3", "encode decode", 0.25),
    *_each(
        "mpc zfp:rate=8 bounded:abs=1e-3 bounded:rel=1e-3", "encode decode decode_add", 0.5, "avx512", "avx2"
    ),
    *_each("exponent", "encode", 0.6),
    *_each("exponent", "decode", 0.8),
]


LARGEST_FALL = 0.25
"""Part by which a ratio may be smaller at another size or dtype than at 16 Mi float32."""


def find(specs: list[str]) -> list[Entry]:
    """Return the entries of these specs: those of :data:`ENTRIES`, and others.

    Raises:
        ValueError: a spec makes no codec.
    """
    known = {entry.codec().spec: entry for entry in ENTRIES}
    codecs = [get_codec(spec) for spec in specs]
    others = [
        Entry(spec, "other", Expect(exact=codec.lossless)) for spec, codec in zip(specs, codecs, strict=True)
    ]
    return [known.get(codec.spec, other) for codec, other in zip(codecs, others, strict=True)]

"""Write the golden messages: ``python -m tests.golden.make``.

Run it only for a new codec or a new version of the format: what is there already must stay as it is, since it
stands for the messages that other versions wrote. Existing entries are kept; new ones are added.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import hybridcomp as hc
from hybridcomp.arrays import DType, Flat

FILE = Path(__file__).with_name("messages.json")
SPECS = [
    "none",
    "fp16",
    "bf16",
    "int8:block=8",
    "int8:block=128",
    "int4:block=8",
    "int4:block=16",
    "int4:block=16:rounding=stochastic:seed=9",
    "int2:block=8",
    "int2:block=16:symmetric=false",
    "int8:block=8:symmetric=false:rounding=stochastic",
    "int8:block=16:hadamard=true:seed=3",
    "sign:block=8",
    "sign:block=24",
    "lossless",
    "mpc",
    "mpc:lag=3",
    "exponent",
    "fp8:e4m3,block=8",
    "fp8:e5m2,block=16",
    "mxfp8:e4m3",
    "mxfp8:e5m2",
    "mxfp4",
    "bounded:abs=0.1",
    "bounded:rel=0.01",
    "bounded:abs=0.1,coder=lz,vector=5",
    "bounded:abs=0.3,coder=huffman",
    "topk:ratio=0.1",
    "topk:ratio=0.9,values=bf16",
    "topk:ratio=0.3,values=(int8:block=8)",
    "threshold:abs=1.5",
    "threshold:rel=0.75,values=(int8:block=8)",
    "sidco:ratio=0.25",
    "sidco:ratio=0.3,values=bf16,stages=2",
    "sidco:ratio=0.2,stages=3,fit=pareto",
    "powersgd:rank=1",
    "powersgd:rank=2,seed=5",
    "zfp:rate=4",
    "zfp:rate=8",
    "zfp:rate=13.75",
    "randomblock:ratio=0.3,seed=1",
    "randomblock:ratio=0.5,values=bf16",
    "lattice:bits=8",
    "lattice:bits=16,ranks=4",
    "lattice:bits=32",
    "lattice:bits=8,rounding=stochastic,seed=9",
    "sketch",
]
DTYPES = [DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16]
COUNTS = [0, 1, 13, 35]
LONG = {
    "exponent": 300,  # less than a block of 256 is stored as it is
    "bounded:abs=0.1,coder=lz,vector=5": 600,  # rows come again
    "bounded:abs=0.3,coder=huffman": 300,  # a table pays
}


def counts(spec: str) -> list[int]:
    """Return the numbers of elements of a codec's messages."""
    return [*COUNTS, LONG[spec]] if spec in LONG else COUNTS


def values(n: int, dtype: DType) -> np.ndarray:
    """Return small dyadic numbers of both signs, exact in every type; stored as ``dtype.storage``."""
    exact = np.array([((i * 37 + 11) % 101 - 50) / 16 for i in range(n)], np.float32)
    if dtype is DType.BFLOAT16:
        return (exact.view(np.uint32) >> 16).astype(np.uint16)
    return exact.astype(dtype.storage)


def message(spec: str, data: np.ndarray, dtype: DType) -> bytes:
    """Return the message of flat storage."""
    codec = hc.get_codec(spec)
    out = np.empty(codec.bound(data.size, dtype), np.uint8)
    return out[: codec.encode_flat(Flat(data, dtype, data.shape, True, False), out)].tobytes()


def main() -> None:
    """Add the entries that the file lacks."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    for spec in SPECS:
        for dtype in DTYPES:
            for n in counts(spec):
                key = f"{spec} {dtype.label} {n}"
                if key in known:
                    continue
                data = values(n, dtype)
                encoded = message(spec, data, dtype)
                decoded = np.empty(n, np.float64)
                hc.decode(encoded, out=decoded)
                known[key] = {"message": encoded.hex(), "decoded": decoded.tobytes().hex()}
    FILE.write_text(json.dumps(known, indent=0) + "\n")


if __name__ == "__main__":
    main()

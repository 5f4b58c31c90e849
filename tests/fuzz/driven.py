"""Module that driver.cpp imports: the target without CRC, on the kernels that were built for it.

``python -m tests.fuzz.driven DIR`` writes the seeds into a corpus directory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import hybridcomp as hc
from hybridcomp import native, wire
from hybridcomp.codecs import own_names
from tests.fuzz import kernels, target
from tests.golden import make

MAGIC = wire.MAGIC.to_bytes(4, "little")


def mend(data: bytes) -> bytes:
    """Make a header of the first 32 bytes that leads on to a decoder.

    Magic and payload length are set, flags cleared, the codec is one that exists, the count mostly small: a
    fuzzer that had to find these by itself would find little else. Byte 6 chooses the instruction set, byte 7
    whether the count stays as it is.
    """
    if len(data) < wire.HEADER_BYTES:
        return data
    header = bytearray(data[: wire.HEADER_BYTES])
    chosen = available[header[6] % len(available)]
    if extension.isa() != chosen:
        extension.set_isa(chosen)
    if header[7] % 8:
        header[11:16] = bytes(5)
    header[:4] = MAGIC
    if header[4] not in ids:
        header[4] = ids[header[4] % len(ids)]
    header[5] = header[5] % 16
    header[6:8] = bytes(2)
    header[16:24] = (len(data) - wire.HEADER_BYTES).to_bytes(8, "little")
    return bytes(header) + data[wire.HEADER_BYTES :]


def one_input(data: bytes) -> None:
    """Run the target on an input of the driver's."""
    target.one_input(mend(data))


def write_seeds(corpus: Path) -> None:
    """Write the golden messages, and longer ones of random values."""
    corpus.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(target.seeds()):
        (corpus / f"golden-{i}").write_bytes(seed)
    rng = np.random.default_rng(0)
    for i, spec in enumerate(make.SPECS):
        for n in (130, 700):
            x = rng.standard_normal(n).astype(np.float32)
            x[rng.random(n) < 0.5] = 0
            (corpus / f"random-{i}-{n}").write_bytes(hc.get_codec(spec).encode(x).tobytes())


if __name__ == "__main__":
    write_seeds(Path(sys.argv[1]))
else:
    kernels.load()
    extension = native.kernels()
    available = extension.available_isas()
    ids = sorted(hc.get_codec(name).wire_id for name in own_names())
    target.without_crc().__enter__()

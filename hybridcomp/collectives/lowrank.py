"""All-reduce of matrices by a linear codec (PowerSGD, Vogels, Karimireddy and Jaggi 2019, 1905.13727).

1. P = (M + residual) Q with the Q of the last call (seeded at first); P is summed over all ranks, exactly.
2. P is orthonormalised; Q = (M + residual)^T P is summed over all ranks, exactly.
3. The result is P Q^T; the residual is what it lost of this rank's M.
"""

from __future__ import annotations

import numpy as np

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import get_codec
from hybridcomp.codecs import powersgd as low
from hybridcomp.collectives.allreduce import allreduce
from hybridcomp.collectives.carry import Array, Carrier, narrow, widen
from hybridcomp.collectives.engine import Steps


def lowrank_allreduce(
    carrier: Carrier,
    send: Flat,
    recv: Flat,
    tags: tuple[int, int, int, int],
    *,
    mean: bool,
    residual: Array | None,
    warm: dict[str, Array],
    name: str | None,
) -> Steps:
    """Sum ``send`` over all ranks into ``recv`` at low rank.

    Args:
        carrier: a ``powersgd`` codec, transport and statistics.
        send, recv: the same dtype and shape, two or more dims; the matrix is (first dim, the rest).
        tags: two for P, two for Q.
        mean: divide the sum by the number of ranks.
        residual: error-feedback memory in float32, updated in place.
        warm: Q by name, kept between calls; updated if ``name`` is given.
        name: of the parameter.

    Raises:
        WireError, MismatchError: from a peer's message.
    """
    t, codec = carrier.transport, carrier.codec
    assert isinstance(codec, low.PowerSGDCodec)
    rows = recv.shape[0]
    matrix = widen(send.data, send.dtype).astype(np.float32, copy=False).reshape(rows, -1)
    cols = matrix.shape[1]
    rank = min(codec.rank, rows, cols)
    exact = Carrier(t, get_codec("none"), DType.FLOAT32, carrier.call)
    with carrier.call.encoding():
        if residual is not None:
            matrix += residual.reshape(matrix.shape)
        q = warm.get(name) if name is not None else None
        if q is None or q.shape != (cols, rank):
            q = low.initial_q(cols, rank, codec.seed)
        p = low.start(matrix, q)
    yield from allreduce(exact, _flat(p), _flat(p), (tags[0], tags[1]))
    with carrier.call.encoding():
        low.orthogonalize(p)
        q = low.finish(matrix, p)
    yield from allreduce(exact, _flat(q), _flat(q), (tags[2], tags[3]), mean=True)
    with carrier.call.decoding():
        out = np.empty_like(matrix)
        low.reconstruct(p, q, out)
        if residual is not None:
            matrix -= out
            if np.isfinite(matrix).all():
                residual[:] = matrix.reshape(-1)
        if name is not None and np.isfinite(q).all():
            warm[name] = q
        if not mean:
            out *= t.size
        recv.data[:] = narrow(out.reshape(-1).astype(recv.dtype.accumulator.storage, copy=False), recv.dtype)


def _flat(x: Array) -> Flat:
    data = x.reshape(-1)
    assert data.base is not None
    return Flat(data, DType.FLOAT32, data.shape, True, False)

"""PowerSGD for the matrices of a bucket (Vogels, Karimireddy and Jaggi 2019, 1905.13727), all in two exchanges.

1. M = gradient + residual, P = M Q with the Q of the last step (seeded at first); every P is summed over all ranks
   in one exchange, in which uncompressed parameters ride along.
2. P is orthonormalised; Q = M^T P is averaged in a second exchange.
3. The result is P Q^T, the same on all ranks; the residual is what it lost of this rank's M.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybridcomp.codecs import powersgd
from hybridcomp.torch.exchange import Exact
from hybridcomp.torch.hook_plan import Piece

Array = npt.NDArray[Any]


class LowRank:
    """One matrix on its way."""

    def __init__(
        self, piece: Piece, values: Array, residual: Array | None, factors: dict[str, Array]
    ) -> None:
        """Prepare to average a matrix.

        Args:
            piece: whose codec is a ``powersgd``.
            values: 1-D float32, replaced by the result.
            residual: of the same size, updated in place; None for no feedback.
            factors: Q of the last step by parameter name; updated.
        """
        codec = piece.choice.codec
        assert isinstance(codec, powersgd.PowerSGDCodec)
        self._values, self._residual, self._factors, self._name = values, residual, factors, piece.name
        self._matrix = values.reshape(piece.shape[0], -1)
        rows, cols = self._matrix.shape
        if residual is not None:
            self._matrix = self._matrix + residual.reshape(rows, cols)
        rank = min(codec.rank, rows, cols)
        q = factors.get(piece.name)
        if q is None or q.shape != (cols, rank):
            q = powersgd.initial_q(cols, rank, codec.seed)
        self._p = powersgd.start(self._matrix, q)
        self._q = q

    def first(self, rank: int, size: int) -> Exact:
        """P, to be summed."""
        return Exact(torch.from_numpy(self._p).view(-1), rank, size, mean=False)

    def second(self, rank: int, size: int) -> Exact:
        """Q, to be averaged, once P has been summed."""
        powersgd.orthogonalize(self._p)
        self._q = powersgd.finish(self._matrix, self._p)
        return Exact(torch.from_numpy(self._q).view(-1), rank, size, mean=True)

    def end(self) -> None:
        """Write the result; keep Q and the residual unless the step is not finite."""
        out = self._values.reshape(self._matrix.shape)
        with np.errstate(invalid="ignore"):
            if self._residual is None:
                powersgd.reconstruct(self._p, self._q, out)
            else:
                matrix = self._matrix
                powersgd.reconstruct(self._p, self._q, out)
                matrix -= out
                if np.isfinite(matrix).all():
                    self._residual[:] = matrix.reshape(-1)
        if np.isfinite(self._q).all():
            self._factors[self._name] = self._q

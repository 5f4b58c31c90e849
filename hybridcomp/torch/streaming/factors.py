"""Stream the gradient of one weight into two thin factors, and apply the part of it that they give.

A linear layer has the gradient G = D^T A of its weight (m x n), of inputs A (B x n) and gradients D (B x m) of outputs.
Streaming batch PCA (Huang, Hoskins, Daniels, Stiles, Adam 2020, "Memory-efficient training with streaming
dimensionality reduction", arXiv 2004.12041) never forms G: from A and D, which the backward pass has anyway, it
accumulates products with bases of k columns. Here, with orthonormal L (m x k) and R (n x k) of the step before:

1.  P += D^T (A R) and Q += A^T (D L), in each backward pass; so P = G R and Q = G^T L.
2.  P and Q are averaged over the ranks. Both are linear in G: they become those of the mean gradient.
3.  W -= lr * H with H = L Q^T + (I - L L^T) P R^T, applied as one product of m x 2k and 2k x n factors.
4.  L = orth(P) and R = orth(Q): one step of a power iteration from either side.

H is G without (I - L L^T) G (I - R R^T): the projection of G onto the tangent space, at L R^T, of the matrices of rank
k (as Koch and Lubich 2007, "Dynamical low-rank approximation", have it). So H is the nearest to G that P, Q and the
bases can tell exactly; <H, G> = |H|^2, which makes -H a direction of descent whatever the bases are; and it takes no
inverse, which noise could make large. Where G does not change, L and R go to its singular vectors, by the ratio of the
singular values k + 1 and k in each step, and H to the best approximation of rank k. With k = min(m, n) a basis is
complete, and H is G.

Why not L of the same step, L = orth(mean of P), and then Q for the update L Q^T, as PowerSGD has it? That L is known
only when all micro-batches and ranks are done: A and D of all of them would have to be kept until then, which is more
than G where a batch has more than m n / (m + n) rows, and a second exchange would follow the first. L Q^T alone, with
L of the step before, would lose what is new in G's columns: G R R^T, which P has, is in H.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

_CHUNK = 1 << 16  # elements of a weight of fewer bits that are updated in the factors' precision at once


class Factors:
    """The factors of one weight's gradient, and the bases that they are taken by.

    Attributes:
        weight: m x n.
        rank: k, at most min(m, n).
        left: L, m x k, orthonormal columns; of the step before.
        right: R, n x k, the same.
        averaged: whether P and Q are those of all ranks, to which nothing may be added.
    """

    def __init__(self, name: str, weight: Tensor, rank: int, dtype: torch.dtype) -> None:
        """Draw the bases by the weight's name, alike on all ranks.

        Args:
            name: name of the weight.
            weight: floating-point matrix.
            rank: columns of the bases; less where the weight has fewer rows or columns.
            dtype: dtype of bases and factors, float32 or float64.
        """
        rows, columns = weight.shape
        self.name = name
        self.weight = weight
        self.rank = min(rank, rows, columns)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        self.left, self.right = (
            _orthonormal(torch.randn(size, self.rank, generator=generator, dtype=torch.float64)).to(
                weight.device, dtype
            )
            for size in (rows, columns)
        )
        self.averaged = False
        self._p, self._q = torch.zeros_like(self.left), torch.zeros_like(self.right)

    def keep_in(self, p: Tensor, q: Tensor) -> None:
        """Keep P and Q in tensors of their shapes, which are zero."""
        self._p, self._q = p, q

    @torch.no_grad()
    def accumulate(self, inputs: Tensor, gradients: Tensor) -> None:
        """Add a batch's part of P and Q.

        Args:
            inputs: A, B x n.
            gradients: D, B x m.

        Raises:
            RuntimeError: the factors have been averaged, and neither applied nor dropped.
        """
        if self.averaged:
            raise RuntimeError(
                f"a backward pass through the layer of {self.name} came after its factors were averaged: call step() "
                "or zero_grad() of the optimizer of streamed weights before it"
            )
        a, d = inputs.to(self.left.dtype), gradients.to(self.left.dtype)
        with torch.autocast(a.device.type, enabled=False):  # a backward pass may be called within it
            self._p.addmm_(d.T, a @ self.right)
            self._q.addmm_(a.T, d @ self.left)

    def square_parts(self) -> tuple[Tensor, Tensor]:
        """Return two matrices, orthogonal parts of H but for bases, whose squares add up to |H|^2."""
        return self._q, self._across()

    def gradient(self) -> tuple[Tensor, Tensor]:
        """Return H as X Y^T: X, m x 2k, and Y, n x 2k."""
        return torch.cat([self.left, self._across()], 1), torch.cat([self._q, self.right], 1)

    def _across(self) -> Tensor:
        """Compute (I - L L^T) P."""
        return self._p - self.left @ (self.left.T @ self._p)

    @torch.no_grad()
    def apply(self, rate: float, decay: float) -> None:
        """Update the weight: W = (1 - decay) W - rate H."""
        if decay:
            self.weight.mul_(1 - decay)
        x, y = self.gradient()
        if self.weight.dtype == x.dtype:
            self.weight.addmm_(x, y.T, alpha=-rate)
            return
        step = max(1, _CHUNK // self.weight.shape[1])
        for rows, part in zip(torch.split(self.weight, step), torch.split(x, step), strict=True):
            rows.copy_(rows.to(x.dtype).addmm_(part, y.T, alpha=-rate))

    @torch.no_grad()
    def advance(self) -> None:
        """Take the bases of the next step from P and Q; where one is complete, it has all of G, and both stay."""
        if self.rank == min(self.weight.shape):
            return
        self.left.copy_(_orthonormal(self._p))
        self.right.copy_(_orthonormal(self._q))


def _orthonormal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of a space that has the matrix's columns; any, where they are fewer than its own."""
    basis: Tensor = torch.linalg.qr(matrix)[0]
    return basis

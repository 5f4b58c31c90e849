"""Define the learned linear autoencoder that makes short codes of the values that tensor parallelism sums.

Bian, Li, Wang, Xing and Venkataraman, "Does Compressing Activations Help Model Parallel Training?" (MLSys 2024,
arXiv:2301.02654), the method AE: an encoder (h to d) and a decoder (d to h), which are trained with the model. Both are
linear, so the sum of the ranks' codes is the code of the sum, and d values are sent in the place of h.
"""

from __future__ import annotations

from torch import Tensor, nn


class Autoencoder(nn.Module):
    """Linear map from the residual stream's width to itself, through fewer values.

    It begins as the projection onto a random subspace.

    Attributes:
        encode: map to codes, which are summed over tp.
        decode: map from the sum of codes.
    """

    def __init__(self, width: int, codes: int) -> None:
        """Make the matrices.

        Args:
            width: width h.
            codes: number of codes d, at most h.
        """
        super().__init__()
        self.encode = nn.Linear(width, codes, bias=False)
        self.decode = nn.Linear(codes, width, bias=False)

    def begin(self) -> None:
        """Draw the subspace from PyTorch's default generator."""
        nn.init.orthogonal_(self.encode.weight)
        self.decode.weight.data.copy_(self.encode.weight.T)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., h] to the same shape."""
        return self.decode(self.encode(x))  # type: ignore[no-any-return]

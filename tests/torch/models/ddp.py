"""Models and reference gradients for the parallel cases."""

import torch
from torch import nn

WIDTH = 64


class Block(nn.Module):
    """A residual MLP block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def model(blocks: int = 4) -> nn.Sequential:
    """Return the same weights on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def batch(n: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of all data-parallel ranks together."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(n, WIDTH, generator=generator), torch.randn(n, WIDTH, generator=generator)


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error."""
    return ((out - target) ** 2).mean()


def reference_gradients(rows: int = 16) -> dict[str, torch.Tensor]:
    """Return the gradients that one process computes for the whole batch."""
    whole = model()
    x, y = batch(rows)
    loss_of(whole(x), y).backward()
    return {name: p.grad for name, p in whole.named_parameters()}


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative L2 error."""
    return ((got - expected).norm() / expected.norm()).item()


def assert_near(got: dict[str, torch.Tensor], tolerance: float, rows: int = 16) -> None:
    """Compare gradients with the reference's."""
    expected = reference_gradients(rows)
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        error = relative_error(grad, expected[name])
        assert error <= tolerance, (name, error)

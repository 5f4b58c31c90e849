"""Element types of the collectives' benchmarks: how an array of each is stored, and handed to the measured calls.

NumPy has no bfloat16: such an array holds the bits as int16, and is handed on as a torch tensor over the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TYPES = ("bfloat16", "float16", "float32", "float64")
_ROUNDING = {"bfloat16": 3e-2, "float16": 1e-2, "float32": 1e-5, "float64": 1e-12}


@dataclass(frozen=True)
class Elements:
    """An element type.

    Attributes:
        name: one of :data:`TYPES`.
    """

    name: str

    @property
    def storage(self) -> np.dtype:
        """Dtype of the arrays."""
        return np.dtype(np.int16 if self.name == "bfloat16" else self.name)

    @property
    def rounding(self) -> float:
        """Largest relative error of a sum, for each of its terms."""
        return _ROUNDING[self.name]

    @property
    def nan(self) -> Any:
        """A NaN as an element of an array."""
        return np.int16(0x7FC0) if self.name == "bfloat16" else np.nan

    def of(self, values: NDArray[np.float32]) -> NDArray:
        """Return float32 values as an array of this type."""
        if self.name != "bfloat16":
            return values.astype(self.storage)
        import torch  # noqa: PLC0415

        return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()

    def wide(self, array: NDArray) -> NDArray[np.float64]:
        """Return the values of an array in float64."""
        if self.name != "bfloat16":
            return array.astype(np.float64)
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def handed(self, array: NDArray) -> Any:
        """Return the array itself, or a torch tensor over it where NumPy lacks the type."""
        return self.tensor(array) if self.name == "bfloat16" else array

    def tensor(self, array: NDArray) -> Any:
        """Return a torch tensor over the same memory."""
        import torch  # noqa: PLC0415

        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if self.name == "bfloat16" else tensor

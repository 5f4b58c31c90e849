"""Train linear layers by streamed gradients, and all other parameters by AdamW.

The method is the streaming batch PCA of Huang et al. 2020 (arXiv 2004.12041), as
:func:`hybridcomp.torch.stream_linear` has it: replicas sum factors in the place of these layers' gradients, and the
weights take SGD's steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from hybridcomp.torch.streaming import StreamedLayers
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.optimizer.optimizers import learning_rate, set_learning_rate
from hybridcomp_lab.train.optimizer.update import Updater
from hybridcomp_lab.train.topology import Topology


class StreamedUpdater(Updater):
    """AdamW for parameters whose gradients are formed, SGD for streamed weights; one norm clips both.

    Args:
        streamed: layers with streamed gradients.
        parameters: parameters of the model, by name.
        config, topology, traffic, stop_requested: see :class:`Updater`.
    """

    def __init__(
        self,
        streamed: StreamedLayers,
        parameters: Mapping[str, nn.Parameter],
        config: TrainConfig,
        topology: Topology,
        traffic: Callable[[], Tensor],
        stop_requested: Callable[[], bool],
    ) -> None:
        weights = {name: parameters[name] for name in streamed.weights}
        formed = {name: p for name, p in parameters.items() if name not in weights}
        super().__init__(formed, frozenset(), config, topology, traffic, stop_requested, whole=weights)
        self._streamed = streamed
        self._scale = config.stream_lr / config.lr
        # Divide by the scale, so that weights decay as AdamW's do, at whatever rate their gradients are taken.
        decay = config.weight_decay / self._scale
        self._sgd = streamed.optimizer(lr=config.stream_lr, weight_decay=decay)

    def complete_gradients(self) -> None:
        """Complete gradients, see :class:`Updater`; then average the factors over the replicas."""
        super().complete_gradients()
        self._streamed.average()

    def square_sums(self) -> tuple[float, float, float]:
        """Return sums of squares, see :class:`Updater`; those of streamed gradients come from their factors."""
        split, shared, apart = super().square_sums()
        return split, shared + self._streamed.square_sum(), apart

    def apply(self, step: int, norm: float) -> None:
        """See :class:`Updater`."""
        super().apply(step, norm)
        if not math.isfinite(norm):
            self._streamed.zero()
            return
        if self._config.clip and norm > self._config.clip:
            self._streamed.scale_(self._config.clip / norm)
        set_learning_rate(self._sgd, self._scale * learning_rate(self._config, step))
        self._sgd.step()

    def held_bytes(self) -> int:
        """See :class:`Updater`."""
        return super().held_bytes() + self._streamed.nbytes

    def sizes(self) -> dict[str, int]:
        """See :class:`Updater`."""
        return super().sizes() | {name: weight.numel() for name, weight in self.whole.items()}

    def resume(self, step: int) -> None:
        """See :class:`Updater`; a run under another policy has not loaded the count of averages."""
        self._streamed.resume(step)

    def state(self) -> dict[str, Tensor]:
        """Return the bases, see :class:`Updater`."""
        sides = {name: self._sgd.state[weight] for name, weight in self.whole.items()}
        return {
            f"stream.{name}.{side}": basis for name, both in sides.items() for side, basis in both.items()
        }

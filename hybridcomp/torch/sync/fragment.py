"""Synchronise one fragment of a model: send how its parameters have changed, and update the global values."""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import nn

from hybridcomp.errors import HybridcompError
from hybridcomp.torch.flat import real_shape, views
from hybridcomp.torch.hook.averager import Averager, Named
from hybridcomp.torch.hook.operations import Averaging
from hybridcomp.torch.replicas import local_of
from hybridcomp.torch.sync.cutting import Parameters


class Fragment:
    """A fragment of the model on this replica, and the global values that all replicas have agreed on.

    Its steps are those of an outer step: :meth:`start`, then, at once or some inner steps later, :meth:`update`.

    Attributes:
        number: its place among the fragments.
        parameters: parameters of this replica, by name.
        globals: values of which all replicas have the same bits, by name, in float32 (float64 where a parameter is
            that; complex ones as pairs of these). They have the parameters' shapes on this rank, and lie in one array,
            complex ones first.
        differences: for each parameter, after a start the global value less this replica's own; once averaged, the
            mean of that over the replicas: the outer gradient.
        under_way: whether it was started, and its update is to come.
    """

    def __init__(self, number: int, parameters: Parameters, averager: Averager) -> None:
        """Copy the parameters as they are.

        Args:
            number: number of the fragment.
            parameters: parameters by name.
            averager: averager of the replicas.

        Raises:
            ValueError: the parameters are on several devices.
        """
        self.number = number
        self.parameters = parameters
        self.under_way = False
        self._averager = averager
        self._averaging: Averaging | None = None
        complex_first = sorted(parameters.items(), key=lambda item: not item[1].is_complex())
        locals_ = {name: local_of(parameter) for name, parameter in complex_first}
        devices = {tensor.device for tensor in locals_.values()}
        if len(devices) > 1:
            raise ValueError(
                f"the parameters of a fragment are on one device, not on {', '.join(sorted(map(str, devices)))}: "
                "give fragments= modules of one device each"
            )
        double = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in locals_.values())
        self._shapes: Named = [(name, real_shape(tensor)) for name, tensor in locals_.items()]
        size = sum(math.prod(shape) for _, shape in self._shapes)
        values = torch.empty(size, dtype=torch.float64 if double else torch.float32, device=devices.pop())
        self._buffer = torch.zeros_like(values)
        globals_ = map(nn.Parameter, views(values, locals_.values()))
        self.globals = dict(zip(locals_, globals_, strict=True))
        self.differences = dict(zip(locals_, views(self._buffer, locals_.values()), strict=True))
        self.agree()

    @torch.no_grad()
    def agree(self) -> None:
        """Take the parameters as they are for the global values."""
        for name, value in self.globals.items():
            value.copy_(local_of(self.parameters[name]))

    @torch.no_grad()
    def start(self, step: int, weight: float = 1.0) -> None:
        """Start to average how the parameters have changed since the last update, over the replicas.

        Args:
            step: number of the fragment's outer step, for a policy's warm-up.
            weight: weight of this replica in the average; those of all replicas have the mean 1.
        """
        for name, difference in self.differences.items():
            difference.copy_(self.globals[name]).sub_(local_of(self.parameters[name]))
        if weight != 1:
            self._buffer *= weight
        self.under_way = True
        self._averaging = self._averager.average(self._buffer, lambda: self._shapes, self.number, step)
        self._averager.flush()

    def arrive(self) -> None:
        """Wait for the mean over the replicas, if it is still to come.

        Raises:
            CollectiveTimeoutError: a replica did not start it in time.
            HybridcompError: the average failed, here or on another replica.
        """
        if self._averaging is not None:
            self._averaging.wait()
            self._averaging = None

    def drop(self) -> None:
        """Wait for the average under way, and drop it, however it ended: another state takes its place."""
        with suppress(HybridcompError):
            self.arrive()  # until it has ended it writes into the differences
        self._averaging = None
        self.under_way = False

    def update(self, outer: torch.optim.Optimizer, alpha: float) -> None:
        """Update the global values by the outer gradient, and this replica's parameters by those.

        Args:
            outer: optimizer of the global values; it leaves those of other fragments, which have no gradients, alone.
            alpha: the share that this replica keeps of its own values.

        Raises:
            HybridcompError: see :meth:`arrive`; nothing is changed then.
        """
        self.arrive()
        for name, value in self.globals.items():
            value.grad = self.differences[name]
        outer.step()
        for value in self.globals.values():
            value.grad = None
        self._end(alpha)

    def replace(self) -> None:
        """Make the mean of the replicas' parameters the global values and the parameters; no optimizer has a part."""
        self.arrive()
        with torch.no_grad():
            for name, value in self.globals.items():
                value.sub_(self.differences[name])
        self._end(0.0)

    @torch.no_grad()
    def _end(self, alpha: float) -> None:
        for name, value in self.globals.items():
            mine = local_of(self.parameters[name])
            mine.copy_(torch.lerp(value, mine.to(value.dtype), alpha) if alpha else value)
        self.under_way = False

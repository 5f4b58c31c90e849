"""The fixtures of the tests of devices."""

from tests.mpi.device.hook_sides import hook_comm, sides

__all__ = ["hook_comm", "sides"]

"""Predict MPI's own operations, which carry uncompressed messages."""

from __future__ import annotations

from hybridcomp.perfmodel.curves import bus_factor
from hybridcomp.perfmodel.profile import Profile
from hybridcomp.perfmodel.terms import FP32, Setting

MPI = "mpi"  # stands in the place of an algorithm's name
_EXCHANGES = ("all_gather", "all_to_all", "broadcast")
# Bytes from which on MPI does not sum 16-bit types: hybridcomp.collectives.operations.flat_reductions.
_OWN_HALF = 1 << 16


def carried_by_mpi(setting: Setting) -> bool:
    """Tell whether MPI's own operation runs in a setting, and none of our algorithms.

    It does wherever nothing is compressed, but for all-reduces of the compiled engine and large sums of 16-bit types.
    """
    if setting.codec.name != "none":
        return False
    if setting.op in _EXCHANGES:
        return True
    if setting.itemsize < FP32 and setting.nbytes >= _OWN_HALF:
        return False
    return setting.op == "reduce_scatter" or (setting.op == "all_reduce" and not setting.compiled)


def measured_seconds(profile: Profile, setting: Setting) -> float | None:
    """Return the seconds of MPI's own operation by its curve; None where the profile has none for these ranks.

    Curves of sums were measured on fp32, and hold for it alone.
    """
    known = profile.mpi
    if known is None or (known.hosts, known.ranks) != (setting.hosts, setting.ranks):
        return None
    if setting.op not in known.of or (setting.op not in _EXCHANGES and setting.itemsize != FP32):
        return None
    return known.of[setting.op].seconds(setting.nbytes, bus_factor(setting.op, setting.ranks))

"""Predict the cost of a message: a profile of links and codecs, and a model of the algorithms on it."""

from __future__ import annotations

from hybridcomp.perfmodel.curves import Curve, MpiCurves
from hybridcomp.perfmodel.load import load_profile, wanted_path
from hybridcomp.perfmodel.model import algorithms, choose, chunk_bytes, predict, spares_network
from hybridcomp.perfmodel.mpi import carried_by_mpi
from hybridcomp.perfmodel.profile import BUILT_IN, Profile, Speed, Tier
from hybridcomp.perfmodel.terms import Setting

__all__ = [
    "Profile",
    "Tier",
    "Speed",
    "Curve",
    "MpiCurves",
    "BUILT_IN",
    "load_profile",
    "wanted_path",
    "Setting",
    "carried_by_mpi",
    "algorithms",
    "choose",
    "chunk_bytes",
    "predict",
    "spares_network",
]

"""Predict the cost of a message: a profile of links and codecs, and a model of the algorithms on it."""

from __future__ import annotations

from hybridcomp.perfmodel.load import load_profile, wanted_path
from hybridcomp.perfmodel.model import algorithms, choose, chunk_bytes, predict
from hybridcomp.perfmodel.profile import BUILT_IN, Profile, Speed, Tier
from hybridcomp.perfmodel.terms import Setting

__all__ = [
    "Profile",
    "Tier",
    "Speed",
    "BUILT_IN",
    "load_profile",
    "wanted_path",
    "Setting",
    "algorithms",
    "choose",
    "chunk_bytes",
    "predict",
]

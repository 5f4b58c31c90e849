"""Specs that every check takes, of the codecs' own examples, and the checks of :mod:`hybridcomp.testing`."""

from __future__ import annotations

from hybridcomp.codecs import get_codec, own_names
from hybridcomp.testing import (
    FLOATS,
    SIZES,
    Array,
    accumulator,
    bits,
    check_config,
    check_hostile,
    check_isas_agree,
    check_message,
    check_non_finite,
    check_rejects,
    check_round_trip,
    gaussian,
    isa,
    isas,
    relative_error,
    reseal,
    torch,
    wide,
    with_specials,
)

__all__ = [
    "FLOATS",
    "SIZES",
    "SPECS",
    "Array",
    "accumulator",
    "bits",
    "check_config",
    "check_hostile",
    "check_isas_agree",
    "check_message",
    "check_non_finite",
    "check_rejects",
    "check_round_trip",
    "gaussian",
    "isa",
    "isas",
    "relative_error",
    "reseal",
    "torch",
    "wide",
    "with_specials",
]

SPECS = [spec for name in own_names() for spec in type(get_codec(name)).examples or (name,)]

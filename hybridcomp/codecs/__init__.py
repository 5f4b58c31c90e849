"""Codecs: one file each; the contract in :mod:`.base`, names and wire ids in :mod:`.table`, specs: :mod:`.registry`."""

from __future__ import annotations

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.bounded import BoundedCodec
from hybridcomp.codecs.cast import BFloat16Codec, Float16Codec
from hybridcomp.codecs.exponent import ExponentCodec
from hybridcomp.codecs.feedback.error_feedback import ErrorFeedback
from hybridcomp.codecs.feedback.forms import FORMS, Form, parse_form
from hybridcomp.codecs.feedback.memory import Memory
from hybridcomp.codecs.feedback.resharding import reshard
from hybridcomp.codecs.linear.base import LinearCodec
from hybridcomp.codecs.linear.lattice import LatticeCodec
from hybridcomp.codecs.linear.powersgd import PowerSGDCodec
from hybridcomp.codecs.linear.randomblock import RandomBlockCodec
from hybridcomp.codecs.linear.sketch import SketchCodec
from hybridcomp.codecs.lossless import LosslessCodec
from hybridcomp.codecs.minifloat import Float8Codec, MXFP4Codec, MXFP8Codec
from hybridcomp.codecs.mpc import MPCCodec
from hybridcomp.codecs.none import NoneCodec
from hybridcomp.codecs.numpy_codec import NumpyCodec
from hybridcomp.codecs.quantize import Int2Codec, Int4Codec, Int8Codec
from hybridcomp.codecs.registry import decode, decode_add, get_codec, parse_spec
from hybridcomp.codecs.sign import SignCodec
from hybridcomp.codecs.sparse.sidco import SIDCoCodec
from hybridcomp.codecs.sparse.threshold import ThresholdCodec
from hybridcomp.codecs.sparse.topk import TopKCodec
from hybridcomp.codecs.table import codec_for, names, own_names, register, register_codec
from hybridcomp.codecs.zfp import ZfpCodec

__all__ = [
    "Codec",
    "NumpyCodec",
    "LinearCodec",
    "ErrorFeedback",
    "FORMS",
    "Form",
    "Memory",
    "parse_form",
    "reshard",
    "get_codec",
    "decode",
    "decode_add",
    "names",
    "own_names",
    "register",
    "register_codec",
    "codec_for",
    "parse_spec",
    "NoneCodec",
    "Float16Codec",
    "BFloat16Codec",
    "Int8Codec",
    "Int4Codec",
    "Int2Codec",
    "SignCodec",
    "LosslessCodec",
    "MPCCodec",
    "ExponentCodec",
    "Float8Codec",
    "MXFP8Codec",
    "MXFP4Codec",
    "ZfpCodec",
    "BoundedCodec",
    "TopKCodec",
    "RandomBlockCodec",
    "ThresholdCodec",
    "SIDCoCodec",
    "PowerSGDCodec",
    "LatticeCodec",
    "SketchCodec",
]

"""Names, spec strings and wire ids."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.codecs import names, parse_spec, register
from hybridcomp.codecs.none import NoneCodec
from tests.codecs import common


@pytest.mark.parametrize(
    ("text", "name", "params"),
    [
        ("int8", "int8", {}),
        (" int8 : block = 64 ", "int8", {"block": 64}),
        ("topk:ratio=0.01,values=bf16", "topk", {"ratio": 0.01, "values": "bf16"}),
        ("topk:values=(int8:block=64),ratio=1e-3", "topk", {"values": "int8:block=64", "ratio": 0.001}),
        ("x:e4m3:block=64", "x", {"": "e4m3", "block": 64}),
        ("x:a=true:b=false:c=-3", "x", {"a": True, "b": False, "c": -3}),
    ],
)
def test_spec_strings(text, name, params):
    assert parse_spec(text) == (name, params)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":block=8",
        "int8:",
        "int8:block=8:block",
        "int8:block=",
        "int8:=8",
        "int8:block=8:block=8",
        "a:b=(c",
        "a:b=c)",
    ],
)
def test_malformed_specs(text):
    with pytest.raises(ValueError, match="malformed codec spec"):
        hc.get_codec(text)


def test_unknown_codecs_and_parameters():
    with pytest.raises(
        hc.UnknownCodecError, match=r"unknown codec 'int9' \(did you mean 'int[842]'\?\); known: bf16"
    ):
        hc.get_codec("int9")
    with pytest.raises(ValueError, match="codec 'int8' has no parameter 'blok'; it takes block"):
        hc.get_codec("int8:blok=8")
    assert hc.get_codec("int8:64") == hc.get_codec("int8:block=64")
    with pytest.raises(ValueError, match="malformed codec spec"):
        hc.get_codec("int8:64:block=8")
    with pytest.raises(ValueError, match="it takes none"):
        hc.get_codec("fp16:8")
    with pytest.raises(ValueError, match="it takes none"):
        hc.get_codec("fp16:block=8")
    with pytest.raises(ValueError, match="go with a codec's name"):
        hc.get_codec(hc.get_codec("int8"), block=8)


def test_keywords_win():
    assert hc.get_codec("int8:block=64", block=32).spec == "int8:block=32"


def test_names_and_ids_are_taken_once():
    for attributes in (
        {"name": "none", "wire_id": 120},
        {"name": "other", "wire_id": 0},
        {"name": "x", "wire_id": 128},
    ):
        with pytest.raises(ValueError, match="taken or out of range"):
            register(type("Other", (NoneCodec,), attributes))
    assert "other" not in names()


def test_unknown_wire_id():
    msg = hc.get_codec("none").encode(np.zeros(3, np.float32))
    msg[4] = 250
    with pytest.raises(hc.WireError, match="unknown codec id 250"):
        hc.decode(common.reseal(msg))

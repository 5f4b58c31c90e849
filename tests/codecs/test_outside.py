"""Codecs of other packages: registered by hand or by an entry point; what is said where one is missing or broken."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.codecs import NoneCodec, names, own_names, table
from hybridcomp.perfmodel.profile import BUILT_IN, Profile, Speed
from hybridcomp.policy.auto.candidates import every
from hybridcomp.policy.auto.freeze import to_toml
from hybridcomp.policy.auto.spec import CLASSES
from hybridcomp.policy.toml import parse_policy
from tests.codecs import common
from tests.outside import CODEC, codec_package, install, installed

X = np.linspace(-3, 3, 1000, dtype=np.float32)


def codec(name="acme.plain", wire_id=240, cls="Plain", module="acme"):
    """Return a new class of a codec."""
    scope = {"__name__": module}
    exec(CODEC.format(cls=cls, name=name, wire_id=wire_id), scope)
    return scope[cls]


def test_a_codec_is_registered_by_hand():
    with installed():
        cls = hc.register_codec(codec())
        assert hc.register_codec(cls) is cls
        made = hc.get_codec("acme.plain")
        np.testing.assert_array_equal(hc.decode(made.encode(X)), X)
        assert "acme.plain" in names()
        assert hc.load_policy("acme.plain").packages == ("module acme",)
        again = hc.register_codec(codec(wire_id=241))  # a cell of a notebook, run again
        assert type(hc.get_codec("acme.plain")) is again
        with pytest.raises(hc.WireError, match=r"unknown codec id 240"):
            hc.decode(made.encode(X))
    with pytest.raises(hc.UnknownCodecError):
        hc.get_codec("acme.plain")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"wire_id": 127}, "the wire id of the codec 'acme.plain' must be from 128 to 255, not '127'"),
        ({"wire_id": 256}, "from 128 to 255"),
        ({"wire_id": True}, "from 128 to 255, not 'True'"),
        (
            {"name": "int8"},
            "the name 'int8' of a codec of module acme is that of the codec 'int8' of hybridcomp",
        ),
        (
            {"name": "Acme\x1b[2J"},
            r"the name of a codec must be of lower-case letters .*; not 'Acme\\x1b\[2J'",
        ),
        ({"name": "acme.toml"}, "not end in .toml"),
        ({"name": "a" * 65}, "at most 64 characters"),
        ({"name": None}, "not 'None'"),
    ],
)
def test_what_cannot_be_registered(attributes, message):
    with installed(), pytest.raises(ValueError, match=message):
        hc.register_codec(type("Other", (codec(),), {"__module__": "acme", **attributes}))


def test_two_codecs_of_one_id_or_name():
    with installed():
        hc.register_codec(codec())
        with pytest.raises(
            ValueError, match=r"wire id 240 of a codec of module other is that .* of module acme"
        ):
            hc.register_codec(codec("other.plain", module="other"))
        with pytest.raises(ValueError, match=r"name 'acme.plain' of a codec of module other is that"):
            hc.register_codec(codec(wire_id=241, module="other"))


def test_what_is_no_codec():
    with pytest.raises(TypeError, match=r"a codec is a class that derives from hybridcomp.codecs.base.Codec"):
        hc.register_codec(int)
    with pytest.raises(
        TypeError, match=r"lacks the methods of a codec: bound, check_payload, decode_add_flat"
    ):
        hc.register_codec(type("Empty", (hc.Codec,), {"name": "acme.plain", "wire_id": 240}))


def test_an_entry_point_is_found_by_name_and_by_id(tmp_path):
    folder = codec_package(tmp_path, "acme-codecs", "acme.plain", 240)
    with installed(folder):
        assert "acme.plain" in names()
        assert "acme.plain" not in own_names()
        assert "acme_codecs" not in sys.modules, "listing names has imported the package"
        msg = hc.get_codec("acme.plain").encode(X)
        assert hc.load_policy("acme.plain").packages == ("acme-codecs 1.0",)
        (tmp_path / "policy.toml").write_text(
            '[dp]\nall_reduce = { codec = "acme.plain", feedback = "ef" }\n'
        )
        assert hc.load_policy(tmp_path / "policy.toml").packages == ("acme-codecs 1.0",)
        assert hc.load_policy("topk:ratio=0.01").packages == ()
    with installed(folder):
        np.testing.assert_array_equal(hc.decode(msg), X)
    with pytest.raises(hc.WireError, match=r"unknown codec id 240: it is of a package other than hybridcomp"):
        hc.decode(msg)


def test_versions_of_a_package_make_other_policies(tmp_path):
    digests = set()
    for version in ("1.0", "1.1"):
        with installed(codec_package(tmp_path / version, "acme-codecs", "acme.plain", 240, version)):
            digests.add(hc.load_policy("acme.plain").digest)
    assert len(digests) == 2


def test_a_missing_package_is_named():
    with pytest.raises(
        hc.UnknownCodecError, match=r"example.ternary is a codec of the package 'hybridcomp-example'"
    ):
        hc.get_codec("example.ternary")
    with pytest.raises(
        hc.PolicyError, match=r"as a codec it would be of a package 'acme', which is not installed"
    ):
        hc.load_policy("acme.plain:block=8")
    msg = hc.get_codec("none").encode(X)
    msg[4] = 128
    with pytest.raises(hc.WireError, match=r"'example.ternary' of the package 'hybridcomp-example' has it"):
        hc.decode(common.reseal(msg))


BROKEN = {
    "no module": ("", "ModuleNotFoundError: No module named 'acme_codecs'"),
    "raises": ("raise RuntimeError('\\x1b[31mno license')", r"RuntimeError: \\x1b\[31mno license"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "no such class": ("x = 1", "has no attribute 'Plain'"),
    "no codec": ("class Plain:\n    name = 'acme.plain'", "a codec is a class that derives from"),
    "another name": (CODEC.format(cls="Plain", name="acme.other", wire_id=240), "has the name 'acme.other'"),
    "an id of ours": (CODEC.format(cls="Plain", name="acme.plain", wire_id=3), "must be from 128 to 255"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_package_breaks_nothing_else(tmp_path, kind):
    text, message = BROKEN[kind]
    points = "[hybridcomp.codecs]\nacme.plain = acme_codecs:Plain\n"
    broken = install(
        tmp_path / "broken", "acme-codecs", "1.0", points, {"acme_codecs": text} if text else None
    )
    good = codec_package(tmp_path / "good", "good", "good.plain", 241)
    with installed(broken, good):
        for attempt in (hc.get_codec, hc.load_policy):
            with pytest.raises(
                hc.ConfigError, match=f"the package acme-codecs 1.0 offers 'acme.plain' .*{message}"
            ):
                attempt("acme.plain")
        msg = hc.get_codec("good.plain").encode(X)
        assert hc.get_codec("int8").name == "int8"
    with installed(broken, good):
        np.testing.assert_array_equal(hc.decode(msg), X)  # an unknown id has every package asked
        msg[4] = 250
        with pytest.raises(
            hc.WireError, match=r"unknown codec id 250: .*; the package acme-codecs 1.0 offers"
        ):
            hc.decode(common.reseal(msg))


def test_packages_that_offer_the_same(tmp_path):
    first = codec_package(tmp_path / "a", "acme-codecs", "acme.plain", 240)
    second = codec_package(tmp_path / "b", "other-codecs", "acme.plain", 241)
    with (
        installed(first, second),
        pytest.raises(hc.ConfigError, match=r"acme-codecs 1.0 and other-codecs 1.0 both"),
    ):
        hc.get_codec("acme.plain")
    second = codec_package(tmp_path / "c", "other-codecs", "other.plain", 240)
    with installed(first, second):
        hc.get_codec("acme.plain")
        with pytest.raises(hc.ConfigError, match=r"wire id 240 .* of other-codecs 1.0 .* of acme-codecs 1.0"):
            hc.get_codec("other.plain")
    earlier = codec_package(
        tmp_path / "d", "acme_codecs", "acme.plain", 242, "2.0"
    )  # the same package, found first
    with installed(earlier, first):
        assert hc.load_policy("acme.plain").packages == ("acme_codecs 2.0",)


def test_damaged_metadata_is_passed_over(tmp_path):
    wrong = install(tmp_path / "wrong", "wrong", "1.0", "[hybridcomp.codecs]\nthis is no entry point\n")
    odd = install(
        tmp_path / "odd", "odd", "1.0", "[hybridcomp.codecs]\n\x1b[2J = odd:Plain\nx.toml = odd:Plain\n"
    )
    (tmp_path / "bytes" / "bytes-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "bytes" / "bytes-1.0.dist-info" / "entry_points.txt").write_bytes(
        b"[hybridcomp.codecs]\n\xff\xfe"
    )
    good = codec_package(tmp_path / "good", "good", "good.plain", 241)
    with installed(wrong, odd, tmp_path / "bytes", good):
        assert set(names()) == {*own_names(), "good.plain"}
        assert hc.get_codec("good.plain").wire_id == 241
        with pytest.raises(hc.UnknownCodecError) as raised:
            hc.get_codec("wrong.plain")
        told = str(raised.value)
    for part in ("wrong-1.0.dist-info cannot be", "bytes-1.0.dist-info cannot be", "odd 1.0 offers 'x.toml'"):
        assert part in told
    assert told.isprintable()


def test_auto_chooses_among_other_codecs(tmp_path):
    with installed(codec_package(tmp_path, "acme-codecs", "acme.plain", 240)):
        policy = hc.load_policy("auto:dp=safe,also=(zfp:rate=16),also=acme.plain")
        assert [c.spec for c in policy.auto.also] == ["zfp:rate=16", "acme.plain"]
        assert policy.packages == ("acme-codecs 1.0",)
        assert policy.digest != hc.load_policy("auto:dp=safe").digest
        found = {kind: {c.name for c in every(kind, policy.auto.also)} for kind in CLASSES}
        assert found["aggressive"] - {"int4", "powersgd"} == {"exponent", "bf16", "int8", "zfp", "acme.plain"}
        assert found["safe"] == {"exponent", "bf16", "int8"}
        type(policy.auto.also[1]).safe = True
        assert "acme.plain" in {c.name for c in every("safe", (*policy.auto.also, NoneCodec()))}
        written = to_toml(policy.auto, policy.written, [])
        assert parse_policy(written, "frozen.toml").auto.also == policy.auto.also
    with pytest.raises(
        hc.PolicyError, match=r"unknown codec 'acme.plain'; as a codec it would be of a package 'acme'"
    ):
        parse_policy(written, "frozen.toml")
    for wrong in ("auto:also=int9", "auto:also=zfp,also=zfp:rate=8", "auto:also=(int8"):
        with pytest.raises(hc.PolicyError, match="also"):
            hc.load_policy(wrong)


def test_a_profile_with_a_codec_of_a_package_that_is_missing(tmp_path):
    folder = codec_package(tmp_path, "acme-codecs", "acme.plain", 240)
    text = '[codecs."acme.plain"]\nencode = 1e9\ndecode = 2e9\nadd = 3e9\noverhead = 1e-6\nsize = 1.0\n'
    profile = Profile.from_bytes(f"version = 1\n{text}".encode())
    assert "acme.plain" in profile.codecs
    with installed(folder):
        assert profile.speed(hc.get_codec("acme.plain")).decode == 2e9


def test_a_class_says_its_speed():
    with installed():
        cls = codec()
        cls.speed = (0.5, 0.25, 0.125, 7, 0.9)
        hc.register_codec(cls)
        assert BUILT_IN.speed(cls()) == Speed(0.5e9, 0.25e9, 0.125e9, 7e-6, 0.9)
        assert BUILT_IN.speed(hc.get_codec("zfp:rate=7")) == BUILT_IN.codecs["zfp:rate=8"]


def test_metadata_is_read_only_where_a_name_is_unknown():
    code = """
import sys, hybridcomp as hc, numpy as np
hc.decode(hc.get_codec("int8").encode(np.ones(9, "float32")))
hc.load_policy("hybrid"); hc.load_policy("auto"); hc.load_policy("int4")
assert "importlib.metadata" not in sys.modules
try:
    hc.get_codec("int9")
except hc.UnknownCodecError:
    assert "importlib.metadata" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_claimed_ids_are_of_the_kept_range():
    assert all(wire_id in range(128, 240) for wire_id in table.CLAIMED)
    claimed = [name for _, name in table.CLAIMED.values()]
    assert len(set(claimed)) == len(claimed)

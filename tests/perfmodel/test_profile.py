"""Profiles: their file, what is wrong with one, and the link that each speed is of."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridcomp import ConfigError, get_codec
from hybridcomp.perfmodel import (
    BUILT_IN,
    Curve,
    MpiCurves,
    Profile,
    Speed,
    Tier,
    load,
    load_profile,
    wanted_path,
)
from hybridcomp.perfmodel.curves import OPERATIONS
from hybridcomp.perfmodel.profile import MAX_BYTES

NUMBERS = st.floats(1e-12, 1e18)
OPTIONAL = st.just(0.0) | NUMBERS
TIERS = st.builds(Tier, NUMBERS, NUMBERS, OPTIONAL, OPTIONAL)
ENDS = st.tuples(st.floats(0, 64), st.floats(0, 64)).map(sorted)
CURVES = st.builds(
    lambda rise, ends, *others: Curve(others[0], rise, *others[1:4], *ends, others[4]),
    st.floats(0, 20),
    ENDS,
    NUMBERS,
    st.floats(0, 50),
    st.floats(-64, 128),
    st.floats(-20, 20),
    NUMBERS,
)
OWN = st.builds(
    lambda ranks, of: MpiCurves(ranks[0], ranks[1], of),
    st.tuples(st.integers(1, 1 << 20), st.integers(1, 1 << 20)).map(sorted),
    st.dictionaries(st.sampled_from(OPERATIONS), CURVES),
)
SPEEDS = st.builds(Speed, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
SPECS = sorted(BUILT_IN.codecs)

GOOD = BUILT_IN.to_toml()
CURVE = "overhead = 1e-4\nL = 3\nk = 0.4\nx0 = 14\nb = 5\nln_p = 12\nsat_p = 21\nmax_bw = 1e8\n"
SPEED = "encode = 1e9\ndecode = 1e9\nadd = 1e9\noverhead = 1e-6\nsize = 0.5\n"


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Leave the machine's profile and interfaces out."""
    monkeypatch.setattr(load, "_INTERFACES", tmp_path / "net")
    monkeypatch.setattr(load, "_ADAPTERS", tmp_path / "infiniband")
    load.interface_rate.cache_clear()
    monkeypatch.delenv("HYBRIDCOMP_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@settings(max_examples=25, deadline=None)
@given(TIERS, TIERS, NUMBERS, st.dictionaries(st.sampled_from(SPECS), SPEEDS), st.none() | OWN)
def test_round_trip(host, network, memory, codecs, own):
    profile = Profile(host, network, memory, {**codecs, **BUILT_IN.codecs, **codecs}, mpi=own)
    assert Profile.from_bytes(profile.to_bytes()) == profile


def test_written_and_read_by_path_by_variable_and_from_its_place(tmp_path, monkeypatch):
    assert load_profile() == BUILT_IN
    fast = dataclasses.replace(BUILT_IN, memory=123e9)
    slow = dataclasses.replace(BUILT_IN, memory=1e9)
    fast.write(wanted_path())
    assert wanted_path() == tmp_path / "config" / "hybridcomp" / "profile.toml"
    assert load_profile() == fast
    assert load_profile().name == str(wanted_path())
    other = tmp_path / "new" / "other.toml"
    slow.write(other)
    assert load_profile(other) == slow
    monkeypatch.setenv("HYBRIDCOMP_PROFILE", str(other))
    assert load_profile() == slow
    fast.write(other)
    assert load_profile() == fast
    assert os.listdir(other.parent) == ["other.toml"]  # nothing beside it is left


def test_a_file_that_was_named_must_be_there(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"none\.toml does not exist"):
        load_profile(tmp_path / "none.toml")
    monkeypatch.setenv("HYBRIDCOMP_PROFILE", str(tmp_path))
    with pytest.raises(ConfigError, match="cannot read profile"):
        load_profile()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write profile"):
        BUILT_IN.write(tmp_path / "file" / "p.toml")


def test_what_is_left_out_is_as_built_in():
    profile = Profile.from_bytes(b"version = 1\n[network]\nlatency = 1e-3\nbandwidth = 1e6\n")
    assert profile == dataclasses.replace(BUILT_IN, network=Tier(1e-3, 1e6))


def test_the_environment_says_what_links_there_are(monkeypatch):
    monkeypatch.setenv("HYBRIDCOMP_BANDWIDTH", "25e6")
    monkeypatch.setenv("HYBRIDCOMP_BURST", "131072")
    assert load_profile().network == Tier(BUILT_IN.network.latency, 25e6, 131072.0)
    monkeypatch.delenv("HYBRIDCOMP_BANDWIDTH")
    assert load_profile().network == dataclasses.replace(BUILT_IN.network, burst=131072.0)
    monkeypatch.setenv("HYBRIDCOMP_LATENCY", "1e-4")
    monkeypatch.setenv("HYBRIDCOMP_CORES", "0.25")
    network = dataclasses.replace(BUILT_IN.network, latency=1e-4, burst=131072.0)
    assert load_profile() == dataclasses.replace(BUILT_IN, network=network, cores=0.25)
    monkeypatch.setenv("HYBRIDCOMP_CORES", "2")
    with pytest.raises(ConfigError, match="HYBRIDCOMP_CORES is '2'; allowed: a number of cores up to 1"):
        load_profile()
    monkeypatch.delenv("HYBRIDCOMP_CORES")
    monkeypatch.setenv("HYBRIDCOMP_BURST", "much")
    with pytest.raises(ConfigError, match="HYBRIDCOMP_BURST is 'much'; allowed: bytes, such as 5e5"):
        load_profile()
    monkeypatch.setenv("HYBRIDCOMP_BURST", "-1")
    with pytest.raises(ConfigError, match="HYBRIDCOMP_BURST is '-1'"):
        load_profile()


def test_the_fastest_interface_says_what_links_there_are(tmp_path, monkeypatch):
    told = {
        "net/eth0": ("speed", "1000\n"),
        "net/eth1": ("speed", "25000\n"),
        "net/down": ("speed", "-1\n"),
        "net/odd": ("speed", "fast\n"),
    }
    for folder, (name, text) in told.items():
        (tmp_path / folder / "device").mkdir(parents=True)
        (tmp_path / folder / name).write_text(text)
    (tmp_path / "net" / "silent" / "device").mkdir(parents=True)
    (tmp_path / "net" / "veth0").mkdir()  # virtual
    (tmp_path / "net" / "veth0" / "speed").write_text("40000\n")
    assert load_profile().network.bandwidth == pytest.approx(25e9 / 8 * 0.936)
    (tmp_path / "infiniband" / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    (tmp_path / "infiniband" / "mlx5_0" / "ports" / "1" / "rate").write_text("100 Gb/sec (4X EDR)\n")
    load.interface_rate.cache_clear()
    assert load_profile().network.bandwidth == pytest.approx(100e9 / 8 * 0.936)
    monkeypatch.setenv("HYBRIDCOMP_BANDWIDTH", "25e6")
    assert load_profile().network.bandwidth == 25e6


def test_a_process_without_files_left_takes_the_usual_rate(monkeypatch):
    def none_left(*_: object) -> Iterator[float]:
        raise OSError(errno.EMFILE, "Too many open files")
        yield

    monkeypatch.setattr(load, "_rates", none_left)
    assert load_profile().network == BUILT_IN.network


WRONG = [
    ("", ["version", "must be 1"]),
    ("version = 2", ["version", "must be 1, not 2", "--calibrate"]),
    ("version = true", ["version", "must be 1"]),
    ("version = 1\nspeed = 3", ["speed", "unknown", "network"]),
    ("version = 1\nmemory = 0", ["memory", "from 1e-12 to 1e+18", "not 0"]),
    ("version = 1\nmemory = -1.0", ["memory", "not -1.0"]),
    ("version = 1\nmemory = nan", ["memory", "not nan"]),
    ("version = 1\nmemory = inf", ["memory", "not inf"]),
    ("version = 1\ncores = 2", ["cores", "from 1e-12 to 1", "not 2"]),
    ("version = 1\nmemory = 1e300", ["memory"]),
    ("version = 1\nmemory = true", ["memory", "not True"]),
    ("version = 1\nmemory = '1'", ["memory", "not '1'"]),
    ("version = 1\nmemory = " + "9" * 5000, ["digits"]),
    ("version = 1\nnetwork = 3", ["network", "table of latency, bandwidth"]),
    ("version = 1\n[network]\nlatency = 1.0", ["network.bandwidth", "missing"]),
    ("version = 1\n[host]\nlatency = 1.0\nbandwidth = 1.0\nlag = 1.0", ["host.lag", "latency, bandwidth"]),
    ("version = 1\n[host]\nlatency = 1.0\nbandwidth = 0.0", ["host.bandwidth", "not 0.0"]),
    ("version = 1\n[network]\nlatency = 1.0\nbandwidth = 1.0\nburst = -1", ["network.burst", "not -1"]),
    ("version = 1\n[network]\nlatency = 1.0\nbandwidth = 1.0\nincoming = 0", ["network.incoming", "not 0"]),
    ("version = 1\nmpi = 4", ["mpi", "table of hosts, ranks"]),
    ("version = 1\n[mpi]\nranks = 4", ["mpi.hosts", "integer from 1", "not None"]),
    ("version = 1\n[mpi]\nhosts = 2.0\nranks = 4", ["mpi.hosts", "integer from 1", "not 2.0"]),
    ("version = 1\n[mpi]\nhosts = true\nranks = 4", ["mpi.hosts", "not True"]),
    ("version = 1\n[mpi]\nhosts = 8\nranks = 4", ["mpi.hosts", "at most 4", "not 8"]),
    ("version = 1\n[mpi]\nhosts = 2\nranks = 4\nsend = 1", ["mpi.send", "all_gather"]),
    ("version = 1\n[mpi]\nhosts = 2\nranks = 4\nbroadcast = 1", ["mpi.broadcast", "table of overhead"]),
    (f"version = 1\n[mpi]\nhosts = 2\nranks = 4\n[mpi.broadcast]\n{CURVE}k = 0.5", ["not TOML"]),
    (
        f"version = 1\n[mpi]\nhosts = 2\nranks = 4\n[mpi.broadcast]\n{CURVE.replace('b = 5', 'b = 400')}",
        ["mpi.broadcast.b", "from -20 to 20", "not 400"],
    ),
    (
        f"version = 1\n[mpi]\nhosts = 2\nranks = 4\n[mpi.broadcast]\n{CURVE.replace('= 12', '= 22')}",
        ["mpi.broadcast.ln_p", "at most sat_p, 21"],
    ),
    ("version = 1\ncodecs = []", ["codecs", "tables"]),
    ("version = 1\n[codecs]\nint8 = 1", ['codecs."int8"', "table of encode"]),
    (f"version = 1\n[codecs.int99]\n{SPEED}", ['codecs."int99"', "no codec", "did you mean"]),
    (f"version = 1\n[codecs.'int8:block=7']\n{SPEED}", ["int8:block=7", "block"]),
    (f"version = 1\n[codecs.'{'x' * 300}']\n{SPEED}", ["at most 200 characters"]),
    (f"version = 1\n[codecs.int8]\n{SPEED}[codecs.'int8:block=128']\n{SPEED}", ["there already"]),
    (f"version = 1\n[codecs.int8]\n{SPEED}more = 1", ['codecs."int8".more', "encode, decode, add"]),
    ("version = 1\n" + "".join(f"[codecs.'int8:block={n}']\n" for n in range(300)), ["at most 256, not 300"]),
    ("version = 1\nmemory = " + "[" * 20000, ["not TOML"]),
    ("version == 1", ["not TOML", "line 1"]),
    (" " * (MAX_BYTES + 1), ["more than 65536 bytes"]),
]


@pytest.mark.parametrize(("text", "parts"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_profile_is_named_with_its_key_and_what_is_allowed(text, parts, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    for part in (str(path), *parts):
        assert part in str(caught.value)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_profile_or_a_config_error(data):
    try:
        profile = Profile.from_bytes(data)
    except ConfigError:
        return
    assert profile == Profile.from_bytes(profile.to_bytes())


@given(st.integers(0, len(GOOD) - 1), st.characters(max_codepoint=126))
def test_a_changed_character_is_a_profile_or_a_config_error(at, character):
    try:
        profile = Profile.from_bytes((GOOD[:at] + character + GOOD[at + 1 :]).encode())
    except ConfigError:
        return
    assert 0 < profile.memory <= 1e18


def test_a_codecs_speed_is_its_own_or_its_nearest_kins():
    codecs = {
        get_codec(s).spec if s != "default" else s: Speed(i, 1, 1, 1, 1)
        for i, s in enumerate(
            ["default", "int4", "int4:rounding=stochastic", "int4:hadamard=true", "topk:ratio=0.01"], 1
        )
    }
    profile = dataclasses.replace(BUILT_IN, codecs=codecs)

    def found(spec):
        return profile.speed(get_codec(spec)).encode

    assert [found(s) for s in ("sign", "int4", "int4:rounding=stochastic")] == [1, 2, 3]
    assert found("int4:block=64") == 2
    assert found("int4:block=64,hadamard=true") == 4
    assert found("topk:ratio=0.5,values=bf16") == 5

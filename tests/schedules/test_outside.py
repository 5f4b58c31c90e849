"""Algorithms of other packages: registered by hand or by an entry point, chosen by their formula or when named."""

from __future__ import annotations

import dataclasses
import re

import pytest

import hybridcomp as hc
from hybridcomp.arrays import DType
from hybridcomp.collectives.algorithms.selection import Chooser, chooser, own_settings
from hybridcomp.errors import ConfigError
from hybridcomp.perfmodel.profile import BUILT_IN
from hybridcomp.schedules.registry import ALGORITHMS, Algorithm, find, register_algorithm
from hybridcomp.schedules.topology import Topology
from hybridcomp.testing import check_algorithm
from hybridcomp.variables import ALGORITHM
from tests.outside import EXAMPLE, POINTS, install, installed

TOPOLOGY = Topology.even(4, 1)
CODEC = hc.get_codec("int8")


@pytest.fixture
def example(tmp_path):
    """Have the example package."""
    with installed(EXAMPLE, install(tmp_path / "info", "hybridcomp-example", "1.0", POINTS)):
        yield


def algorithm(name="acme.star", module="acme", **changes):
    """Return a new algorithm of a module."""

    def build(operation, topology, rank):
        return ALGORITHMS["all_reduce"]["direct"].build(operation, topology, rank)

    build.__module__ = module
    return Algorithm(name, build, **changes)


def chosen(settings, requested=None, nbytes=1 << 20):
    """Return the name that a communicator's chooser chooses."""
    choice = chooser(TOPOLOGY, settings).choose("all_reduce", nbytes, DType.FLOAT32, CODEC, None, requested)
    return choice.algorithm.name


def test_the_example_is_right(example):
    check_algorithm("all_reduce", "example.star", most_ranks=5)


def test_a_wrong_algorithm_is_found():
    with installed():
        right = find("all_reduce", "direct").build
        register_algorithm(
            "all_reduce",
            Algorithm("acme.half", lambda o, t, r: right(dataclasses.replace(o, mean=False), t, r)),
        )
        with pytest.raises(
            AssertionError, match=r"acme.half for all_reduce of .*'mean'.* it is a schedule of"
        ):
            check_algorithm("all_reduce", "acme.half", most_ranks=2)
        register_algorithm("all_reduce", algorithm("acme.slow", formula=lambda c: float("nan")))
        with pytest.raises(ValueError, match=r"the formula of the algorithm 'acme.slow' says nan seconds"):
            check_algorithm("all_reduce", "acme.slow", most_ranks=2)
        register_algorithm("all_reduce", algorithm("acme.picky", refuses=lambda topology: "never"))
        with pytest.raises(AssertionError, match=r"acme.picky refuses 1 to 2 ranks"):
            check_algorithm("all_reduce", "acme.picky", most_ranks=2)


def test_a_formula_has_it_chosen():
    with installed():
        before = own_settings()
        register_algorithm("all_reduce", algorithm("acme.slow", formula=lambda c: 1e3))
        register_algorithm("all_reduce", algorithm("acme.asked"))
        assert chosen(own_settings()) == chosen(before)
        assert chosen(own_settings(), "acme.asked") == "acme.asked"
        register_algorithm("all_reduce", algorithm("acme.fast", formula=lambda c: 1e-9))
        assert chosen(own_settings()) == "acme.fast"
        assert chosen(before) != "acme.fast", "rank 0 has not registered it"
        told = own_settings()
    with pytest.raises(
        ConfigError, match=r"rank 0 chooses among algorithms the 'acme.fast' of module acme .* no such"
    ):
        chosen(told)


def test_names_are_found_by_entry_points(example, monkeypatch, tmp_path):
    assert "example.star" not in ALGORITHMS["all_reduce"]
    (tmp_path / "policy.toml").write_text(
        '[dp]\nall_reduce = { codec = "int8", algorithm = "example.star" }\n'
    )
    policy = hc.load_policy(tmp_path / "policy.toml")
    assert policy.packages == ("hybridcomp-example 1.0",)
    assert chosen(own_settings(), "example.star") == "example.star"
    monkeypatch.setenv(ALGORITHM.name, "all_reduce=example.star")
    assert chosen(own_settings()) == "example.star"
    assert Chooser(Topology.even(65, 1), BUILT_IN, {}).choose("all_reduce", 64, DType.FLOAT32, CODEC, None)
    with pytest.raises(ValueError, match=r"example.star' here: there are 65 ranks, more than 64"):
        Chooser(Topology.even(65, 1), BUILT_IN, {}).choose(
            "all_reduce", 64, DType.FLOAT32, CODEC, None, "example.star"
        )


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    with pytest.raises(
        ValueError, match=r"no algorithm 'acme.star'; it would be of a package 'acme', which is not"
    ):
        find("all_reduce", "acme.star")
    (tmp_path / "policy.toml").write_text('[dp]\nall_reduce = { codec = "int8", algorithm = "acme.star" }\n')
    with pytest.raises(hc.PolicyError, match=r"line 2, key dp.all_reduce: .*a package 'acme'"):
        hc.load_policy(tmp_path / "policy.toml")
    with pytest.raises(ValueError, match=r"'acme.star' here: it would be of a package 'acme'"):
        chosen(own_settings(), "acme.star")
    monkeypatch.setenv(ALGORITHM.name, "all_reduce=acme.star")
    told = own_settings()
    with pytest.raises(ConfigError, match=r"acme.star"):
        chosen(told)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('broken')", "importing 'acme_algorithms:STAR' failed with RuntimeError: broken"),
        ("STAR = 3", "'acme_algorithms:STAR' is no mapping from operations to algorithms"),
        ("STAR = {'all_reduce': 3}", "for 'all_reduce': an algorithm is a hybridcomp.schedules"),
        ("STAR = {'send': 3}", "for 'send': algorithms can be added to all_reduce, reduce_scatter, all_gather"),
    ],
)  # fmt: skip
def test_a_broken_package_breaks_nothing_else(tmp_path, text, message):
    points = "[hybridcomp.algorithms]\nacme.star = acme_algorithms:STAR\n"
    with installed(install(tmp_path, "acme", "1.0", points, {"acme_algorithms": text})):
        with pytest.raises(
            ConfigError, match=r"the package acme 1.0 offers 'acme.star' .*" + re.escape(message)
        ):
            find("all_reduce", "acme.star")
        assert find("all_reduce", "ring").name == "ring"


def test_what_cannot_be_registered():
    with installed():
        register_algorithm("all_reduce", algorithm())
        register_algorithm("all_reduce", algorithm())  # a cell of a notebook, run again
        with pytest.raises(
            ValueError, match=r"'acme.star' of an algorithm of module other is that of one of module acme"
        ):
            register_algorithm("all_reduce", algorithm(module="other"))
        with pytest.raises(
            ValueError, match=r"'ring' of an algorithm of module acme is that of one of hybridcomp"
        ):
            register_algorithm("all_reduce", algorithm("ring"))
        with pytest.raises(ValueError, match=r"the name of an algorithm must be .* not 'A\\x1b'"):
            register_algorithm("all_reduce", algorithm("A\x1b"))
        with pytest.raises(ValueError, match=r"can be added to all_reduce, .*, not to 'gather'"):
            register_algorithm("gather", algorithm())

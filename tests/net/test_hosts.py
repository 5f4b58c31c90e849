import re

import pytest

from hybridcomp.errors import ConfigError
from hybridcomp.net import Rate
from hybridcomp.net.hosts import cores_of, rates_of, slowest


@pytest.mark.parametrize(
    ("rate", "names"),
    [
        ("1gbit", ["1gbit"] * 3),
        ("1gbit,none, 200mbit", ["1gbit", "none", "200mbit"]),
        (("1gbit", None, Rate(8000)), ["1gbit", "none", "8kbit"]),
        (None, ["none"] * 3),
        (Rate(10**6), ["1mbit"] * 3),
    ],
)
def test_rates_are_one_for_all_or_one_for_each(rate: object, names: list[str]) -> None:
    assert list(map(str, rates_of(rate, 3))) == names  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cores", "found"),
    [
        (None, (None, None)),
        ("all", (None, None)),
        ("0.25", (0.25, 0.25)),
        (2, (2.0, 2.0)),
        ("all,1.5", (None, 1.5)),
        ([0.1, None], (0.1, None)),
    ],
)
def test_cores_are_one_number_for_all_or_one_for_each(cores: object, found: tuple[float | None, ...]) -> None:
    assert cores_of(cores, 2) == found  # type: ignore[arg-type]


def test_the_slowest_rate_is_a_shaped_one() -> None:
    assert slowest(rates_of("none,1gbit,200mbit", 3)) == Rate.parse("200mbit")
    assert slowest(rates_of("none", 3)) == Rate(None)


def test_a_wrong_number_of_values_says_which_is_right() -> None:
    with pytest.raises(ConfigError, match="a lab of 4 hosts takes one rate for all, or 4, not 3"):
        rates_of("1gbit,1gbit,200mbit", 4)
    with pytest.raises(ConfigError, match="a lab of 3 hosts takes one number of cores for all, or 3, not 2"):
        cores_of("1,0.5", 3)


def test_wrong_values_say_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="rate '2mb' is not understood"):
        rates_of("1gbit,2mb", 2)
    for wrong in ("0", "0.05", "-1", "nan", "inf", "half", ""):
        with pytest.raises(ConfigError, match=re.escape(f"must be a number from 0.1, or all, not {wrong!r}")):
            cores_of(wrong, 2)

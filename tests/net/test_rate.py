import pytest

from hybridcomp.errors import ConfigError
from hybridcomp.net import Rate


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("200mbit", 200_000_000),
        ("1gbit", 10**9),
        ("2.5gbit", 2_500_000_000),
        ("64kbit", 64_000),
        ("9600bit", 9600),
        (" 100MBit ", 100_000_000),
        ("none", None),
        (None, None),
    ],
)
def test_parse(text: str | None, bits: int | None) -> None:
    assert Rate.parse(text).bits_per_second == bits


@pytest.mark.parametrize("rate", ["200mbit", "1gbit", "2.5gbit", "64kbit", "9.6kbit", "none"])
def test_str_is_read_back(rate: str) -> None:
    assert str(Rate.parse(rate)) == rate


@pytest.mark.parametrize(
    "text", ["", "200", "200mb", "200mbps", "-1gbit", "1 gbit", "fast", "1e9bit", "7kbit", "0gbit"]
)
def test_wrong_rates_say_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="kbit"):
        Rate.parse(text)


@pytest.mark.parametrize("rate", ["64kbit", "200mbit", "1gbit", "10gbit"])
def test_bucket_holds_a_late_timer_tick_and_a_large_packet(rate: str) -> None:
    parsed = Rate.parse(rate)
    assert parsed.bits_per_second is not None
    assert parsed.burst_bytes >= parsed.bits_per_second / 8 * 0.004 - 1
    assert parsed.burst_bytes > 65536 + 14

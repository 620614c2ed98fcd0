import math

import pytest

from flashstudy.facts.units import format_bytes, format_interval, format_ratio, format_seconds


def test_bytes_are_decimal():
    assert format_bytes(2**30) == "1.07 GB"
    assert format_bytes(98_000_000) == "98.0 MB"
    assert format_bytes(512) == "512 B"


def test_seconds_choose_their_unit():
    assert [format_seconds(s) for s in (3e-9, 4.5e-6, 0.0123, 2.5, 864)] == [
        "3.00 ns",
        "4.50 µs",
        "12.3 ms",
        "2.50 s",
        "14.4 min",
    ]


def test_rounding_moves_up_a_unit_before_it_prints_a_thousand():
    assert format_seconds(0.9996) == "1.00 s"
    assert format_bytes(999_999) == "1.00 MB"


@pytest.mark.parametrize("ratio, text", [(2.314, "2.31×"), (0.4968, "0.497×"), (99.96, "100×"), (1.0, "1.00×")])
def test_ratios_keep_three_digits(ratio, text):
    assert format_ratio(ratio) == text


def test_intervals_show_open_ends():
    assert format_interval(2.31, 2.2, math.inf) == "2.31 [2.20, ∞]"


def test_zero_and_missing_are_not_numbers_of_some_odd_unit():
    assert (format_bytes(0), format_seconds(0.0)) == ("0 B", "0 s")
    assert format_seconds(math.nan) == format_ratio(math.inf) == "n/a"

import pandas as pd
import pytest

from flashstudy.facts.columns import COLUMNS, ROLES, check, label


def test_a_label_is_the_quantity_with_its_unit():
    assert label("bits_per_weight") == "Stored size (bits per weight)"
    assert label("time_ratio") == "Time ratio (variant / standard)"
    assert label("weight_format") == "Weight format"


def test_check_names_what_is_outside_the_vocabulary():
    with pytest.raises(ValueError, match=r"\['latency_ms'\]"):
        check(pd.DataFrame({"time_s": [1.0], "latency_ms": [1000.0]}))


def test_check_lets_the_vocabulary_pass():
    check(pd.DataFrame(columns=list(COLUMNS)))


@pytest.mark.parametrize("name", sorted(COLUMNS))
def test_a_unit_in_a_name_is_the_unit_of_its_column(name):
    suffixes = {
        "_bytes_per_s": "bytes/s",
        "_flop_per_s": "FLOP/s",
        "_bytes": "bytes",
        "_db": "dB",
        "_nats": "nats per token",
    }
    expected = next((unit for suffix, unit in suffixes.items() if name.endswith(suffix)), COLUMNS[name].unit)
    assert COLUMNS[name].unit == expected
    assert COLUMNS[name].role in ROLES


def test_an_unknown_label_is_refused():
    with pytest.raises(ValueError, match="no column 'speed'"):
        label("speed")

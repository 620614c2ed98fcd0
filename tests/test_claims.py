import math

import pandas as pd
import pytest

from flashstudy.facts import checkout, claims

PLANNED = {
    "slowdown_attribution", "task_time", "architecture_audit", "quantization_error", "activation_range",
    "long_context_quality", "mixed_precision", "quantization_aware_training", "pruning_fragmentation",
    "activation_sparsity", "memory_bandwidth", "cold_start", "length_crossover", "dynamic_batching", "layer_fusion",
    "tensor_parallelism", "hardware_adaptation", "sustained_load", "version_selection",
}  # fmt: skip


@pytest.fixture
def planted(tmp_path):
    """Loads the ledger with one cell of one claim replaced."""

    def load(claim_id: str, column: str, text: str) -> pd.DataFrame:
        ledger = pd.read_csv(checkout.data_dir() / "claims.csv", dtype=str, keep_default_na=False)
        ledger.loc[ledger.claim_id == claim_id, column] = text
        ledger.to_csv(tmp_path / "claims.csv", index=False)
        return claims.load(tmp_path / "claims.csv")

    return load


def test_the_ledger_holds_59_claims_and_one_reconstruction():
    ledger = claims.load()
    assert (ledger.article == "ours").sum() == 1
    assert len(ledger) == 60


def test_every_claim_belongs_to_a_planned_study():
    assert set(claims.load().study) == PLANNED


def test_a_mechanism_is_stated_exactly_where_it_has_a_band():
    ledger = claims.load()
    has_band = [claims.band(claim, "mechanism_here") is not None for claim in ledger.to_dict("records")]
    assert has_band == (ledger.mechanism_here != "").tolist()


def test_about_widens_the_claimed_number_by_a_tenth():
    low, high = claims.band(claims.select("task_time", ["task_minutes_flash"]).iloc[0], "as_stated")
    assert (low, high) == pytest.approx((12.96, 15.84))


def test_the_band_of_a_mechanism_is_taken_as_it_stands():
    claim = claims.select("quantization_error", ["int8_memory"]).iloc[0]
    assert claims.band(claim, "mechanism_here") == (3.8, 4.2)
    assert claims.band(claim, "as_stated") == pytest.approx((3.6, 4.4))


def test_a_blank_bound_is_an_open_end():
    slowdown = claims.select("slowdown_attribution", ["slowdown"]).iloc[0]
    assert claims.band(slowdown, "mechanism_here") == (1.05, math.inf)
    attention = claims.select("quantization_error", ["attention_error"]).iloc[0]
    assert claims.band(attention, "mechanism_here") == (-math.inf, -1.0)


def test_two_blank_bounds_leave_nothing_to_judge():
    layout = claims.select("sustained_load", ["memory_layout"]).iloc[0]
    assert claims.band(layout, "as_stated") is None


def test_about_a_negative_number_keeps_low_below_high():
    claim = {"relation": "about", "claimed_low": -2.0, "claimed_high": -2.0}
    assert claims.band(claim, "as_stated") == pytest.approx((-2.2, -1.8))


def test_select_refuses_what_the_ledger_lacks():
    with pytest.raises(ValueError, match="no claims for study 'task_tme'; the ledger has"):
        claims.select("task_tme")
    with pytest.raises(ValueError, match=r"task_time has no claims \['slowdown'\]"):
        claims.select("task_time", ["slowdown"])


@pytest.mark.parametrize(
    "column, text, message",
    [
        ("relation", "roughly", "relation 'roughly' is not one of"),
        ("as_stated_by", "guess", "as_stated_by 'guess' is not one of"),
        ("claimed_low", "2.5", "claimed_low 2.5 is above claimed_high 2.2"),
        ("claimed_low", "two", "claimed_low 'two' is not a finite number"),
        ("claimed_high", "", "relation 'within' does not go with claimed_low 2.0, claimed_high nan"),
        ("mechanism_high", "inf", "mechanism_high 'inf' is not a finite number"),
        ("study", "Slow Down", "study 'Slow Down' is not a name"),
        ("conflicts_with", "nobody", "conflicts_with 'nobody' is not in the ledger"),
        ("claim_id", "scenarios", "claim ids are not unique"),
    ],
)
def test_a_ledger_that_contradicts_itself_is_refused(planted, column, text, message):
    with pytest.raises(ValueError, match=message):
        planted("slowdown", column, text)


def test_a_claim_row_carries_what_judging_reads():
    row = claims.row("slowdown", "mechanism_here", 2.1, 1.9, 2.3, False, config="decode")
    assert list(row) == ["claim_id", "verdict_kind", "estimate", "low", "high", "contended", "config"]
    assert (row["estimate"], row["low"], row["high"]) == (2.1, 1.9, 2.3)


def test_a_claim_row_that_cannot_be_judged_is_refused():
    with pytest.raises(ValueError, match="no claim 'slowdwn'"):
        claims.row("slowdwn", "mechanism_here", 2.1, 1.9, 2.3, False)
    with pytest.raises(ValueError, match="low 2.3 is above high 1.9"):
        claims.row("slowdown", "mechanism_here", 2.1, 2.3, 1.9, False)

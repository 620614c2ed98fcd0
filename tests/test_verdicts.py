"""Both verdicts by hand: bands with closed and open ends, several configurations, searches, busy and missing rows."""

import re
from math import inf, isnan, nan
from types import SimpleNamespace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashstudy.facts import claims as ledger_file
from flashstudy.share import decisions, verdicts
from flashstudy.share.decisions import Number

LEDGER = ledger_file.load()
SUPPORTED, CONTRADICTED, INCONCLUSIVE, NOT_TESTABLE = ledger_file.VERDICTS


def row(claim_id, estimate, low, high, kind="mechanism_here", **more):
    return {"claim_id": claim_id, "verdict_kind": kind, "estimate": estimate, "low": low, "high": high} | more


def judged(*rows, claim_id=None):
    claim_id = claim_id or rows[0]["claim_id"]
    return verdicts.judge(pd.DataFrame(list(rows)), LEDGER[LEDGER.claim_id == claim_id]).iloc[0]


@pytest.mark.parametrize(
    ("low", "high", "verdict", "margin"),
    [
        (2.20, 2.45, SUPPORTED, 1.15),  # the band of `slowdown` is 1.05 and up
        (1.05, 1.30, SUPPORTED, 0.0),  # an edge belongs to its band
        (1.04, 1.30, INCONCLUSIVE, 0.0),
        (0.90, 1.05, INCONCLUSIVE, 0.0),  # touches the edge from outside
        (0.80, 1.00, CONTRADICTED, -0.05),
    ],
)
def test_a_band_with_an_open_top(low, high, verdict, margin):
    found = judged(row("slowdown", (low + high) / 2, low, high))
    assert (found.mechanism_here, found.margin) == (verdict, pytest.approx(margin))


@pytest.mark.parametrize(
    ("low", "high", "verdict", "margin"),
    [
        (1.85, 2.05, SUPPORTED, 0.05),  # the band of `int8_speed` is 1.8 to 2.2
        (1.90, 2.15, SUPPORTED, 0.05),
        (2.10, 2.30, INCONCLUSIVE, 0.0),
        (1.50, 2.50, INCONCLUSIVE, 0.0),  # reaches across both edges
        (2.25, 2.30, CONTRADICTED, -0.05),
        (1.00, 1.60, CONTRADICTED, -0.20),
    ],
)
def test_a_band_with_two_edges(low, high, verdict, margin):
    found = judged(row("int8_speed", (low + high) / 2, low, high))
    assert (found.mechanism_here, found.margin) == (verdict, pytest.approx(margin))


def test_a_band_with_an_open_bottom():
    assert judged(row("flops_65", 0.13, 0.12, 0.14)).margin == pytest.approx(0.95 - 0.14)
    assert judged(row("flops_65", 1.2, 1.1, 1.3)).mechanism_here == CONTRADICTED
    assert judged(row("attention_error", -1.4, -1.7, -1.1)).mechanism_here == SUPPORTED  # at most -1 dB


@pytest.mark.parametrize(
    ("claim_id", "value", "verdict", "margin"),
    [
        ("int8_memory", 1.996, CONTRADICTED, -1.604),  # about 4: 3.6 to 4.4
        ("int8_memory", 4.4, SUPPORTED, 0.0),
        ("int8_memory", 3.59, CONTRADICTED, -0.01),
        ("task_minutes_flash", 15.5, SUPPORTED, 0.34),  # about 14.4: 12.96 to 15.84
        ("test_bed", 4.6, CONTRADICTED, -3.6),  # at most 1
        ("block_compression", 1.9, SUPPORTED, 0.97),  # at least 0.93
        ("reconstruction_overheads", 1.18 / 0.78 * 85 / 58, SUPPORTED, 0.0829),  # 2.0 to 2.3; the product is 2.2171
    ],
)
def test_as_stated_arithmetic(claim_id, value, verdict, margin):
    found = judged(row(claim_id, value, value, value, "as_stated"))
    assert found.as_stated == verdict
    assert found.as_stated_margin == pytest.approx(margin, abs=1e-3)


def test_a_qualitative_claim_is_a_sourced_yes_or_no():
    def answer(*values):
        return judged(*(row("start_precision_A", v, nan, nan, "as_stated", config="released in BF16") for v in values))

    assert answer(1).as_stated == SUPPORTED
    assert answer(0).as_stated == CONTRADICTED
    assert answer(1, 0).as_stated == INCONCLUSIVE
    assert answer(0.5).as_stated == INCONCLUSIVE
    assert answer(0).as_stated_reason == "The record says no: released in BF16"


def test_what_nothing_may_decide_is_not_testable_whatever_the_rows_say():
    assert judged(row("flops_65", 0.65, 0.64, 0.66, "as_stated")).as_stated == NOT_TESTABLE  # as_stated_by is none
    assert judged(row("param_halving", 0.5, 0.5, 0.5)).mechanism_here == NOT_TESTABLE  # no band for a mechanism


def test_a_missing_row_is_no_study_yet_and_no_verdict():
    found = judged(row("slowdown", 2.3, 2.2, 2.4), claim_id="dequant_share")
    assert (found.as_stated, found.mechanism_here) == (ledger_file.NO_STUDY, ledger_file.NO_STUDY)
    assert isnan(found.margin)


def test_each_kind_of_row_decides_its_own_verdict_only():
    found = judged(row("int8_memory", 4.0, 4.0, 4.0, "as_stated"), row("int8_memory", 2.0, 2.0, 2.0))
    assert (found.as_stated, found.mechanism_here) == (SUPPORTED, CONTRADICTED)
    assert (found.estimate, found.as_stated_estimate) == (2.0, 4.0)


def test_without_a_mechanism_the_shown_numbers_are_those_of_as_stated():
    found = judged(row("param_halving", 0.495, 0.495, 0.495, "as_stated"))
    assert (found.mechanism_here, found.estimate, found.margin) == (NOT_TESTABLE, 0.495, pytest.approx(0.005))


def test_a_contended_row_decides_nothing_and_says_who_was_busy():
    found = judged(row("slowdown", 2.3, 2.2, 2.4, contended=True, reason="load 3.1 on 2 cores", config="task"))
    assert found.mechanism_here == INCONCLUSIVE
    assert isnan(found.margin)
    assert "task" in found.reason and "load 3.1 on 2 cores" in found.reason


@pytest.mark.parametrize(
    ("ratios", "contended", "verdict", "named"),
    [
        ([(2.0, 2.2), (1.2, 1.4), (3.0, 3.1)], [False] * 3, SUPPORTED, "b: 1.30× [1.20, 1.40]"),
        ([(0.5, 0.6), (0.8, 1.0), (0.7, 0.8)], [False] * 3, CONTRADICTED, "b: 0.90× [0.80, 1.00]"),
        ([(2.0, 2.2), (0.8, 1.0), (3.0, 3.1)], [False] * 3, INCONCLUSIVE, "2 inside and 1 outside"),
        ([(2.0, 2.2), (1.0, 1.2), (3.0, 3.1)], [False] * 3, INCONCLUSIVE, "b: 1.10× [1.00, 1.20]"),
        ([(2.0, 2.2), (1.2, 1.4), (3.0, 3.1)], [False, True, False], INCONCLUSIVE, "busy while b"),
        ([(0.5, 0.6), (0.8, 1.0), (0.7, 0.8)], [False, True, False], INCONCLUSIVE, "busy while b"),
    ],
)
def test_several_configurations_must_agree(ratios, contended, verdict, named):
    rows = [
        row("slowdown", (low + high) / 2, low, high, config=name, contended=busy)
        for name, (low, high), busy in zip("abc", ratios, contended, strict=True)
    ]
    found = judged(*rows)
    assert found.mechanism_here == verdict
    assert named in found.reason


def test_the_price_of_a_search_is_the_bonferroni_quantile():
    # Student's t with 11 degrees of freedom: 2.201 at 0.975, 2.593 at 0.9875 and 2.981 at 0.99375
    assert decisions.search_factor(1) == pytest.approx(1.0)
    assert decisions.search_factor(2) == pytest.approx(2.593 / 2.201, abs=1e-3)
    assert decisions.search_factor(4) == pytest.approx(2.981 / 2.201, abs=1e-3)


@pytest.mark.parametrize(
    ("winner", "verdict"),
    [
        ((3.40, 3.10, 3.70), INCONCLUSIVE),  # 3.40 - 1.354 · 0.30 = 2.994 is below 3
        ((3.40, 3.12, 3.70), SUPPORTED),  # 3.40 - 1.354 · 0.28 = 3.021 is not
        ((3.00, 2.80, 3.20), INCONCLUSIVE),
        ((2.50, 2.40, 2.60), CONTRADICTED),
    ],
)
def test_some_configuration_is_corrected_for_the_search(winner, verdict):
    losers = [row("structured_3x", 1.5, 1.4, 1.6, config=f"loser {n}") for n in range(3)]
    found = judged(*losers, row("structured_3x", *winner, config="winner"))
    assert found.mechanism_here == verdict


def test_a_quiet_winner_supports_a_search_but_only_quiet_losers_contradict_it():
    busy = row("structured_3x", 1.5, 1.4, 1.6, contended=True, config="busy")
    assert judged(busy, row("structured_3x", 4.0, 3.8, 4.2)).mechanism_here == SUPPORTED
    assert judged(busy, row("structured_3x", 1.2, 1.1, 1.3)).mechanism_here == INCONCLUSIVE


def test_searched_claims_are_those_that_speak_of_some():
    some = LEDGER[[bool(re.search(r"\bsome\b", text)) for text in LEDGER.mechanism_here]]
    assert set(some.claim_id) == verdicts.SEARCHED


def test_rows_without_a_number_or_an_interval_decide_nothing():
    skipped = row("swapping", nan, nan, nan, skipped="no control group with a memory limit")
    assert judged(skipped).mechanism_here == NOT_TESTABLE
    assert judged(skipped).reason == "no control group with a memory limit"
    assert judged(skipped, row("swapping", 5, 4, 6)).mechanism_here == INCONCLUSIVE
    assert judged(row("slowdown", 2.3, nan, nan)).mechanism_here == INCONCLUSIVE
    assert judged(row("slowdown", 2.3, 2.4, 2.2)).mechanism_here == INCONCLUSIVE


def test_only_claim_rows_are_read():
    rows = [
        row("slowdown", 2.3, 2.2, 2.4),
        {"claim_id": None, "time_ratio": 0.1, "low": 0.1, "high": 0.1, "contended": True},
    ]
    frame = pd.DataFrame(rows)
    assert judged(*rows, claim_id="slowdown").mechanism_here == SUPPORTED
    assert len(verdicts.claim_rows(frame)) == 1
    assert verdicts.claim_rows(pd.DataFrame({"time_ratio": [1.0]})).empty


def test_a_claim_row_without_its_kind_is_refused():
    with pytest.raises(ValueError, match=r"\['slowdown'\] need a verdict_kind"):
        judged(row("slowdown", 2.3, 2.2, 2.4, kind="measured"))


def test_verdicts_survive_the_file(tmp_path):
    rows = [
        row("slowdown", 2.3, 2.2, 2.4, contended=None),
        row("slowdown", 2.1, 2.0, 2.2, contended=True),
        {"time_s": 1.0},
    ]
    frame = pd.DataFrame(rows)
    frame.to_parquet(tmp_path / "result.parquet")
    claims = LEDGER[LEDGER.claim_id == "slowdown"]
    before, after = verdicts.judge(frame, claims), verdicts.judge(pd.read_parquet(tmp_path / "result.parquet"), claims)
    pd.testing.assert_frame_equal(before, after)


def test_reason_and_margin_speak_the_claims_unit():
    assert judged(row("slowdown", 2.31, 2.25, 2.45)).reason == (
        "2.31× [2.25, 2.45] lies inside the band from 1.05× up, 1.2 from its edge."
    )
    assert judged(row("dequant_share", 0.22, 0.20, 0.24)).reason == (
        "22.0% [20.0, 24.0] lies inside the band from 12% to 32%, 8.0 points from its edge."
    )


def test_the_ledger_has_every_claim_once_with_a_state_for_each_verdict():
    found = verdicts.ledger([])
    assert list(found.claim_id) and sorted(found.claim_id) == sorted(LEDGER.claim_id)
    assert len(found) == 60
    assert set(found.as_stated) == {NOT_TESTABLE, ledger_file.NO_STUDY}
    assert (found.as_stated == NOT_TESTABLE).sum() == (LEDGER.as_stated_by == "none").sum()
    assert found.set_index("claim_id").reason["slowdown"] == "slowdown_attribution has not run here yet."


def test_the_ledger_judges_each_study_by_its_own_run():
    run = SimpleNamespace(name="slowdown_attribution", run_id="r1", profile="quick")
    run.result = pd.DataFrame([row("slowdown", 2.3, 2.2, 2.4), row("dequant_share", 0.2, 0.19, 0.21)])
    found = verdicts.ledger([run]).set_index("claim_id")
    assert found.mechanism_here["slowdown"] == SUPPORTED
    assert found.mechanism_here["dequant_share"] == ledger_file.NO_STUDY  # memory_bandwidth's claim, not this run's
    assert (found.run_id["slowdown"], found.run_id["dequant_share"]) == ("r1", "")


def test_the_ledger_shows_a_result_that_cannot_be_judged():
    run = SimpleNamespace(name="slowdown_attribution", run_id="r1", profile="quick")
    run.result = pd.DataFrame([row("slowdown", 2.3, 2.2, 2.4, kind="?")])
    found = verdicts.ledger([run]).set_index("claim_id")
    assert found.mechanism_here["slowdown"] == ledger_file.NO_STUDY
    assert "cannot be judged" in found.reason["slowdown"]


@given(
    low=st.floats(-10, 10), width=st.floats(0, 10), band_low=st.floats(-10, 10), band_width=st.floats(0, 10),
)  # fmt: skip
def test_the_sign_of_the_margin_is_the_verdict(low, width, band_low, band_width):
    band, number = (band_low, band_low + band_width), Number("", low + width / 2, low, low + width)
    found = decisions.decide([number], band)
    assert found.margin <= band_width / 2 + 1e-9
    if found.verdict == SUPPORTED:
        assert found.margin >= 0
    else:
        assert (found.margin < 0) == (found.verdict == CONTRADICTED)
    mirrored = decisions.decide([Number("", -number.estimate, -number.high, -number.low)], (-band[1], -band[0]))
    assert (mirrored.verdict, mirrored.margin) == (found.verdict, pytest.approx(found.margin))


def test_an_endless_band_holds_everything():
    assert decisions.decide([Number("", 1.0, -inf, inf)], (-inf, inf)).verdict == SUPPORTED

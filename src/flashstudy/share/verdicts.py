"""Two verdicts a claim, computed from a result's claim rows and the bands of the ledger, with margin and reason.

A claim's number is a row with `claim_id, verdict_kind, estimate, low, high, contended, config`. Nothing else of a
result is read, but `reason` and `skipped` to say why. How numbers meet bands is in decisions.py.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from math import nan
from typing import TYPE_CHECKING, Any

import pandas as pd

from flashstudy.facts import claims as ledger_file
from flashstudy.facts.claims import NO_STUDY, VERDICT_KINDS
from flashstudy.share.decisions import NOT_TESTABLE, Judgement, Number, decide, decide_yes_or_no

if TYPE_CHECKING:
    from flashstudy.runs.records import Run

SEARCHED = frozenset({"structured_3x", "fusion_complexity"})  # "some pattern reaches 3x", "slower at some size"
_LEDGER_COLUMNS = ["study", "article", "quantity", "mechanism", "how_to_test", "scope", "note"]


def judge(result: pd.DataFrame, claims: pd.DataFrame) -> pd.DataFrame:
    """One row a claim of `claims`: claim_id, claim, as_stated, mechanism_here, estimate, low, high, margin, reason, …

    These numbers are those of mechanism_here, or of as_stated where the ledger names no mechanism. Behind them follow
    `unit`, the shown verdict's `band_low` and `band_high`, and `as_stated_*`: the numbers and reason of that verdict.
    Raises ValueError for a claim row whose verdict_kind is not one of VERDICT_KINDS.
    """
    rows = _by_claim(result)
    return pd.DataFrame([_judge_claim(claim, rows[claim["claim_id"]]) for claim in claims.to_dict("records")])


def ledger(runs: Iterable["Run"]) -> pd.DataFrame:
    """Every claim of the ledger, judged on the run of its study: `judge`'s columns, the claim's facts, run_id, profile.

    At most one run a study. A result that cannot be judged counts as no study, and the reason says why.
    """
    claims = ledger_file.load().to_dict("records")
    by_study = {run.name: run for run in runs}
    read = {study: _read(study, by_study.get(study)) for study in {claim["study"] for claim in claims}}
    return pd.DataFrame([_ledger_row(claim, by_study.get(claim["study"]), *read[claim["study"]]) for claim in claims])


def claim_rows(result: pd.DataFrame) -> pd.DataFrame:
    """The rows that carry a claim's number. Raises ValueError where one does not say which verdict it is for."""
    if "claim_id" not in result:
        return pd.DataFrame(columns=["claim_id", "verdict_kind"])
    rows = result[result["claim_id"].notna() & (result["claim_id"] != "")]
    if "verdict_kind" not in rows:
        rows = rows.assign(verdict_kind="")
    if wrong := sorted(set(rows.loc[~rows["verdict_kind"].isin(VERDICT_KINDS), "claim_id"])):
        raise ValueError(f"claim rows {wrong} need a verdict_kind, one of {VERDICT_KINDS}")
    return rows


def _by_claim(result: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    rows = defaultdict(list)
    for row in claim_rows(result).to_dict("records"):
        rows[row["claim_id"]].append(row)
    return rows


def _read(study: str, run: "Run | None") -> tuple[dict[str, list], str]:
    """A study's claim rows, and why there are none where its run is missing or cannot be judged."""
    if run is None:
        return defaultdict(list), f"{study} has not run here yet."
    try:
        return _by_claim(run.result), ""
    except ValueError as error:
        return defaultdict(list), f"The result cannot be judged: {error}"


def _ledger_row(claim: dict[str, Any], run: "Run | None", rows: dict[str, list], note: str) -> dict[str, Any]:
    judged = _judge_claim(claim, rows[claim["claim_id"]])
    shown = judged["as_stated"] if judged["mechanism_here"] == NOT_TESTABLE else judged["mechanism_here"]
    if note and shown == NO_STUDY:
        judged["reason"] = note
    if note and judged["as_stated"] == NO_STUDY:
        judged["as_stated_reason"] = note
    facts = {name: claim["mechanism_here" if name == "mechanism" else name] for name in _LEDGER_COLUMNS}
    return judged | facts | {"run_id": run.run_id if run else "", "profile": run.profile if run else ""}


def _judge_claim(claim: Mapping[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    stated, here = (
        judge_kind(claim, [_to_number(row) for row in rows if row["verdict_kind"] == kind], kind)
        for kind in ("as_stated", "mechanism_here")
    )
    kind, shown = ("mechanism_here", here) if ledger_file.band(claim, "mechanism_here") else ("as_stated", stated)
    band = ledger_file.band(claim, kind) or (nan, nan)
    return {
        "claim_id": claim["claim_id"],
        "claim": claim["statement"],
        "as_stated": stated.verdict,
        "mechanism_here": here.verdict,
        **{key: getattr(shown, key) for key in ("estimate", "low", "high", "margin", "reason")},
        "unit": claim["unit"],
        "band_low": band[0],
        "band_high": band[1],
        **{f"as_stated_{key}": value for key, value in asdict(stated).items() if key != "verdict"},
    }


def judge_kind(claim: Mapping[str, Any], rows: list[Number], verdict_kind: str) -> Judgement:
    """One of a claim's two verdicts from its numbers; no numbers are "no study yet", no band is "not testable here"."""
    band = ledger_file.band(claim, verdict_kind)
    qualitative = verdict_kind == "as_stated" and claim["relation"] == "qualitative"
    if verdict_kind == "as_stated" and claim["as_stated_by"] == "none":
        return Judgement(NOT_TESTABLE, _out_of_reach(claim["scope"]))
    if band is None and not qualitative:
        return Judgement(NOT_TESTABLE, "The ledger names no cause that one machine could try.")
    if not rows:
        return Judgement(NO_STUDY, "No row of the result carries this number.")
    if qualitative:
        return decide_yes_or_no(rows)
    return decide(rows, band, claim["unit"], searched=claim["claim_id"] in SEARCHED)


def _out_of_reach(scope: str) -> str:
    about = f"About {scope}: neither" if scope and scope != "none" else "Neither"
    return f"{about} arithmetic nor public facts decide it."


def _to_number(row: Mapping[str, Any]) -> Number:
    contended = row.get("contended")
    values = (_float(row.get(name)) for name in ("estimate", "low", "high"))
    why = _text(row.get("skipped")) or _text(row.get("reason"))
    return Number(_text(row.get("config")), *values, bool(contended) if pd.notna(contended) else False, why)


def _float(value) -> float:
    return nan if value is None or pd.isna(value) else float(value)


def _text(value) -> str:
    return "" if value is None or pd.isna(value) else str(value)

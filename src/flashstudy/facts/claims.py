"""The ledger: what the two articles claim, with the bands that a verdict is judged by.

Bands were committed before anything was measured. A blank bound is an open end: NaN in the frame, infinite in `band`. A
ledger that contradicts itself is refused on load, because every verdict rests on it.
"""

import math
import re
from pathlib import Path

import pandas as pd

from flashstudy.facts import checkout

VERDICTS = ("supported", "contradicted", "inconclusive", "not testable here")
NO_STUDY = "no study yet"
VERDICT_KINDS = ("as_stated", "mechanism_here")
RELATIONS = ("within", "about", "at_least", "at_most", "qualitative")
DECIDED_BY = ("arithmetic", "public", "none")
ABOUT = 0.10  # "about" allows ±10% of the claimed number

_BOUNDS = ("claimed_low", "claimed_high", "mechanism_low", "mechanism_high")
_TEXTS = (
    "claim_id", "article", "part", "study", "statement", "quantity", "unit", "relation", "as_stated_by", "scope",
    "mechanism_here", "how_to_test", "conflicts_with", "note",
)  # fmt: skip


def load(path: Path | None = None) -> pd.DataFrame:
    """Every claim, one row each, in the ledger's order; bounds are floats, NaN where open, other blanks are "".

    Raises ValueError that names the claim and what is wrong with it.
    """
    ledger = pd.read_csv(path or checkout.data_dir() / "claims.csv", dtype=str, keep_default_na=False)
    if missing := [name for name in (*_TEXTS, *_BOUNDS) if name not in ledger.columns]:
        raise ValueError(f"the ledger lacks the columns {missing}")
    for name in _BOUNDS:
        pairs = zip(ledger.claim_id, ledger[name], strict=True)
        ledger[name] = [_bound(claim_id, name, text) for claim_id, text in pairs]
    if repeated := sorted(ledger.claim_id[ledger.claim_id.duplicated()]):
        raise ValueError(f"claim ids are not unique: {repeated}")
    for claim in ledger.to_dict("records"):
        _check(claim, set(ledger.claim_id))
    return ledger


def select(study: str, claim_ids: list[str] | None = None) -> pd.DataFrame:
    """The claims that a study tests, all or those named. Raises ValueError for a study or claim not in the ledger."""
    ledger = load()
    if study not in set(ledger.study):
        raise ValueError(f"no claims for study {study!r}; the ledger has {', '.join(sorted(set(ledger.study)))}")
    rows = ledger[ledger.study == study]
    if unknown := sorted(set(claim_ids or ()) - set(rows.claim_id)):
        raise ValueError(f"{study} has no claims {unknown}; it has {', '.join(rows.claim_id)}")
    return rows[rows.claim_id.isin(claim_ids)] if claim_ids is not None else rows


def band(claim: "pd.Series | dict", verdict_kind: str) -> tuple[float, float] | None:
    """(low, high) inside which an estimate supports the claim; open ends are infinite, None where no band was stated.

    "about" widens the claimed number, not the mechanism's band, by 10% of its size.
    """
    if verdict_kind not in VERDICT_KINDS:
        raise ValueError(f"verdict_kind {verdict_kind!r} is not one of {VERDICT_KINDS}")
    prefix = "claimed" if verdict_kind == "as_stated" else "mechanism"
    low, high = float(claim[f"{prefix}_low"]), float(claim[f"{prefix}_high"])
    if math.isnan(low) and math.isnan(high):
        return None
    if verdict_kind == "as_stated" and claim["relation"] == "about":
        low, high = low - ABOUT * abs(low), high + ABOUT * abs(high)
    return (-math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high)


def row(
    claim_id: str,
    verdict_kind: str,
    estimate: float,
    low: float,
    high: float,
    contended: bool,
    *,
    config: str = "",
) -> dict:
    """One claim's number as a row of a study's result, with the configuration it was found in, in words.

    Raises ValueError for a claim that the ledger lacks, another verdict_kind, or low above high.
    """
    if claim_id not in set(load().claim_id) or verdict_kind not in VERDICT_KINDS:
        raise ValueError(f"no claim {claim_id!r} with a verdict {verdict_kind!r}; verdict kinds are {VERDICT_KINDS}")
    if low > high:  # false where one is missing: NaN stays, and judging calls it inconclusive
        raise ValueError(f"claim {claim_id}: low {low} is above high {high}")
    return {
        "claim_id": claim_id, "verdict_kind": verdict_kind, "estimate": float(estimate), "low": float(low),
        "high": float(high), "contended": bool(contended), "config": config,
    }  # fmt: skip


def _bound(claim_id: str, column: str, text: str) -> float:
    try:
        value = float(text) if text.strip() else math.nan
    except ValueError:
        value = math.inf
    if math.isinf(value):
        raise ValueError(f"claim {claim_id}: {column} {text!r} is not a finite number; blank is an open end")
    return value


def _check(claim: dict, claim_ids: set[str]) -> None:
    for column, allowed in (("relation", RELATIONS), ("as_stated_by", DECIDED_BY)):
        if claim[column] not in allowed:
            raise ValueError(f"claim {claim['claim_id']}: {column} {claim[column]!r} is not one of {allowed}")
    for column in ("claim_id", "study"):
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-zA-Z0-9]+)*", claim[column]):
            raise ValueError(f"claim {claim['claim_id']!r}: {column} {claim[column]!r} is not a name like task_time")
    if claim["conflicts_with"] and claim["conflicts_with"] not in claim_ids:
        raise ValueError(f"claim {claim['claim_id']}: conflicts_with {claim['conflicts_with']!r} is not in the ledger")
    for prefix in ("claimed", "mechanism"):
        if claim[f"{prefix}_low"] > claim[f"{prefix}_high"]:  # false where either is open
            low, high = claim[f"{prefix}_low"], claim[f"{prefix}_high"]
            raise ValueError(f"claim {claim['claim_id']}: {prefix}_low {low} is above {prefix}_high {high}")
    _check_relation(claim)


def _check_relation(claim: dict) -> None:
    """The claimed bounds must be the ones that the relation speaks of."""
    needed = {
        "within": (True, True), "about": (True, True), "at_least": (True, False), "at_most": (False, True),
        "qualitative": (False, False),
    }[claim["relation"]]  # fmt: skip
    given = tuple(not math.isnan(claim[name]) for name in ("claimed_low", "claimed_high"))
    if given != needed:
        bounds = f"claimed_low {claim['claimed_low']}, claimed_high {claim['claimed_high']}"
        raise ValueError(f"claim {claim['claim_id']}: relation {claim['relation']!r} does not go with {bounds}")

"""The ledger on the site: counts of both verdicts as bars, one entry a claim, grouped by the study that tests it."""

from typing import Any

import pandas as pd
from markupsafe import Markup

from flashstudy.facts import claims as ledger_file
from flashstudy.share import band_figure, ledger_tables
from flashstudy.share.decisions import SUPPORTED
from flashstudy.share.gallery import Entry

STATES = (*ledger_file.VERDICTS, ledger_file.NO_STUDY)
KINDS = {"mechanism_here": "Mechanism here", "as_stated": "As stated"}


def summary(judged: pd.DataFrame) -> list[dict[str, Any]]:
    """Per kind of verdict its title and (state, css class, count, offset) of each state, in parts of all claims."""
    rows = []
    for kind, title in KINDS.items():
        parts, at = [], 0
        for state in STATES:
            count = int((judged[kind] == state).sum())
            parts.append({"state": state, "css": state.replace(" ", "-"), "count": count, "at": at})
            at += count
        rows.append({"title": title, "parts": parts, "total": at})
    return rows


def groups(judged: pd.DataFrame, entries: dict[str, Entry], pages: set[str]) -> list[dict[str, Any]]:
    """One group a study, in the order of `entries` and then of the ledger, with its claims and whether it is opened."""
    facts = {claim["claim_id"]: claim for claim in ledger_file.load().to_dict("records")}
    order = {name: number for number, name in enumerate(entries)}
    names = sorted(dict.fromkeys(judged["study"]), key=lambda name: order.get(name, len(order)))
    return [_group(name, judged[judged["study"] == name], facts, entries.get(name), pages) for name in names]


def _group(
    name: str, rows: pd.DataFrame, facts: dict[str, dict], entry: Entry | None, pages: set[str]
) -> dict[str, Any]:
    claims = [_claim(row, facts[row["claim_id"]]) for row in rows.to_dict("records")]
    n_supported = int((rows["mechanism_here"] == SUPPORTED).sum())
    n_decided = int(rows["mechanism_here"].isin(ledger_file.VERDICTS[:3]).sum())
    has_run = entry is not None and entry.run is not None
    note = f"{n_supported} of {n_decided} mechanisms supported here" if n_decided else ledger_file.NO_STUDY
    return {
        "name": name,
        "title": entry.question if entry else name.replace("_", " ").capitalize(),
        "page": entry.page if entry and entry.page in pages else "",
        "note": note if has_run or n_decided else ledger_file.NO_STUDY,
        "open": has_run,
        "claims": claims,
    }


def _claim(row: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": row["claim_id"],
        "statement": row["claim"],
        "claimed": ledger_tables.claimed_text(facts),
        "source": ledger_tables.source(facts),
        "quantity": facts["quantity"],
        "as_stated": Markup(ledger_tables.verdict_markup(row["as_stated"])),
        "as_stated_reason": row["as_stated_reason"],
        "mechanism_here": Markup(ledger_tables.verdict_markup(row["mechanism_here"])),
        "mechanism_reason": ledger_tables.mechanism_reason(row),
        "supported_if": ledger_tables.mechanism_text(facts),
        "has_mechanism": ledger_file.band(facts, "mechanism_here") is not None,
        "how_to_test": facts["how_to_test"],
        "note": facts["note"],
        "margin": ledger_tables.margin_text(row["margin"], row["unit"]),
        "band": Markup(band_figure.draw(row)),
    }

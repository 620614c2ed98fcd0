"""The ledger for reading: claims with what would support them, verdicts with margin and reason.

Used three times: by a notebook's `claims.select(…)` and `verdicts.judge(…)` cells, by the page, and by the site.
"""

import html
from collections.abc import Mapping
from math import inf
from typing import Any

import pandas as pd

from flashstudy.facts import claims as ledger_file
from flashstudy.share import numbers
from flashstudy.share.tables import Table, render

GLYPHS = {
    "supported": "✓", "contradicted": "✗", "inconclusive": "?", "not testable here": "–", ledger_file.NO_STUDY: "·",
}  # fmt: skip
_INLINE_COLORS = {"supported": "#01704f", "contradicted": "#a84a00", "inconclusive": "#8f5a00"}  # JupyterLab only


def claims_table(claims: pd.DataFrame) -> Table:
    """Each claim with its source, what it states, and the band inside which its cause would be supported here."""
    cells = [
        [
            f"{html.escape(claim['statement'])}<br><small>{html.escape(source(claim))}</small>",
            html.escape(claimed_text(claim)),
            html.escape(mechanism_text(claim)),
        ]
        for claim in claims.to_dict("records")
    ]
    return render(["Claim", "Claimed", "Supported here if"], cells, [False] * 3, safe=True)


def verdicts_table(judged: pd.DataFrame) -> Table:
    """Each claim with both verdicts, their reasons, and the margin to the band's edge."""
    cells = [
        [
            html.escape(row["claim"]),
            _verdict_inline(row["as_stated"]) + f"<br><small>{html.escape(row['as_stated_reason'])}</small>",
            _verdict_inline(row["mechanism_here"]) + f"<br><small>{html.escape(mechanism_reason(row))}</small>",
            html.escape(margin_text(row["margin"], row["unit"]).replace(" ", "\u00a0")),
        ]
        for row in judged.to_dict("records")
    ]
    return render(["Claim", "As stated", "Mechanism here", "Margin"], cells, [False, False, False, True], safe=True)


def show_ledger_frames(shell) -> None:
    """Make the Jupyter `shell` display ledger frames as the tables above; every other frame stays as it was."""
    shell.display_formatter.formatters["text/html"].for_type(pd.DataFrame, _frame_html)


def verdict_markup(verdict: str) -> str:
    """A verdict as a word with its sign, never by color alone; the stylesheet colors it by class."""
    return f'<strong class="verdict {html.escape(verdict.replace(" ", "-"))}">{_signed(verdict)}</strong>'


def _verdict_inline(verdict: str) -> str:
    """The same for JupyterLab, which has no stylesheet of ours."""
    color = _INLINE_COLORS.get(verdict)
    style = f' style="color:{color}"' if color else ""
    return f'<strong class="verdict {html.escape(verdict.replace(" ", "-"))}"{style}>{_signed(verdict)}</strong>'


def _signed(verdict: str) -> str:
    return f"{GLYPHS.get(verdict, '·')}&nbsp;{html.escape(verdict)}"


def mechanism_reason(row: Mapping[str, Any]) -> str:
    """The reason of mechanism_here; `reason` is as_stated's where the ledger names no mechanism."""
    if row["mechanism_here"] == "not testable here" and row["reason"] == row["as_stated_reason"]:
        return "The ledger names no cause that one machine could try."
    return row["reason"]


def margin_text(margin: float, unit: str) -> str:
    """A margin with its sign: "+0.15", "−4.0 points", "0" where an interval reaches across, blank where none."""
    if numbers.is_missing(margin):
        return ""
    if margin == 0:
        return "0"
    sign = "+" if margin > 0 else "−"
    return f"{sign}{numbers.distance(abs(margin), unit)}"


def source(claim: Mapping[str, Any]) -> str:
    """Where a claim stands: "article B, III.2", "both articles, benchmark", "our reconstruction"."""
    who = {"A": "article A", "B": "article B", "both": "both articles", "ours": "our reconstruction"}
    named = who.get(claim["article"], claim["article"])
    part = claim.get("part", "")
    return f"{named}, {part}" if part and part != "-" else named


def claimed_text(claim: Mapping[str, Any]) -> str:
    """What the claim states, in its unit: "2× to 2.2×", "about 14.4 min", "at least 1.5×", "yes or no"."""
    low, high, unit = claim["claimed_low"], claim["claimed_high"], claim["unit"]
    match claim["relation"]:
        case "qualitative":
            return "a statement, no number"
        case "about":
            return f"about {numbers.edge(low, unit)}"
        case "at_least":
            return f"at least {numbers.edge(low, unit)}"
        case "at_most":
            return f"at most {numbers.edge(high, unit)}"
    return f"{numbers.edge(low, unit)} to {numbers.edge(high, unit)}"


def mechanism_text(claim: Mapping[str, Any]) -> str:
    """What would support the claim's cause here: "best INT8 path against bf16 …: 1.8× to 2.2×"."""
    band = ledger_file.band(claim, "mechanism_here")
    if band is None:
        return "nothing: no cause that one machine could try"
    low, high = (numbers.edge(end, claim["unit"]) for end in band)
    words = f"at most {high}" if band[0] == -inf else f"at least {low}" if band[1] == inf else f"{low} to {high}"
    about = claim["quantity"] if claim["mechanism_here"] in ("", "same") else claim["mechanism_here"]
    return f"{about}: {words}"


def _frame_html(frame: pd.DataFrame) -> str | None:
    columns = set(frame.columns)
    if {"claim", "as_stated", "mechanism_here", "margin", "as_stated_reason"} <= columns:
        return verdicts_table(frame).html
    if {"claim_id", "statement", "mechanism_low", "relation"} <= columns:
        return claims_table(frame).html
    return frame._repr_html_()

"""One notebook as an offline page: no script, no request, nothing of the machine it ran on but its hardware.

The page opens with the question and the computed answer, then follows the notebook cell by cell. It is what one
forwards; with `standalone` it carries its stylesheet along.
"""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
from markupsafe import Markup
from nbformat import NotebookNode

from flashstudy.share import cells, ledger_tables, machine_card, templating
from flashstudy.share.gallery import Entry
from flashstudy.share.scrub import scrub

LARGEST_NOTEBOOK_BYTES = 20_000_000


def render(
    notebook: Path | NotebookNode,
    entry: Entry | None = None,
    judged: pd.DataFrame | None = None,
    neighbors: tuple[Entry | None, Entry | None] = (None, None),
    *,
    standalone: bool = False,
) -> str:
    """The page of an executed notebook. `entry` adds answer, date and machine, `judged` the verdicts of its claims.

    Raises ValueError for a file that is no notebook or larger than 20 MB, OSError where it cannot be read.
    """
    node = read(notebook) if isinstance(notebook, Path) else notebook
    headline = entry.headline if entry else ""
    question = cells.question(node) or "A notebook without a question"
    blocks = [Markup(block) for block in cells.blocks(node, label=f"Figure: {headline or question}")]
    return templating.render(
        "page.html.j2",
        standalone=standalone,
        title=question,
        headline=headline,
        facts=facts(entry),
        chips=[] if judged is None else [chip(row) for row in judged.to_dict("records")],
        blocks=blocks,
        previous=neighbors[0],
        following=neighbors[1],
    )


def read(path: Path) -> NotebookNode:
    """A notebook from a file, whoever wrote it. Raises ValueError in one line, OSError."""
    if path.stat().st_size > LARGEST_NOTEBOOK_BYTES:
        raise ValueError(
            f"{path.name} has {path.stat().st_size / 1e6:.0f} MB; allowed are {LARGEST_NOTEBOOK_BYTES / 1e6:.0f}"
        )
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat has no common base for what a broken file raises
        raise ValueError(f"{path.name} is not a notebook: {type(error).__name__}") from None


def facts(entry: Entry | None) -> list[str]:
    """Machine, date, profile and id of the run, for one line."""
    if entry is None or entry.run is None:
        return []
    run = entry.run
    date = day(str(run.record.get("end", "")))
    return [
        scrub(text) for text in (machine_card.line(run.provenance), date, f"{run.profile} profile", f"run {run.run_id}")
    ]


def day(timestamp: str) -> str:
    """A timestamp's day for reading: "1 Dec 2026"; the text itself where it is none."""
    try:
        moment = datetime.fromisoformat(timestamp)
    except ValueError:
        return timestamp
    return f"{moment.day} {moment:%b %Y}"


def chip(row: Mapping[str, Any]) -> dict[str, str | Markup]:
    """What a page shows of one claim: id, statement and both verdicts."""
    return {
        "id": row["claim_id"],
        "claim": row["claim"],
        "as_stated": Markup(ledger_tables.verdict_markup(row["as_stated"])),
        "mechanism_here": Markup(ledger_tables.verdict_markup(row["mechanism_here"])),
    }

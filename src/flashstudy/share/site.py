"""The site: one index and a page a notebook, offline, from whatever results exist.

The index opens with the answer, then the picture, the notebooks, every claim with both verdicts, and the machine. It is
built after each notebook of a batch, so it must make sense with one result, with none, and after a failed run.
"""

import importlib.metadata
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
from markupsafe import Markup

from flashstudy.runs import folders
from flashstudy.share import gallery, ledger_view, machine_card, page, templating, verdicts
from flashstudy.share.gallery import FIRST_STUDY, Entry
from flashstudy.share.scrub import scrub

_MARK = '<meta name="generator" content="flashstudy">'


def build(results: Iterable[Path] | Path, out: Path) -> Path:
    """The path of `out`/index.html, built from one or several results folders; pages without a run are removed.

    Every file is replaced whole, so a reader never sees half a page. Raises OSError where `out` cannot be written.
    """
    roots = [Path(results)] if isinstance(results, str | Path) else [Path(root) for root in results]
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    entries = gallery.entries(roots)
    judged = verdicts.ledger(entry.run for entry in entries if entry.run)
    folders.write_text(out / "style.css", templating.STYLESHEET.read_text(encoding="utf-8"))
    with_page = [entry for entry in entries if entry.page]
    written = {entry.page for entry in with_page if _write_page(out, entry, with_page, judged)}
    _remove_stale(out, {entry.name for entry in entries} | set(judged["study"]), written)
    folders.write_text(out / "index.html", index(entries, judged, written))
    return out / "index.html"


def index(entries: list[Entry], judged: pd.DataFrame, pages: set[str]) -> str:
    """The HTML of the index. `pages` are the files that may be linked."""
    first = next((entry for entry in entries if entry.name == FIRST_STUDY and entry.run), None)
    newest = max(
        (entry.run for entry in entries if entry.run), key=lambda run: str(run.record.get("end")), default=None
    )
    return templating.render(
        "index.html.j2",
        hero=_hero(first, entries),
        cards=[_card(entry, pages) for entry in entries if entry.run or entry.failure],
        waiting=[entry for entry in entries if not entry.run and not entry.failure],
        summary=ledger_view.summary(judged),
        groups=ledger_view.groups(judged, {entry.name: entry for entry in entries}, pages),
        n_claims=len(judged),
        machine=machine_card.rows(newest.provenance) if newest else [],
        software=machine_card.software(newest.provenance) if newest else "",
        footer=_footer(newest),
    )


def _write_page(out: Path, entry: Entry, entries: list[Entry], judged: pd.DataFrame) -> bool:
    """Whether the notebook's page could be written; a broken notebook must not keep the others from being shown."""
    at = entries.index(entry)
    neighbors = (entries[at - 1] if at else None, entries[at + 1] if at + 1 < len(entries) else None)
    try:
        text = page.render(entry.run.notebook, entry, judged[judged["study"] == entry.name], neighbors)
    except (ValueError, OSError):
        return False
    folders.write_text(out / entry.page, text)
    return True


def _remove_stale(out: Path, names: set[str], written: set[str]) -> None:
    """Remove pages of studies that no longer have one. Only our own pages: `out` may be anybody's folder."""
    for path in (out / f"{name}.html" for name in names):
        if (
            path.name not in written
            and path.is_file()
            and _MARK in path.read_text(encoding="utf-8", errors="replace")[:2000]
        ):
            path.unlink()


def _hero(first: Entry | None, entries: list[Entry]) -> dict:
    """The first screen: the answer and its picture, or what there is instead."""
    n_done = sum(entry.run is not None for entry in entries)
    if first is None:
        title = "Why is the compressed model slower?" if n_done else "Nothing measured yet"
        lead = f"{n_done} of {len(entries)} notebooks have a result; the headline comes with {FIRST_STUDY}."
        return {"title": title, "lead": lead, "facts": [], "picture": "", "page": "", "tokens": None}
    return {
        "title": first.headline or first.question,
        "lead": "",
        "facts": page.facts(first)[:3],
        "picture": Markup(gallery.picture(first.run, f"Time ratios by variant and phase. {first.headline}")),
        "page": first.page,
        "tokens": _tokens(first),
    }


def _tokens(entry: Entry) -> tuple[str, str] | None:
    """(tokens in, tokens out) of the task that was measured."""
    counts = [entry.run.params.get(name) for name in ("input_tokens", "output_tokens")]
    return tuple(f"{count:,}" for count in counts) if all(isinstance(count, int) for count in counts) else None


def _card(entry: Entry, pages: set[str]) -> dict:
    shown_above = entry.name == FIRST_STUDY
    picture = gallery.picture(entry.run, f"{entry.question} {entry.headline}") if entry.run and not shown_above else ""
    return {
        "entry": entry,
        "page": entry.page if entry.page in pages else "",
        "picture": Markup(picture),
        "facts": page.facts(entry)[1:3],
    }


def _footer(newest) -> dict[str, str]:
    commit = (newest.provenance.get("commit") or {}) if newest else {}
    sha = str(commit.get("sha") or "")[:10] if isinstance(commit, dict) else ""
    return {
        "version": importlib.metadata.version("flashstudy"),
        "commit": scrub(sha) + (" with local changes" if sha and commit.get("dirty") else ""),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }

"""What the site shows of each study: its question, its best run, the answer in a sentence, and what failed since."""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat

from flashstudy import studies
from flashstudy.facts import checkout
from flashstudy.runs import folders, records
from flashstudy.share import cells, markup
from flashstudy.share.scrub import scrub

if TYPE_CHECKING:
    from flashstudy.runs.records import Run

PROFILES = ("full", "quick", "smoke")  # widest first
LARGEST_FIGURE_BYTES = 1_000_000
FIRST_STUDY = "slowdown_attribution"


@dataclass(frozen=True)
class Failure:
    """A run that did not end well and that no good run has followed."""

    run_id: str
    status: str
    reason: str
    end: str


@dataclass(frozen=True)
class Entry:
    """One study on the site. `headline` is "" and `run` None where no good run exists."""

    name: str
    question: str
    run: "Run | None"
    headline: str
    failure: Failure | None
    n_failed: int = 0

    @property
    def page(self) -> str:
        """The file of the executed notebook's page, "" where there is none."""
        return f"{self.name}.html" if self.run and self.run.notebook else ""


def entries(results: Iterable[Path]) -> list[Entry]:
    """Every study that has a notebook or a run, in reading order, then by name."""
    roots = [Path(root) for root in results]
    names = {*_notebooks(), *(path.name for root in roots for path in _subfolders(root))}
    names = {name for name in names if folders.STUDY_NAME.fullmatch(name)}
    order = {name: number for number, name in enumerate(studies.READING_ORDER)}
    return [_entry(name, roots) for name in sorted(names, key=lambda name: (order.get(name, len(order)), name))]


def best_run(name: str, roots: Iterable[Path]) -> "Run | None":
    """The widest profile's newest good run of a study over all results folders."""
    for profile in (*PROFILES, None):
        found = [run for root in roots if (run := records.load(name, root, profile))]
        if found:
            return max(found, key=lambda run: (str(run.record.get("end")), run.run_id))
    return None


def picture(run: "Run", label: str) -> str:
    """The run's first figure for inlining, "" where it has none that can be shown."""
    for path in run.figures[:1]:
        try:
            if path.is_symlink() or path.stat().st_size > LARGEST_FIGURE_BYTES:
                return ""
            if path.suffix == ".svg":
                text = scrub(path.read_text(encoding="utf-8"))
                return cells.figure(markup.safe_svg(text, prefix=f"{run.name}-", label=label))
            if path.suffix == ".png":
                return cells.figure(cells.png_tag(path.read_bytes(), label))
        except (OSError, ValueError):
            return ""
    return ""


def _entry(name: str, roots: list[Path]) -> Entry:
    run = best_run(name, roots)
    failures = _failures(name, roots, str(run.record.get("end")) if run else "")
    last = max(failures, key=lambda failure: failure.end, default=None)
    return Entry(name, _question(name, run), run, headline(run) if run else "", last, len(failures))


def headline(run: "Run") -> str:
    """The study's own sentence on its result; "" where the study is unknown here or cannot read the result."""
    try:
        study = importlib.import_module(f"flashstudy.studies.{run.name}")
        return scrub(str(study.headline(run.result)).strip())
    except Exception:  # results may be older than the code, or anybody's: a page without a sentence beats no page
        return ""


def _question(name: str, run: "Run | None") -> str:
    paths = [run.notebook if run else None, _notebooks().get(name)]
    for path in filter(None, paths):
        try:
            if found := cells.question(nbformat.read(path, as_version=4)):
                return found
        except (OSError, ValueError, nbformat.reader.NotJSONError, nbformat.validator.NotebookValidationError):
            continue
    return name.replace("_", " ").capitalize()


def _failures(name: str, roots: list[Path], after: str) -> list[Failure]:
    """Runs that ended after the moment `after` and not well."""
    found = []
    for root in roots:
        for path in _subfolders(root / name):
            record = folders.read_json(path / folders.RUN_JSON) or {}
            status, end = str(record.get("status", "")), str(record.get("end", ""))
            if status and status != folders.GOOD and end > after:
                found.append(Failure(path.name, status.replace("_", " "), scrub(str(record.get("reason") or "")), end))
    return found


def _notebooks() -> dict[str, Path]:
    try:
        return {path.stem: path for path in sorted(checkout.notebooks_dir().glob("*.ipynb"))}
    except checkout.NotACheckoutError:
        return {}


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []

"""How commands answer: results on stdout, progress and errors on stderr, one line for what went wrong."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from flashstudy.runs.runner import Outcome


def exit_code(outcomes: list["Outcome"], n_wanted: int) -> int:
    """0 when every run is done. Tells when the batch was broken off."""
    if len(outcomes) < n_wanted or any(outcome.status == "interrupted" for outcome in outcomes):
        n_done = sum(outcome.status == "done" for outcome in outcomes)
        print(
            f"interrupted: {n_done} of {n_wanted} done and kept; the same command runs the batch again", file=sys.stderr
        )
    return int(len(outcomes) < n_wanted or any(outcome.status != "done" for outcome in outcomes))


def console() -> "Console":
    """A console on stderr, as wide as the terminal."""
    from rich.console import Console

    return Console(stderr=True)


def plain(outcome: "Outcome") -> dict[str, Any]:
    """An outcome as JSON values."""
    return vars(outcome) | {"path": str(outcome.path) if outcome.path else None}


def shown(path: Path | None) -> str:
    """A path as a person would type it: relative to the current folder where it lies below it."""
    if path is None:
        return "no folder"
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def print_json(value: Any) -> int:
    """Print JSON; exit code 0."""
    print(json.dumps(value, indent=2, ensure_ascii=False))
    return 0


def one_line(error: Exception) -> str:
    """Type and message of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def fail(what: str, code: int) -> int:
    """Print one line of error; the exit code."""
    print("error: " + " ".join(what.split()), file=sys.stderr)
    return code

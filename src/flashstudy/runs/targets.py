"""What can be run: a study's name leads to its notebook and its parameter schema."""

import difflib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from flashstudy.facts import checkout
from flashstudy.runs.schema import RefusedError
from flashstudy.studies import READING_ORDER


@dataclass(frozen=True)
class Target:
    """A notebook and the schema of its parameters."""

    name: str
    notebook: Path
    params_class: type[BaseModel]


def find(name: str) -> Target:
    """The study of that name. Raises RefusedError where there is none, naming the closest."""
    if name not in READING_ORDER:
        close = difflib.get_close_matches(Path(name).stem.lower(), READING_ORDER, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise RefusedError(f"no notebook named {name!r}{hint}; allowed: {', '.join(READING_ORDER)}")
    module = importlib.import_module(f"flashstudy.studies.{name}")
    return Target(name, checkout.notebooks_dir() / f"{name}.ipynb", module.Params)


def check_notebook(target: Target) -> None:
    """Refuse a notebook that is absent, unreadable or has no cell tagged `parameters`: its defaults would win."""
    try:
        cells = json.loads(target.notebook.read_text(encoding="utf-8"))["cells"]
        tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = getattr(error, "strerror", None) or "it is not a notebook"
        raise RefusedError(f"cannot read the notebook {target.notebook}: {what}") from None
    if not tagged:
        raise RefusedError(
            f"{target.notebook.name} has no cell tagged 'parameters', so it would ignore what it is given"
        )


def question(notebook: Path) -> str:
    """The question a notebook asks: its first heading; empty where it has none."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    lines = "".join("".join(cells[0]["source"]) if cells else "").splitlines()
    return lines[0].removeprefix("# ").strip() if lines and lines[0].startswith("# ") else ""

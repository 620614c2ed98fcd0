"""Tiny notebooks and a private checkout around the study `toys/counting.py`, for the tests of the run floor."""

import json
import shutil
import sys
from pathlib import Path

from flashstudy.facts import checkout
from flashstudy.runs.targets import Target

TOYS = Path(__file__).with_name("toys")
DEFAULTS = """
model: str = "toy"  # a text
rows: int = 3  # rows of the result
tolerance: float = 0.5  # a number
bits: list[int] = [8, 4]  # a list of numbers
kinds: list[str] = ["q", "k"]  # a list of texts
fast: bool = True  # a switch
level: str = "low"  # a choice
limit: int = None  # a number or none
seed: int = 0  # seed
""".strip()
IMPORTS = """
from {package}counting import Params, run
from flashstudy.runs import parameters, records
params = parameters.read(Params, globals())
""".strip()
SAVE = "records.save(run(params), params)"


def cell(source: str, **metadata) -> dict:
    return {"cell_type": "code", "execution_count": None, "metadata": metadata, "outputs": [], "source": source}


def write_notebook(path: Path, *sources: str, tags=("parameters",), package: str = "") -> Path:
    """A notebook with a heading, the parameters, the imports and the given cells."""
    heading = {"cell_type": "markdown", "metadata": {}, "source": "# How many?\n\nIt counts."}
    setup = [cell(DEFAULTS, tags=list(tags)), cell(IMPORTS.format(package=package))]
    metadata = {"kernelspec": {"name": "python3", "display_name": "x", "language": "python"}}
    cells = [heading, *setup, *(cell(source) for source in sources)]
    for number, one in enumerate(cells):
        one["id"] = f"cell-{number}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}))
    return path


def toy_target(folder: Path, *sources: str, **options) -> Target:
    """The counting study with a notebook made of the given cells."""
    sys.path.insert(0, str(TOYS)) if str(TOYS) not in sys.path else None
    from counting import Params

    return Target("counting", write_notebook(folder / "counting.ipynb", *sources, **options), Params)


def private_checkout(folder: Path, notebooks: dict[str, list[str]]) -> dict[str, str]:
    """Environment in which `python -m flashstudy` is a copy of the package whose studies are the named notebooks."""
    package = folder / "src" / "flashstudy"
    shutil.copytree(
        checkout.root() / "src" / "flashstudy", package, ignore=shutil.ignore_patterns("studies", "__pycache__")
    )
    (folder / "data").mkdir()
    for name in ("pyproject.toml", "data/claims.csv"):
        shutil.copy(checkout.root() / name, folder / name)
    (package / "studies").mkdir()
    (package / "studies" / "__init__.py").write_text(f"READING_ORDER = {tuple(notebooks)!r}\n")
    for name, sources in notebooks.items():
        shutil.copy(TOYS / "counting.py", package / "studies" / f"{name}.py")
        path = write_notebook(folder / "notebooks" / f"{name}.ipynb", *sources, package="flashstudy.studies.")
        path.write_text(path.read_text().replace("studies.counting", f"studies.{name}"))
    return {"PYTHONPATH": str(folder / "src")}

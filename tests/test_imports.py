"""The house holds: imports point down, the ground floor is light, modules and functions are short, names agree."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from flashstudy.facts import checkout

PACKAGE = checkout.root() / "src" / "flashstudy"
MODULES = sorted(PACKAGE.rglob("*.py"))
FLOORS = ("facts", "compress", "measure", "studies", "runs", "share", "cli")
BELOW = {floor: FLOORS[: height + 1] for height, floor in enumerate(FLOORS)}
BELOW["predict"] = ("facts", "predict")
BELOW |= {floor: (*BELOW[floor], "predict") for floor in FLOORS[FLOORS.index("studies") :]}
BELOW |= {"__init__": (), "__main__": ("cli",)}


def floor_of(module: Path) -> str:
    """The folder of a module, or its own name on the top level."""
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_floors(module: Path, source: str) -> set[str]:
    """The floors that a module's imports name, wherever in the module they stand; relative ones are resolved."""
    package = ("flashstudy", *module.relative_to(PACKAGE).parent.parts)
    floors = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            floors |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("flashstudy.")}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            path = (*base, *(node.module or "").split(".")) if node.module else base
            if path[:1] == ("flashstudy",):
                floors |= {path[1]} if len(path) > 1 else {alias.name for alias in node.names} & BELOW.keys()
    return floors


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after the statement."""
    script = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_imports_point_down(module):
    floor = floor_of(module)
    allowed = BELOW[floor]
    too_high = imported_floors(module, module.read_text(encoding="utf-8")) - set(allowed)
    assert not too_high, f"{floor} may import {allowed}, not {sorted(too_high)}"


def test_an_import_that_points_up_would_be_seen():
    module = PACKAGE / "measure" / "planted.py"
    for source in (
        "from flashstudy.studies import task_time",
        "import flashstudy.studies.task_time",
        "def late():\n    from ..studies import task_time",
        "from .. import studies",
        "from flashstudy import studies",
    ):
        assert imported_floors(module, source) == {"studies"}
    assert imported_floors(module, "from .timing import compare\nfrom torch import nn") == {"measure"}
    assert "studies" not in BELOW["measure"]
    assert "predict" not in BELOW["measure"]


def test_facts_load_neither_torch_nor_transformers():
    names = [module.stem for module in sorted((PACKAGE / "facts").glob("[a-z]*.py"))]
    assert {"hardware", "models", "claims"} <= set(names)
    loaded = loaded_by(
        f"from flashstudy.facts import {', '.join(names)}\nmodels.load(), hardware.load(), claims.load()"
    )
    assert "flashstudy" in loaded
    assert not loaded & {"torch", "transformers", "torchao"}


def test_predictions_need_no_torch():
    assert not loaded_by("import flashstudy.predict.roofline") & {"torch", "transformers", "pandas"}


def test_the_command_line_starts_without_torch_and_pandas():
    assert not loaded_by("import flashstudy.cli") & {"torch", "transformers", "pandas"}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_modules_and_functions_are_short(module):
    source = module.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 300
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert not [node.name for node in functions if node.end_lineno - node.lineno >= 40]


def test_no_module_is_a_drawer():
    assert not [module for module in MODULES if module.stem in ("utils", "util", "helpers", "common", "misc")]


def test_one_name_in_four_places():
    from flashstudy.studies import READING_ORDER

    assert READING_ORDER
    for name in READING_ORDER:
        assert (PACKAGE / "studies" / f"{name}.py").is_file()
        assert (checkout.notebooks_dir() / f"{name}.ipynb").is_file()
        assert (checkout.root() / "tests" / f"test_{name}.py").is_file()


def test_no_notebook_stands_outside_the_reading_order():
    from flashstudy.studies import READING_ORDER

    assert {path.stem for path in checkout.notebooks_dir().glob("*.ipynb")} == set(READING_ORDER)

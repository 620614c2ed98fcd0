"""Static rules that hold for every notebook: the anatomy, the parameters cell, no logic, enough prose."""

import ast
import importlib
import json
import re

import pytest

from flashstudy.facts import checkout
from flashstudy.studies import READING_ORDER

HEADINGS = ["Hypothesis", "Measurement", "Table", "Figure", "Verdict", "Limits", "Provenance"]
WORDS_AT_MOST = {"#": 80, "## Hypothesis": 120, "## Limits": 120}


def notebook(name: str) -> dict:
    return json.loads((checkout.notebooks_dir() / f"{name}.ipynb").read_text())


def cells(name: str, kind: str) -> list[dict]:
    return [cell | {"text": "".join(cell["source"])} for cell in notebook(name)["cells"] if cell["cell_type"] == kind]


def parameters_cell(name: str) -> str:
    (cell,) = [cell for cell in cells(name, "code") if "parameters" in cell["metadata"].get("tags", [])]
    return cell["text"]


def n_words(text: str) -> int:
    return len(re.findall(r"\w[\w'-]*", re.sub(r"\$\$.*?\$\$", "", text, flags=re.S)))


@pytest.mark.parametrize("name", READING_ORDER)
def test_parameters_cell_equals_the_schema(name):
    params = importlib.import_module(f"flashstudy.studies.{name}").Params
    assigned = {node.target.id: ast.literal_eval(node.value) for node in ast.parse(parameters_cell(name)).body}
    assert assigned == params().model_dump(mode="json")
    assert list(assigned) == list(params.model_fields)


@pytest.mark.parametrize("name", READING_ORDER)
def test_parameters_carry_a_type_and_help_that_papermill_can_read(name):
    for line in parameters_cell(name).splitlines():
        assert re.fullmatch(r"\w+: (str|int|float|bool|list\[\w+\]) = [^=#]+  # [^=#]+", line), line


@pytest.mark.parametrize("name", READING_ORDER)
def test_notebook_follows_the_anatomy(name):
    markdown = [cell["text"] for cell in cells(name, "markdown")]
    titles = [line for text in markdown for line in text.splitlines() if line.startswith("# ")]
    assert len(titles) == 1 and titles[0].endswith("?"), "one H1, and it is a question"
    headings = [line[3:] for text in markdown for line in text.splitlines() if line.startswith("## ")]
    assert headings == HEADINGS
    for text in markdown:
        for start, limit in WORDS_AT_MOST.items():
            if text.startswith(start + " ") or text.startswith(start + "\n"):
                assert n_words(text) <= limit, f"{n_words(text)} words in {start!r}, at most {limit}"


@pytest.mark.parametrize("name", READING_ORDER)
def test_notebook_holds_no_logic(name):
    for cell in cells(name, "code"):
        tree = ast.parse(cell["text"])
        logic = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.Lambda, ast.ListComp, ast.If, ast.Try)
        assert not [node for node in ast.walk(tree) if isinstance(node, logic)], cell["text"]
        assert len(cell["text"].splitlines()) <= 15


@pytest.mark.parametrize("name", READING_ORDER)
def test_notebook_has_more_prose_than_code(name):
    code = [cell["text"].splitlines() for cell in cells(name, "code")]
    lines = sum(len(source) for source in code)
    assert sorted(len(source) for source in code)[len(code) // 2] <= 4
    assert sum(n_words(cell["text"]) for cell in cells(name, "markdown")) >= 5 * lines


@pytest.mark.parametrize("name", READING_ORDER)
def test_notebook_is_committed_without_outputs(name):
    for cell in cells(name, "code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None
    assert "papermill" not in notebook(name)["metadata"]


def test_index_lists_every_notebook_with_its_question():
    index = (checkout.notebooks_dir() / "README.md").read_text()
    listed = re.findall(r"\| \[(\w+)\]\(\1\.ipynb\) \| (.+?) \|", index)
    questions = [(name, cells(name, "markdown")[0]["text"].splitlines()[0][2:]) for name in READING_ORDER]
    assert listed == questions

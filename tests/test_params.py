"""Parameters are refused or coerced by the schema, before anything runs."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, Field
from toy_notebooks import TOYS

from flashstudy.runs import launch, profiles, schema
from flashstudy.runs.schema import RefusedError
from flashstudy.studies import READING_ORDER

sys.path.insert(0, str(TOYS))
from counting import Params


def check(**values: Any) -> BaseModel:
    return schema.validate(Params, values, study="counting")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("tolerance", "1e-4", 1e-4),
        ("tolerance", "2", 2.0),
        ("model", "007", "007"),
        ("model", "1_000", "1_000"),
        ("model", "no", "no"),
        ("model", "None", "None"),
        ("model", "1e-4", "1e-4"),
        ("model", "a=b, 'c'", "a=b, 'c'"),
        ("rows", "007", 7),
        ("rows", "1_0", 10),
        ("fast", "no", False),
        ("fast", "true", True),
        ("bits", "[3, 4]", [3, 4]),
        ("bits", "3, 4", [3, 4]),
        ("bits", "8", [8]),
        ("kinds", "q,no", ["q", "no"]),
        ("kinds", '["a,b", "07"]', ["a,b", "07"]),
        ("kinds", "", []),
        ("level", "high", "high"),
        ("limit", "null", None),
        ("limit", "None", None),
        ("limit", "12", 12),
    ],
)
def test_text_takes_the_type_that_the_schema_asks_for(name, text, value):
    found = getattr(check(**{name: text}), name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("rows", "many", "'many' is not an integer; allowed: integer ≥ 1, ≤ 100"),
        ("rows", "4.0", "'4.0' is not an integer"),
        ("rows", "None", "'None' is not an integer"),
        ("rows", 101, "less than or equal to 100"),
        ("rows", True, "valid integer"),
        ("rows", np.int64(3), "is a int64"),
        ("tolerance", "nan", "not a finite number"),
        ("tolerance", float("inf"), "not a finite number"),
        ("tolerance", "1e999", "not a finite number"),
        ("tolerance", "0", "greater than 0"),
        ("tolerance", [1.0], "valid number"),
        (
            "bits",
            "[3, 99]",
            r"bits\[1\]: 99: .*less than or equal to 16; allowed: list of integer ≥ 2, ≤ 16 \(at least 1\)",
        ),
        ("bits", "[3, true]", r"bits\[1\]: True"),
        ("bits", "[3", "not JSON"),
        ("bits", "", "at least 1 item"),
        ("bits", 4, "valid array"),
        ("kinds", [1.5, float("nan")], "not a finite number"),
        ("model", 7, "valid string"),
        ("model", False, "valid string"),
        ("model", Path("models/a"), "is a PosixPath"),
        ("fast", "maybe", "'maybe' is neither true nor false"),
        ("level", "middle", "one of low, high"),
    ],
)
def test_what_does_not_fit_is_refused_with_name_value_and_what_is_allowed(name, value, complaint):
    with pytest.raises(RefusedError, match=complaint) as caught:
        check(**{name: value})
    assert str(caught.value).startswith(f"counting: parameter {name}") and "; allowed: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["row", "Rows", "bits_", "x=1;print(1);y", "rows;import os", "__class__", "model_config"]
)
def test_an_unknown_name_is_refused_even_with_code_in_it(name):
    with pytest.raises(RefusedError, match="unknown parameter .*; allowed: model, rows"):
        check(**{name: 1})


def test_a_misspelt_name_gets_a_suggestion():
    with pytest.raises(RefusedError, match=r"'Rows' \(did you mean rows\?\)"):
        check(Rows=3)


@pytest.mark.parametrize("name", ["hf_token", "HF_TOKEN", "apiKey", "key", "db_password", "client.secret"])
def test_a_secret_is_refused_and_its_value_not_repeated(name):
    with pytest.raises(RefusedError, match="looks like a secret") as caught:
        schema.assignments([f"{name}=hunter2"])
    assert "hunter2" not in str(caught.value)
    with pytest.raises(RefusedError, match="looks like a secret"):
        check(**{name: "hunter2"})


def test_counts_of_tokens_are_no_secrets():
    class Tokens(BaseModel):
        input_tokens: int = 256
        keys_per_row: int = 1

    assert schema.validate(Tokens, {"input_tokens": "64"}, study="x").input_tokens == 64


def test_assignments_split_at_the_first_equals_sign():
    assert schema.assignments(["a=b=c", "empty="]) == {"a": "b=c", "empty": ""}
    with pytest.raises(RefusedError, match="'rows' has no value; allowed: name=value"):
        schema.assignments(["rows"])
    with pytest.raises(RefusedError, match="given twice"):
        schema.assignments(["rows=1", "rows=2"])


def test_a_rule_across_parameters_is_told_without_a_traceback():
    class Ordered(BaseModel):
        low: int = 1
        high: int = 2

        def model_post_init(self, _):
            if self.low > self.high:
                raise ValueError(f"low {self.low} is above high {self.high}")

    with pytest.raises(RefusedError, match="^x: low 5 is above high 2$"):
        schema.validate(Ordered, {"low": 5}, study="x")


def test_parameters_with_nan_have_no_json():
    class Loose(BaseModel):
        a: float = 0.0
        b: tuple[float, ...] = (1.0,)

    assert schema.to_json(Loose(b=(1.0, 2.0))) == {"a": 0.0, "b": [1.0, 2.0]}
    with pytest.raises(ValueError, match="parameter b: nan is not a finite number"):
        schema.to_json(Loose(b=(1.0, float("nan"))))


def test_the_hash_of_parameters_depends_on_values_and_not_on_their_order():
    assert schema.parameters_hash({"a": 1, "b": [2]}) == schema.parameters_hash({"b": [2], "a": 1})
    assert schema.parameters_hash({"a": 1, "b": [2]}) != schema.parameters_hash({"a": 1, "b": [3]})
    assert schema.parameters_hash({"a": 1}) == "f9d86028"  # sha256 of {"a": 1}


def test_the_schema_is_described_in_words():
    words = {one.name: (one.allowed, one.default, one.description) for one in schema.describe(Params)}
    assert words["bits"] == ("list of integer ≥ 2, ≤ 16 (at least 1)", [8, 4], "a list of numbers")
    assert words["limit"] == ("integer or none", None, "a number or none")
    assert words["tolerance"] == ("number > 0", 0.5, "a number")


def test_parameters_reach_the_notebook_with_value_and_type_unchanged(tmp_path):
    from papermill.iorw import read_yaml_file
    from papermill.translators import PythonTranslator

    values = {
        "a": 1e-07,
        "b": "007",
        "c": "no",
        "d": "12:30:00",
        "e": [1.5, "x\"'\\\n{}"],
        "f": None,
        "g": True,
        "h": "中é😀",
    }
    command = launch.command(tmp_path / "{n}.ipynb", tmp_path, tmp_path, values, tmp_path)
    found: dict[str, Any] = {}
    exec(PythonTranslator.codify(read_yaml_file(command[command.index("-f") + 1])), found)
    assert {name: found[name] for name in values} == values
    assert command[3].format() == str(tmp_path / "{n}.ipynb")  # papermill formats the paths it is given


def test_the_kernel_is_this_interpreters_and_started_by_this_package(tmp_path):
    environment = launch.environment(tmp_path, "id", tmp_path, "quick", tmp_path)
    spec = json.loads((tmp_path / "kernels" / "python3" / "kernel.json").read_text())
    assert spec["argv"][:3] == [sys.executable, "-m", "flashstudy.runs.kernel"]
    assert "{connection_file}" in spec["argv"] and environment["JUPYTER_PATH"].startswith(str(tmp_path))


def test_papermill_starts_without_the_grammar_that_nobody_needs():
    code = (
        "import sys; from flashstudy.runs import executor; executor.skip_iri_grammar(); import nbformat; "
        "notebook = nbformat.v4.new_notebook(); nbformat.validate(notebook); "
        "print('jsonschema' in sys.modules, sys.modules['rfc3987_syntax'])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True", "None"]


@pytest.mark.parametrize("study", READING_ORDER)
def test_every_study_has_profiles_whose_overrides_its_schema_accepts(study):
    params_class = importlib.import_module(f"flashstudy.studies.{study}").Params
    assert study in profiles._studies(profiles.PROFILES_FILE)
    for name in profiles.PROFILES:
        profile = profiles.load(study, name)
        params = schema.validate(params_class, profile.overrides, study=study)
        assert all(getattr(params, key) != params_class.model_fields[key].default for key in profile.overrides)
        assert profile.expected_s < profile.wall_s


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("s: {quick: {overrides: {a: 1}}}", "the quick profile is the schema's defaults"),
        ("s: {quick: {wall: 5}}", r"unknown entries \['wall'\]"),
        ("s: {quick: {wall_s: 0}}", "wall_s: 0 is no number of seconds above 0"),
        ("s: {quick: {expected_s: .nan}}", "expected_s: nan"),
    ],
)
def test_a_wrong_profile_file_is_refused(tmp_path, text, complaint):
    path = tmp_path / "profiles.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        profiles.load("s", "quick", path)


def test_an_unknown_profile_is_refused():
    with pytest.raises(RefusedError, match="no profile named 'huge'; allowed: smoke, quick, full"):
        profiles.load("memory_bandwidth", "huge")


def test_a_secret_like_field_of_a_schema_cannot_be_given_either():
    class Leaky(BaseModel):
        access_token: str = Field("")

    with pytest.raises(RefusedError, match="looks like a secret"):
        schema.validate(Leaky, {"access_token": "x"}, study="x")

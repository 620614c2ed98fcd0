"""pyproject.toml is the one list of dependencies; constraints.txt pins it and environment.yml delegates to it."""

import re
import tomllib

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from flashstudy.facts import checkout

ROOT = checkout.root()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
REQUIREMENTS = [Requirement(text) for text in PROJECT["dependencies"] + sum(EXTRAS.values(), [])]
OTHERS = [requirement for requirement in REQUIREMENTS if requirement.name != PROJECT["name"]]


def test_every_requirement_is_pinned_inside_its_range():
    pins = {canonicalize_name(name): Version(version) for name, version in PINS.items()}
    outside = [r for r in OTHERS if pins.get(canonicalize_name(r.name)) not in r.specifier]
    assert not outside


def test_constraints_hold_plain_versions_only():
    odd = [version for version in PINS.values() if not re.fullmatch(r"\d[\w.]*", version)]
    assert not odd, "no local build, path or marker"
    assert PINS["torch"] == "2.13.0"


def test_conda_environment_delegates_to_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, installed = environment["dependencies"]
    assert environment["channels"] == ["conda-forge"]
    assert (python, pip, list(installed)) == ("python" + PROJECT["requires-python"], "pip", ["pip"])
    constraint, editable = installed["pip"]
    assert constraint == "-c constraints.txt"
    assert re.fullmatch(r"-e \.\[(\w+)\]", editable)[1] in EXTRAS


def test_contributing_gives_a_reason_for_every_dependency():
    reasons = (ROOT / "CONTRIBUTING.md").read_text()
    missing = [r.name for r in OTHERS if f"`{r.name}`" not in reasons]
    assert not missing


def test_notebook_stack_keeps_the_security_floors():
    floors = {r.name: r.specifier for r in REQUIREMENTS}
    assert Version("4.6.1") not in floors["jupyterlab"]
    assert Version("2.20") not in floors["jupyter-server"]

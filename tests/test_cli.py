"""What a user types, what comes back and with which exit code (`cli/`), in a private checkout of tiny notebooks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from toy_notebooks import SAVE, private_checkout

from flashstudy import cli
from flashstudy.facts import checkout

HANG_ONCE = """
import os, pathlib, subprocess, sys, time
marker = pathlib.Path(os.environ["TOY_MARKER"])
again = marker.exists()
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
marker.write_text(f"{os.getpid()} {worker.pid}")
time.sleep(0 if again else 600)
""".strip()
FAKE_SITE = """
def build(results, out):
    found = sorted(path.parent.parent.name for path in results[0].glob("*/*/run.json"))
    (out / "index.html").write_text(" ".join(found))
    return out / "index.html"
""".lstrip()
FAKE_CHECKPOINTS = """
class InputError(ValueError):
    pass


def fetch(progress=print):
    progress("fetching nothing")
    raise InputError("the wheel cannot be had; allowed: a network")
""".lstrip()


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """Environment of a checkout (in a path with a space) with a good, a hanging and a failing notebook."""
    folder = tmp_path_factory.mktemp("my checkout")
    notebooks = {"counting": [SAVE], "hanging": [HANG_ONCE, SAVE], "broken": ["1 / 0"]}
    added = private_checkout(folder, notebooks)
    package = folder / "src" / "flashstudy"
    (package / "share" / "site.py").write_text(FAKE_SITE)
    (package / "compress" / "checkpoints.py").write_text(FAKE_CHECKPOINTS)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLASHSTUDY_")}
    return inherited | added | {"TOY_MARKER": str(folder / "marker")}


def flashstudy(toys: dict, cwd: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-P", "-m", "flashstudy", *arguments]
    return subprocess.run(command, cwd=cwd, env=toys, capture_output=True, text=True, timeout=120)


def refusal(capsys, *arguments: str) -> str:
    """The one line that a refused command prints, after checking that it is one line and exit code 2."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
    return said.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["bake"], "No such command 'bake'; allowed: see flashstudy --help"),
        (["run", "--fast"], "No such option: --fast"),
        (["run"], "no notebook named; allowed: a name, or --all"),
        (["run", "memory_bandwith"], "(did you mean memory_bandwidth?); allowed: slowdown_attribution"),
        (["run", "notebooks/Memory_Bandwidth.ipynb"], "(did you mean memory_bandwidth?)"),
        (["run", "--all", "memory_bandwidth"], "allowed: one of the two"),
        (["run", "memory_bandwidth", "-p", "rows"], "'rows' has no value; allowed: name=value"),
        (["run", "memory_bandwidth", "-p", "hf_token=x"], "looks like a secret"),
        (["run", "memory_bandwidth", "--profile", "huge"], "allowed: smoke, quick, full"),
        (["run", "memory_bandwidth", "--timeout", "-1"], "allowed: a number of seconds above 0"),
        (["run", "memory_bandwidth", "--timeout", "soon"], "Invalid value for '--timeout'"),
        (["params", "nothing"], "no notebook named 'nothing'"),
        (["params"], "Missing argument 'name'; allowed: see flashstudy params --help"),
        (["site", "/no/such/folder"], "no results folder /no/such/folder; allowed: "),
        (["study", "--profile", "huge"], "no profile named 'huge'"),
    ],
)
def test_bad_input_is_one_line_that_says_what_is_allowed(capsys, arguments, complaint):
    assert complaint in refusal(capsys, *arguments)


def test_a_results_folder_that_cannot_be_written_is_refused_before_anything_runs(toys, tmp_path):
    (tmp_path / "file").write_text("")
    refused = flashstudy(toys, tmp_path, "run", "counting", "--results", "file")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"error: cannot write to the folder {tmp_path / 'file'}: File exists; allowed: --results with a writable folder\n"  # fmt: skip  # noqa: E501


def test_help_comes_without_loading_torch_or_pandas():
    code = "import sys; from flashstudy import cli\ntry: cli.main(['--help'])\nexcept SystemExit as end: print(end.code, sorted({'torch', 'pandas', 'transformers', 'matplotlib'} & set(sys.modules)))"  # noqa: E501
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.rstrip().endswith("0 []")
    for command in ("list", "params", "fetch", "run", "site", "machine", "study"):
        assert f" {command} " in said


def test_outside_its_checkout_the_package_says_so_in_one_line(tmp_path):
    source = checkout.root() / "src" / "flashstudy"
    shutil.copytree(source, tmp_path / "site" / "flashstudy", ignore=shutil.ignore_patterns("__pycache__"))
    refused = flashstudy(os.environ | {"PYTHONPATH": str(tmp_path / "site")}, tmp_path, "list")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("error: flashstudy runs from its repository only")


def test_list_and_params_answer_programs_and_people(toys, tmp_path):
    listed = json.loads(flashstudy(toys, tmp_path, "list", "--json").stdout)
    assert [one["name"] for one in listed] == ["counting", "hanging", "broken"]
    assert listed[0] == {"name": "counting", "question": "How many?", "expected_s": 30.0, "last_good_run": None}
    described = json.loads(flashstudy(toys, tmp_path, "params", "counting", "--json").stdout)
    assert described["parameters"][1] == {
        "name": "rows",
        "allowed": "integer ≥ 1, ≤ 100",
        "default": 3,
        "description": "rows of the result",
    }
    assert described["schema"]["properties"]["rows"]["maximum"] == 100
    text = flashstudy(toys, tmp_path, "params", "counting").stdout
    assert "rows = 3\n    rows of the result; integer ≥ 1, ≤ 100\n" in text


def gone_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return True
        time.sleep(0.1)
    return False


def test_ctrl_c_keeps_what_is_finished_ends_every_process_and_the_batch_can_be_run_again(toys, tmp_path):
    marker = Path(toys["TOY_MARKER"])
    marker.unlink(missing_ok=True)
    command = [sys.executable, "-m", "flashstudy", "run", "counting", "hanging", "broken", "--results", "my results"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=toys, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (marker.is_file() and len(marker.read_text().split()) == 2) and time.monotonic() < deadline:
        time.sleep(0.1)
    pids = [int(pid) for pid in marker.read_text().split()]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 1 and "Traceback" not in err
    assert "interrupted: 1 of 3 done and kept; the same command runs the batch again" in err
    assert gone_within(pids, 1.0)
    records = {
        path.parent.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("my results/*/*/run.json")
    }
    assert {name: record["status"] for name, record in records.items()} == {
        "counting": "done",
        "hanging": "interrupted",
    }
    assert records["hanging"]["reason"] == "stopped by SIGINT"
    again = flashstudy(toys, tmp_path, "run", "hanging", "-p", "rows=4", "--results", "my results", "--json")
    outcome = json.loads(again.stdout)[0]
    assert (again.returncode, outcome["status"]) == (0, "done")
    assert gone_within([int(pid) for pid in marker.read_text().split()], 1.0)
    assert "1/1 hanging: started, about 30 s\n" in again.stderr


def test_study_runs_everything_refreshes_the_site_and_ends_with_answers_and_its_path(toys, tmp_path):
    Path(toys["TOY_MARKER"]).write_text("")
    told = flashstudy(toys, tmp_path, "study", "--out", "my site")
    assert told.returncode == 1, told.stderr  # one notebook is broken and the models cannot be had
    assert told.stdout.splitlines() == [
        "counting: Counted 3 rows.",
        "hanging: Counted 3 rows.",
        "broken: no answer, failed: ZeroDivisionError: division by zero (cell 3: 1 / 0)",
        "",
        str(tmp_path / "my site" / "index.html"),
    ]
    assert "error: the wheel cannot be had; allowed: a network\n" in told.stderr
    assert told.stderr.count(f"The first page can be read: {tmp_path / 'my site' / 'index.html'}") == 1
    assert "✗ broken failed after " in told.stderr
    assert (tmp_path / "my site" / "index.html").read_text() == "broken counting hanging"  # after a failure too

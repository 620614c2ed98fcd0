"""Every way in which a run can end, mostly through real papermill runs of tiny notebooks."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from toy_notebooks import SAVE, TOYS, toy_target, write_notebook

from flashstudy.runs import display, endings, family, folders, inputs, launch, records, runner
from flashstudy.runs.schema import RefusedError

KILL = "import os; os.kill(os.getpid(), 9)"
RAISE = "result = 1\n\nresult.nope"
STRAY = "import subprocess, sys, pathlib; worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"  # noqa: E501
TELL_PID = "pathlib.Path({path!r}).write_text(str(worker.pid))"
STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path({path!r}).write_text(f"{{os.getpid()}} {{worker.pid}}")
folder = pathlib.Path(os.environ["FLASHSTUDY_RUN_DIR"])
(folder / "progress.json").write_text('{{"done": 2, "total": 5, "label": "int8"}}')
pathlib.Path({last!r}).touch()
time.sleep(600)
""".strip()


@pytest.fixture(autouse=True, scope="module")
def environment():
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("FLASHSTUDY_")]:
            patch.delenv(name)
        patch.setenv("PYTHONPATH", str(TOYS))
        yield


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """One batch with a killed kernel, a raising cell, and last a good run that leaves a worker behind."""
    folder = tmp_path_factory.mktemp("batch")
    pid_file = folder / "stray pid"
    cells = [[KILL], [RAISE], [STRAY, TELL_PID.format(path=str(pid_file)), SAVE]]
    jobs = [toy_target(folder / str(number), *sources) for number, sources in enumerate(cells)]
    events: list[str] = []
    outcomes = runner.run_batch(
        jobs, overrides={"rows": "5"}, results=folder / "results", on_event=lambda kind, **_: events.append(kind)
    )
    return outcomes, events, int(pid_file.read_text())


def record_of(outcome: runner.Outcome) -> dict:
    return json.loads((outcome.path / "run.json").read_text())


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_killed_kernel_is_told_as_probable_lack_of_memory_with_the_figures_to_judge_it(batch):
    outcome = batch[0][0]
    assert (outcome.status, outcome.exit_code) == ("killed", 138)
    assert outcome.reason.startswith("the kernel died, probably out of memory (largest process ")
    assert record_of(outcome)["peak_memory_bytes"] > 20e6  # a Python kernel has more


def test_a_cell_that_raises_fails_with_its_error_and_the_cell(batch):
    outcome = batch[0][1]
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert outcome.reason == "AttributeError: 'int' object has no attribute 'nope' (cell 4: result = 1)"


def test_the_rest_of_the_batch_goes_on_and_every_run_is_recorded(batch):
    outcomes, events, _ = batch
    assert [outcome.status for outcome in outcomes] == ["killed", "failed", "done"]
    assert events[0] == "batch_started" and events[-1] == "batch_ended" and events.count("run_ended") == 3
    for outcome in outcomes:
        record = record_of(outcome)
        assert [record[key] for key in ("status", "reason", "exit_code", "start", "end")] == [
            *(outcome.status, outcome.reason, outcome.exit_code, outcome.start, outcome.end)
        ]
        assert record["started_by"] == "runner" and record["overrides"] == {"rows": 5}
        assert (outcome.path / "log.txt").stat().st_size > 0 and (outcome.path / "executed.ipynb").is_file()
    assert not list(outcomes[0].path.parent.glob(".*")), "an attempt was left"


def test_only_the_good_run_is_read_and_it_holds_the_parameters_asked_for(batch):
    run = records.load("counting", batch[0][2].path.parents[1])
    assert run.path == batch[0][2].path and run.run_id == batch[0][2].run_id
    assert len(run.result) == 5 and run.params["rows"] == 5 and run.notebook.name == "executed.ipynb"


def test_a_worker_that_a_notebook_left_behind_is_ended(batch):
    assert gone(batch[2])


def test_the_next_expectation_is_the_last_duration_with_the_same_parameters(batch):
    outcome = batch[0][2]
    results = outcome.path.parents[1]
    target = toy_target(results.parent / "again", SAVE)
    same, other = (
        runner.plan([target], profile="quick", overrides={"rows": rows}, results=results)[0] for rows in (5, 6)
    )
    assert same.expected_s == folders.seconds_between(outcome.start, outcome.end)
    assert other.expected_s == 30


def test_a_run_past_its_wall_clock_is_ended_with_all_its_processes(tmp_path, monkeypatch):
    """The clock jumps once the notebook is at its stubborn cell, so a slow machine cannot end it before."""
    pids = tmp_path / "pids"
    at_work = lambda: pids.is_file() and (tmp_path / "at work").is_file()  # noqa: E731
    monkeypatch.setattr(runner.Watch, "elapsed_s", property(lambda _: 700.0 if at_work() else 1.0))
    target = toy_target(tmp_path, STUBBORN.format(path=str(pids), last=str(tmp_path / "at work")))
    outcome = runner.run_batch([target], results=tmp_path / "r")[0]
    assert (outcome.status, outcome.exit_code) == ("timed_out", -15)
    assert outcome.reason == "ran past its limit of 600 s at step 2 of 5 (int8)"
    assert record_of(outcome)["status"] == "timed_out" and record_of(outcome)["reason"] == outcome.reason
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_parallel_batches_in_hostile_surroundings_do_not_disturb_each_other(tmp_path, monkeypatch):
    """A user's python3 kernel of another interpreter, a module random.py in the folder, a path that needs quoting."""
    home = tmp_path / "Über {rows} 中 'x'"
    for kernels in (home / "user" / "kernels", home / "path" / "kernels"):
        (kernels / "python3").mkdir(parents=True)
        spec = {"argv": ["/bin/false", "{connection_file}"], "display_name": "hijacked", "language": "python"}
        (kernels / "python3" / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(home / "user"))
    monkeypatch.setenv("JUPYTER_PATH", str(home / "path"))
    monkeypatch.setenv("MPLBACKEND", "no_such_backend")
    (home / "random.py").write_text("raise SystemExit('taken by a file of the current folder')")
    monkeypatch.chdir(home)
    targets = [
        toy_target(home / str(i), "import matplotlib, random, sys; print(sys.executable)", SAVE) for i in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        batches = list(pool.map(lambda target: runner.run_batch([target], results=Path("results")), targets))
    outcomes = [outcome for batch in batches for outcome in batch]
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [("done", "")] * 2
    assert len({outcome.path for outcome in outcomes}) == 2
    assert all(outcome.path.parent == home / "results" / "counting" for outcome in outcomes)
    assert all(sys.executable in (outcome.path / "log.txt").read_text() for outcome in outcomes)


def test_plain_papermill_ends_with_a_run_json_started_by_the_notebook(tmp_path, monkeypatch):
    notebook = write_notebook(tmp_path / "a b" / "counting.ipynb", SAVE)
    arguments = [str(notebook), str(tmp_path / "out.ipynb"), "-p", "rows", "2", "--no-progress-bar"]
    subprocess.run([sys.executable, "-m", "papermill", *arguments], cwd=tmp_path, check=True, capture_output=True)
    run = records.load("counting", tmp_path / "results")
    assert run.record["started_by"] == "notebook" and run.profile == "quick" and len(run.result) == 2
    assert run.path.parent == tmp_path / "results" / "counting"


def test_a_kernel_that_cannot_start_is_told_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "ipykernel").mkdir()
    (tmp_path / "ipykernel" / "__init__.py").write_text("raise ImportError('half an installation')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    outcome = runner.run_batch([toy_target(tmp_path, SAVE)], results=tmp_path / "r")[0]
    assert outcome.status == "failed"
    assert outcome.reason == "the Python kernel did not start: ImportError: half an installation"


def test_a_model_text_or_device_that_is_not_here_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "notes.txt").write_text(" ")
    (tmp_path / "empty").mkdir()
    for overrides, said in (
        ({"model": "/nonexistent"}, "parameter model: model '/nonexistent' is not found; allowed: a default model"),
        ({"model": str(tmp_path / "notes.txt")}, "file notes.txt is no GGUF file"),
        ({"model": str(tmp_path / "empty")}, "model folder empty has no config.json"),
        ({"text": str(tmp_path / "notes.txt")}, "parameter text: text file notes.txt is empty"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not here; allowed: cpu"),
    ):
        with pytest.raises(RefusedError, match=re.escape(said)):
            runner.run_batch(["slowdown_attribution"], overrides=overrides, results=tmp_path / "r")
    assert not (tmp_path / "r").exists()
    inputs.check({"model": "owner/name@abc", "text": "pydoc", "device": "cpu"})


def quick_command(code: str):
    return lambda *_: [sys.executable, "-c", code]


def test_a_killed_papermill_counts_as_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "command", quick_command(KILL))
    outcome = runner.run_batch([toy_target(tmp_path)], results=tmp_path / "r")[0]
    assert (outcome.status, outcome.exit_code) == ("killed", -9) and "SIGKILL" in outcome.reason


def test_a_notebook_that_saves_nothing_is_no_success(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "command", quick_command("pass"))
    outcome = runner.run_batch([toy_target(tmp_path)], results=tmp_path / "r")[0]
    assert (outcome.status, outcome.exit_code) == ("failed", 0)
    assert outcome.reason == "the notebook came to its end without saving a result (records.save)"


def test_a_run_on_other_parameters_than_asked_for_is_no_success(tmp_path, monkeypatch):
    origin = json.dumps({"parameters": {"rows": 3}})
    code = f"import os; os.chdir(os.environ['FLASHSTUDY_RUN_DIR']); open('provenance.json', 'w').write({origin!r}); open('result.parquet', 'w')"  # noqa: E501
    monkeypatch.setattr(launch, "command", quick_command(code))
    job = runner.plan([toy_target(tmp_path)], profile="quick", overrides={"rows": 5}, results=tmp_path / "r")[0]
    outcome = runner.run_one(runner.replace(job, parameters={"rows": 5}), tmp_path / "r")
    assert (outcome.status, outcome.reason) == ("failed", "the notebook ran with rows = 3, not with 5")


def test_a_full_disk_is_one_line_and_the_batch_goes_on(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "run.json")

    monkeypatch.setattr(launch, "command", quick_command("raise ValueError('first trouble')"))
    monkeypatch.setattr(folders, "finish", full)
    outcomes = runner.run_batch([toy_target(tmp_path)] * 2, results=tmp_path / "r")
    assert [outcome.status for outcome in outcomes] == ["failed", "failed"]
    assert outcomes[0].reason.startswith(
        "ValueError: first trouble; could not be carried out or recorded: [Errno 28] No space left"
    )
    monkeypatch.setattr(folders, "make_attempt", full)
    assert runner.run_batch([toy_target(tmp_path)], results=tmp_path / "r")[0].status == "refused"


def test_nothing_runs_when_one_thing_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "run_one", lambda *_: pytest.fail("something ran"))
    good, results = toy_target(tmp_path, SAVE), tmp_path / "r"
    untagged = toy_target(tmp_path / "untagged", SAVE, tags=())
    absent = runner.Target("counting", tmp_path / "absent.ipynb", good.params_class)
    (tmp_path / "file").write_text("")
    for names, options, complaint in [
        ([good, "length_crosover"], {}, r"no notebook named 'length_crosover' \(did you mean length_crossover\?\)"),
        ([good], {"overrides": {"Rows": 1}}, "unknown parameter 'Rows'"),
        ([good], {"overrides": {"rows": "many"}}, "'many' is not an integer"),
        ([good], {"overrides": {"x=1;import os;y": 1}}, "unknown parameter"),
        ([good], {"profile": "fast"}, "no profile named 'fast'"),
        ([good], {"timeout_s": 0}, "a timeout of 0 s"),
        ([good], {"timeout_s": float("nan")}, "a timeout of nan s"),
        ([good], {"results": tmp_path / "file"}, "cannot write to the folder .*file: File exists; allowed: --results"),
        ([good], {"results": tmp_path / "file" / "x"}, "Not a directory"),
        ([good, untagged], {}, "no cell tagged 'parameters'"),
        ([absent], {}, "cannot read the notebook .*absent.ipynb: No such file"),
        ([], {}, "no notebook named"),
    ]:
        with pytest.raises(RefusedError, match=complaint):
            runner.run_batch(names, **({"results": results} | options))
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None if name == "ipykernel" else name)
    with pytest.raises(RefusedError, match="ipykernel not installed in "):
        runner.run_batch([good], results=results)


def test_a_stop_that_came_before_a_run_started_leaves_it_out(tmp_path):
    target = toy_target(tmp_path)
    outcomes = runner.run_batch(
        [target],
        results=tmp_path / "r",
        on_event=lambda kind, **_: os.kill(os.getpid(), runner.signal.SIGINT) if kind == "batch_started" else None,
    )
    assert outcomes == [] and not (tmp_path / "r" / "counting").exists()


def test_a_display_that_breaks_takes_the_notebook_down_with_it(tmp_path, monkeypatch):
    def broken(kind, **details):
        if kind == "step":
            raise RuntimeError("no terminal")

    monkeypatch.setattr(launch, "command", quick_command("import time; time.sleep(600)"))
    with pytest.raises(RuntimeError, match="no terminal"):
        runner.run_batch([toy_target(tmp_path)], results=tmp_path / "r", on_event=broken)
    (attempt,) = (tmp_path / "r" / "counting").iterdir()
    assert family.members(attempt) == []


def test_a_process_without_parent_is_found_by_its_environment(tmp_path):
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"  # noqa: E501
    subprocess.run([sys.executable, "-c", code], env=os.environ | {records.RUN_DIR: str(tmp_path)}, check=True)
    assert len(family.members(tmp_path)) == 1 and family.members(tmp_path / "other") == []
    assert family.sweep(tmp_path) == [] and family.members(tmp_path) == []


def test_the_reason_is_one_line_of_bounded_length(tmp_path):
    assert endings.one_line("a\n\x1b[31mb\x1b[0m  c") == "a b c"
    assert len(endings.one_line("x" * 1000)) == endings.LONGEST_REASON
    (tmp_path / "log.txt").write_text("Traceback:\n  File x\nOSError: [Errno 28] No space left on device\nbye")
    assert endings.judge(tmp_path, 1, {}, "") == ("failed", "OSError: [Errno 28] No space left on device")


def test_the_rest_is_what_is_left_of_this_notebook_plus_the_later_ones(tmp_path):
    target = toy_target(tmp_path)
    jobs = [runner.Job(target, "quick", {}, {"rows": expected_s}, expected_s, 60) for expected_s in (10, 20, 40)]
    assert display.remaining_s(jobs, jobs[1], elapsed_s=5) == 15 + 40
    assert display.remaining_s(jobs, jobs[1], elapsed_s=99) == 40
    assert display.step_of({"done": 1, "total": 4, "label": "int8"}) == (0.25, "int8")
    assert display.step_of({"done": "x", "total": 0}) == display.step_of(None) == (0.0, "starting")
    assert display.clock(45.4) == "45 s" and display.clock(200) == "3 min 20 s"

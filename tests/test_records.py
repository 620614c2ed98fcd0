"""A run's folder is whole or invisible, and what is read is what was saved (`runs/records.py`, `folders.py`)."""

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from toy_notebooks import TOYS

from flashstudy.facts.checkout import root
from flashstudy.runs import folders, records

sys.path.insert(0, str(TOYS))
from counting import Params, run


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch) -> Path:
    for name in [name for name in os.environ if name.startswith("FLASHSTUDY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(records.RESULTS, str(tmp_path / "my results"))
    return tmp_path / "my results"


def figure(n_points: int) -> Figure:
    drawn = Figure(figsize=(4, 3))
    drawn.subplots().plot(range(n_points), [i * i % 7 for i in range(n_points)], "o")
    return drawn


def test_what_is_loaded_is_what_was_saved(results):
    params = Params(rows=4, model="höhe 中")
    frame = run(params)
    frame.attrs["provenance"] = {"model_sha256": "ab" * 32}
    path = records.save(frame, params, figures=[figure(5), figure(6)])
    loaded = records.load("counting")
    pd.testing.assert_frame_equal(loaded.result, run(params))
    assert loaded.path == path == results / "counting" / loaded.run_id
    assert loaded.params == loaded.provenance["parameters"] == params.model_dump()
    assert [figure.name for figure in loaded.figures] == ["figure_1.svg", "figure_2.svg"]
    assert (loaded.status, loaded.profile, loaded.notebook) == ("done", "quick", None)
    assert loaded.record["started_by"] == "notebook" and loaded.record["exit_code"] == 0
    assert loaded.record["start"] <= loaded.record["end"]
    assert frame.attrs, "the caller's frame was changed"


def test_provenance_names_inputs_versions_commit_machine_seed_and_threads(results):
    frame = run(Params(seed=7))
    frame.attrs["provenance"] = {"text_sha256": "cd" * 32}
    path = records.save(frame, Params(seed=7))
    origin = json.loads((path / "provenance.json").read_text())
    assert origin["inputs"] == {"text_sha256": "cd" * 32}
    assert origin["versions"]["pandas"] == pd.__version__ and origin["versions"]["python"] == sys.version.split()[0]
    assert set(origin["commit"]) == {"sha", "dirty"} and origin["seed"] == 7
    assert len(origin["machine"]["fingerprint"]) == 12 and origin["n_threads"]["usable_cpus"] >= 1
    assert str(root()) not in json.dumps(origin), "a machine path in what people share"


def test_a_run_that_measured_nothing_is_not_a_result(results):
    with pytest.raises(ValueError, match="no rows: a run that measured nothing is not a result"):
        records.save(run(Params()).head(0), Params())
    skipped = run(Params()).assign(skipped="no GPU here")
    with pytest.raises(ValueError, match=r"every configuration was skipped \(no GPU here\)"):
        records.save(skipped, Params())
    assert not results.exists(), "a refused result left a folder behind"
    records.save(skipped.assign(skipped=["no GPU here", "", ""]), Params())


def test_columns_outside_the_vocabulary_and_mixed_types_are_refused_and_leave_nothing(results):
    with pytest.raises(ValueError, match=r"unknown result columns \['speed'\]"):
        records.save(run(Params()).assign(speed=1.0), Params())
    with pytest.raises(ValueError, match="one type a column"):
        records.save(run(Params()).assign(note=[1, "a", [2]]), Params())
    frame = run(Params())
    frame.attrs["provenance"] = {"sha": float("nan")}
    with pytest.raises(ValueError, match="must be JSON"):
        records.save(frame, Params())
    assert list(results.rglob("*.parquet")) == [] and records.load("counting") is None


def test_parameters_with_nan_are_refused():
    with pytest.raises(ValueError, match="parameter tolerance: nan is not a finite number"):
        records.save(run(Params()), Params.model_construct(tolerance=float("nan")))


def test_parameters_that_belong_to_no_study_are_refused():
    class Params(records.BaseModel):
        __module__ = "__main__"

    with pytest.raises(ValueError, match="needs the Params of a study's module"):
        records.save(pd.DataFrame({"time_s": [1.0]}), Params())


def test_equal_figures_give_equal_small_files_and_a_large_one_becomes_a_png(tmp_path):
    first = records.save_figure(figure(50), tmp_path / "a").read_bytes()
    assert first == records.save_figure(figure(50), tmp_path / "b").read_bytes()
    assert b"<text" in first, "text drawn as outlines"
    large = records.save_figure(figure(5000), tmp_path / "c")
    assert large.name == "c.png" and not (tmp_path / "c.svg").exists()


def test_runs_in_the_same_second_get_folders_of_their_own(results):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: folders.make_attempt(results, "counting", "0123abcd"), range(24)))
    ids = [run_id for run_id, _ in made]
    assert len(set(ids)) == 24 and all(path.name == f".attempt-{run_id}" for run_id, path in made)
    run_id, attempt = made[0]
    folders.finish(attempt, {"status": "done"})
    again, _ = folders.make_attempt(results, "counting", "0123abcd")
    assert again not in ids, "the id of a finished run was given again"


def test_broken_and_unfinished_folders_are_passed_over(results):
    good = records.save(run(Params()), Params())
    record = json.loads((good / "run.json").read_text())
    later = record | {"end": "2999-01-01T00:00:00.000Z"}
    for name, text in {
        "a": json.dumps(later),  # promises a result that is not there
        "b": json.dumps(later)[:40],
        "d": "[1, 2]",
        "e": json.dumps(later | {"name": "other"}),
        "f": json.dumps({"status": "done", "name": "counting"}),
    }.items():
        (results / "counting" / name).mkdir()
        (results / "counting" / name / "run.json").write_text(text)
    failed = shutil.copytree(good, results / "counting" / "c")  # whole, but its run.json says that it failed
    (failed / "run.json").write_text(json.dumps(later | {"status": "failed", "reason": "NameError"}))
    broken = results / "counting" / "g"
    broken.mkdir()
    for name in ("run.json", "provenance.json"):
        (broken / name).write_text(json.dumps(later | {"parameters": {}}))
    (broken / "result.parquet").write_bytes((good / "result.parquet").read_bytes()[:100])
    (results / "counting" / ".attempt-z").mkdir()
    (results / "counting" / "stray.txt").write_text("x")
    assert records.load("counting").path == good
    with pytest.raises(ValueError, match="is failed: NameError"):
        records.load_run(failed)
    with pytest.raises(ValueError, match="is damaged"):
        records.load_run(broken)
    with pytest.raises(ValueError, match="holds no finished run"):
        records.load_run(results / "counting" / "b")


def test_the_newest_good_run_of_the_profile_is_loaded(results, monkeypatch):
    records.save(run(Params(rows=1)), Params(rows=1))
    monkeypatch.setenv(records.PROFILE, "smoke")
    records.save(run(Params(rows=2)), Params(rows=2))
    records.save(run(Params(rows=3)), Params(rows=3))
    assert records.load("counting", profile="quick").params["rows"] == 1
    assert records.load("counting", profile="smoke").params["rows"] == 3
    assert records.load("counting", results_dir=results).params["rows"] == 3
    assert records.load("counting", profile="full") is None
    assert records.load("../counting") is None and records.load("counting", results_dir=results / "nowhere") is None


def test_under_the_runner_only_the_runner_writes_run_json(tmp_path, monkeypatch):
    attempt = tmp_path / ".attempt-7"
    monkeypatch.setenv(records.RUN_DIR, str(attempt))
    monkeypatch.setenv(records.STARTED_BY, "runner")
    assert records.save(run(Params()), Params()) == tmp_path / "7"
    assert {path.name for path in attempt.iterdir()} == {"result.parquet", "provenance.json"}
    monkeypatch.delenv(records.STARTED_BY)
    monkeypatch.setenv(records.RUN_DIR, str(tmp_path / "by hand"))
    assert records.save(run(Params()), Params()) == tmp_path / "by hand"
    assert json.loads((tmp_path / "by hand" / "run.json").read_text())["started_by"] == "notebook"


def test_a_json_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "run.json"
    folders.write_json(path, {"a": 1})
    with pytest.raises(ValueError):
        folders.write_json(path, {"a": float("nan")})
    assert folders.read_json(path) == {"a": 1} and [child.name for child in tmp_path.iterdir()] == ["run.json"]

"""A run's folder as a notebook writes it (`save`) and as everybody reads it (`load`).

The notebook writes result, provenance and figures; run.json, which alone says that the run is good, is written last by
whoever started the run: the runner, or `save` itself under plain papermill or JupyterLab.
"""

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from flashstudy.facts import columns
from flashstudy.runs import folders, provenance, schema

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

RUN_DIR = "FLASHSTUDY_RUN_DIR"  # one run's folder
RUN_ID = "FLASHSTUDY_RUN_ID"  # set by the runner beside it
RESULTS = "FLASHSTUDY_RESULTS"  # root of all results
PROFILE = "FLASHSTUDY_PROFILE"
STARTED_BY = "FLASHSTUDY_STARTED_BY"  # "runner": then run.json is the runner's to write
DEFAULT_PROFILE = "quick"
LARGEST_SVG_BYTES = 200_000
PNG_DPI = 144
# Text stays text and ids are the same every time: half the size, and equal figures give equal files.
SVG_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "flashstudy"}
_FIRST_IMPORT = folders.timestamp()  # the best guess of a hand-started run's start: notebooks import this first


@dataclass(frozen=True)
class Run:
    """One finished good run. `notebook` is None where the run was not executed by the runner."""

    name: str
    run_id: str
    path: Path
    result: "pd.DataFrame"
    provenance: dict[str, Any]
    status: str
    params: dict[str, Any]
    profile: str
    figures: list[Path]
    notebook: Path | None
    record: dict[str, Any]


def results_dir() -> Path:
    """Root of all results: FLASHSTUDY_RESULTS, else ./results; absolute."""
    return Path(os.environ.get(RESULTS) or "results").expanduser().absolute()


_results_root = results_dir  # `load` has an argument of that name


def run_dir() -> Path | None:
    """The folder of the run in progress, None where none was named."""
    return Path(os.environ[RUN_DIR]).expanduser().absolute() if os.environ.get(RUN_DIR) else None


def study_name(params: BaseModel) -> str:
    """The study that the parameters belong to: the last part of their class's module."""
    name = type(params).__module__.rsplit(".", 1)[-1]
    if not folders.STUDY_NAME.fullmatch(name):
        raise ValueError(f"save needs the Params of a study's module, got one of {type(params).__module__!r}")
    return name


def save(result: "pd.DataFrame", params: BaseModel, figures: Iterable["Figure"] = ()) -> Path:
    """The run's folder, now holding result.parquet, provenance.json and figure_1.svg, figure_2.svg and so on.

    A study may leave hashes of its model and text in `result.attrs["provenance"]`. Under the runner the path is where
    the folder will lie when the run has ended. Raises ValueError for a frame without rows or with columns outside the
    vocabulary, and for parameters with NaN; then nothing was written.
    """
    name, values = study_name(params), schema.to_json(params)
    _check(result)
    profile = os.environ.get(PROFILE) or DEFAULT_PROFILE
    given = run_dir()
    if given is None:
        run_id, folder = folders.make_attempt(results_dir(), name, schema.parameters_hash(values))
    else:
        run_id, folder = os.environ.get(RUN_ID) or given.name, given
        folder.mkdir(parents=True, exist_ok=True)
    try:
        inputs = result.attrs.get("provenance", {})
        folders.write_json(folder / folders.PROVENANCE, provenance.collect(name, run_id, profile, values, inputs))
        for number, figure in enumerate(figures, start=1):
            save_figure(figure, folder / f"figure_{number}")
        _write_parquet(result, folder / folders.RESULT)
        if os.environ.get(STARTED_BY) == "runner":
            return folders.final_path(folder)
        return folders.finish(folder, _notebook_record(name, run_id, profile, values))
    except BaseException:
        if given is None:  # ours alone, and half of it: no later reader should have to wonder
            shutil.rmtree(folder, ignore_errors=True)
        raise


def save_figure(figure: "Figure", stem: Path) -> Path:
    """The figure's file: SVG, or PNG where the SVG would be over 200 kB."""
    import matplotlib

    svg = stem.with_suffix(".svg")
    with matplotlib.rc_context(SVG_SETTINGS):
        figure.savefig(svg, bbox_inches="tight", metadata={"Date": None})
    if svg.stat().st_size <= LARGEST_SVG_BYTES:
        return svg
    svg.unlink()
    figure.savefig(stem.with_suffix(".png"), bbox_inches="tight", dpi=PNG_DPI)
    return stem.with_suffix(".png")


def load(name: str, results_dir: Path | str | None = None, profile: str | None = None) -> Run | None:
    """The newest good run of a study (of one profile, or of any), None where there is none.

    A folder whose files do not hold what run.json promises is passed over for the next one.
    """
    root = Path(results_dir) if results_dir is not None else _results_root()
    for path, record in folders.good_runs(root, name, profile):
        run = _read(path, record)
        if run is not None:
            return run
    return None


def load_run(path: Path | str) -> Run:
    """The good run in one folder. Raises ValueError in one line where the folder holds none."""
    path = Path(path)
    record = folders.read_json(path / folders.RUN_JSON)
    if record is None:
        raise ValueError(f"{path} holds no finished run; allowed: a folder results/NAME/RUN_ID with a run.json")
    if record.get("status") != folders.GOOD:
        raise ValueError(f"the run in {path} is {record.get('status')}: {record.get('reason')}")
    run = _read(path, record)
    if run is None:
        raise ValueError(f"the run in {path} is damaged: its result or provenance cannot be read")
    return run


def _read(path: Path, record: dict[str, Any]) -> Run | None:
    import pandas as pd
    import pyarrow

    origin = folders.read_json(path / folders.PROVENANCE)
    try:
        result = pd.read_parquet(path / folders.RESULT)
    except (OSError, ValueError, pyarrow.ArrowException):
        return None
    if origin is None or not isinstance(origin.get("parameters"), dict) or result.empty:
        return None
    notebook = path / folders.NOTEBOOK
    return Run(
        name=record["name"],
        run_id=path.name,
        path=path,
        result=result,
        provenance=origin,
        status=record["status"],
        params=origin["parameters"],
        profile=str(record.get("profile")),
        figures=sorted(path.glob("figure_*.*"), key=lambda figure: (len(figure.stem), figure.stem)),
        notebook=notebook if notebook.is_file() else None,
        record=record,
    )


def _check(result: "pd.DataFrame") -> None:
    if result.empty:
        raise ValueError("the result has no rows: a run that measured nothing is not a result")
    columns.check(result)
    if "skipped" in result and result["skipped"].fillna("").astype(bool).all():
        first = result["skipped"].iloc[0]
        raise ValueError(f"every configuration was skipped ({first}): a run that measured nothing is not a result")
    try:
        json.dumps(result.attrs.get("provenance", {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f'result.attrs["provenance"] must be JSON: {error}') from None


def _write_parquet(result: "pd.DataFrame", path: Path) -> None:
    import pyarrow

    plain = result.reset_index(drop=True)
    plain.attrs = {}  # its content is in provenance.json
    temporary = path.with_name(f".{path.name}")
    try:
        plain.to_parquet(temporary)
    except pyarrow.ArrowException as error:
        raise ValueError(f"the result cannot be stored, one type a column is needed: {error}") from None
    os.replace(temporary, path)


def _notebook_record(name: str, run_id: str, profile: str, values: dict[str, Any]) -> dict[str, Any]:
    times = {"start": _FIRST_IMPORT, "end": folders.timestamp()}
    return run_record(
        name, run_id, profile, values, status=folders.GOOD, reason="", exit_code=0, started_by="notebook", **times
    )


def run_record(name: str, run_id: str, profile: str, parameters: dict[str, Any], **ending: Any) -> dict[str, Any]:
    """What run.json holds. `ending`: status, reason, exit_code, start, end and started_by, and what else is known."""
    about = {"schema_version": provenance.SCHEMA_VERSION, "name": name, "run_id": run_id, "profile": profile}
    return about | {"parameters": parameters} | ending

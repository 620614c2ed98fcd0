"""A run's folder: how it gets its name, how it becomes visible at once, and how its run.json is written and read.

A run works in `results/NAME/.attempt-RUN_ID` and is renamed to `results/NAME/RUN_ID` when it has ended and run.json is
complete. Whoever reads therefore sees whole runs or nothing, and a process that outlives its run writes nowhere.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RUN_JSON = "run.json"
RESULT = "result.parquet"
PROVENANCE = "provenance.json"
NOTEBOOK = "executed.ipynb"
LOG = "log.txt"
PROGRESS = "progress.json"
ATTEMPT_PREFIX = ".attempt-"
STUDY_NAME = re.compile(r"[a-z][a-z0-9_]*")
GOOD = "done"


def timestamp(moment: datetime | None = None) -> str:
    """UTC time as text, milliseconds included: 2026-12-01T09:38:07.123Z. Sorts by time."""
    moment = (moment or datetime.now(UTC)).astimezone(UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_between(start: str, end: str) -> float:
    """Seconds from one timestamp to another."""
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


def make_attempt(results: Path, name: str, parameters_hash: str) -> tuple[str, Path]:
    """Run id (UTC time + short hash of the parameters) and the new, empty folder that only this run owns.

    Two runs in the same second get ids that end in -2, -3 and so on. Raises OSError where the folder cannot be made.
    """
    if not STUDY_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no study's name")
    folder = results / name
    folder.mkdir(parents=True, exist_ok=True)
    base = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{parameters_hash}"
    for number in range(1, 1000):
        run_id = base if number == 1 else f"{base}-{number}"
        attempt = folder / (ATTEMPT_PREFIX + run_id)
        try:
            attempt.mkdir()
        except FileExistsError:
            continue
        if not (folder / run_id).exists():  # looked at after mkdir: a run that has just ended was renamed before
            return run_id, attempt
        attempt.rmdir()
    raise FileExistsError(f"a thousand runs named {base} exist in {folder}")


def final_path(attempt: Path) -> Path:
    """Where an attempt lies once it has ended; the folder itself where it is no attempt."""
    return attempt.with_name(attempt.name.removeprefix(ATTEMPT_PREFIX))


def finish(attempt: Path, record: dict[str, Any]) -> Path:
    """The run's visible folder, after run.json was written last and the attempt renamed. Raises OSError."""
    write_json(attempt / RUN_JSON, record, durable=True)
    final = final_path(attempt)
    if final != attempt:
        os.rename(attempt, final)
    return final


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """Write JSON so that a reader sees the old file or the whole new one; `durable` waits for the disk.

    Raises ValueError for NaN, OSError where it cannot be written.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", durable=durable)


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file so that a reader sees the old one or the whole new one; `durable` waits for the disk."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp lets only the owner read; results are there to be shared
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None where there is none to be had, be it absent, half-written or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def good_runs(results: Path, name: str, profile: str | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder and run.json of each finished good run, newest first; broken and unfinished folders are passed over."""
    if not STUDY_NAME.fullmatch(name) or not (results / name).is_dir():
        return
    folders = [path for path in (results / name).iterdir() if not path.name.startswith(".") and path.is_dir()]
    records = [(path, record) for path in folders if (record := read_json(path / RUN_JSON)) is not None]
    good = [(path, record) for path, record in records if _is_good(record, name, profile)]
    yield from sorted(good, key=lambda item: (item[1]["end"], item[0].name), reverse=True)


def _is_good(record: dict[str, Any], name: str, profile: str | None) -> bool:
    times = record.get("start"), record.get("end")
    return (
        record.get("status") == GOOD
        and record.get("name") == name
        and profile in (None, record.get("profile"))
        and all(isinstance(time, str) for time in times)
    )

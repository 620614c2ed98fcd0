"""Why a run did not end well, in one line, from what it left behind: exit code, executed notebook and log.

The executed notebook alone proves nothing: after a killed kernel papermill leaves every cell marked as completed.
"""

import json
import re
import signal
from pathlib import Path
from typing import Any

from flashstudy.facts.units import format_bytes
from flashstudy.runs import folders

KERNEL_DIED = 138  # papermill's exit code for a kernel that went away
LONGEST_REASON = 300  # characters
LONGEST_SOURCE = 60
ANSI = re.compile(r"\x1b\[[0-9;]*m")
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Interrupt|Kernel|Exit)\b.*)")
NO_KERNEL = ("Kernel died before replying", "Kernel didn't respond", "No such kernel", "NoSuchKernel")


def judge(attempt: Path, exit_code: int, expected: dict[str, Any], memory: str) -> tuple[str, str]:
    """Status and reason of a run that ended by itself; reason is empty for a good one.

    `expected` are the parameters it was to run with, `memory` what is known of memory, for the message.
    """
    if exit_code == KERNEL_DIED:
        return "killed", f"the kernel died, probably out of memory{memory}"
    if exit_code < 0:
        return "killed", f"papermill was ended by {_signal_name(-exit_code)}, probably out of memory{memory}"
    if exit_code > 0:
        return "failed", one_line(_failure(attempt, exit_code))
    problem = _missing(attempt, expected)
    return ("failed", one_line(problem)) if problem else (folders.GOOD, "")


def memory_note(peak_bytes: int, free_bytes: int) -> str:
    """What a reader needs to see whether memory was the cause, in brackets."""
    return f" (largest process {format_bytes(peak_bytes)}, {format_bytes(free_bytes)} were free at the start)"


def one_line(text: str) -> str:
    """`text` without colors and line breaks, at most 300 characters."""
    text = " ".join(ANSI.sub("", text).split())
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


def _failure(attempt: Path, exit_code: int) -> str:
    log = log_tail(attempt)
    for sign in NO_KERNEL:
        if sign in log:
            return f"the Python kernel did not start: {(_errors(log) or [sign])[0]}"  # papermill's complaint is last
    return (
        _cell_error(attempt)
        or (_errors(log) or [""])[-1]
        or f"papermill ended with exit code {exit_code}, see {folders.LOG}"
    )


def _cell_error(attempt: Path) -> str:
    """The first error output of the executed notebook, with its cell; empty where there is none."""
    notebook = folders.read_json(attempt / folders.NOTEBOOK) or {}
    for cell in notebook.get("cells", []):
        for output in cell.get("outputs", []):
            if output.get("output_type") == "error":
                source = "".join(cell.get("source", "")).strip()
                lines = [line.strip() for line in source.splitlines() if line.strip()]
                first = lines[0][:LONGEST_SOURCE] if lines else ""
                message = one_line(f"{output.get('ename')}: {output.get('evalue')}")[: LONGEST_REASON - 90]
                return f"{message} (cell {cell.get('execution_count')}: {first})"
    return ""


def log_tail(attempt: Path, n_bytes: int = 50_000) -> str:
    """The end of the log; empty where there is none."""
    try:
        with (attempt / folders.LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - n_bytes))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _errors(log: str) -> list[str]:
    """The lines of a log that end a traceback."""
    return [match[1] for line in ANSI.sub("", log).splitlines() if (match := EXCEPTION.match(line))]


def _missing(attempt: Path, expected: dict[str, Any]) -> str:
    """What a run that ended without an error still lacks; empty where it is whole."""
    origin = folders.read_json(attempt / folders.PROVENANCE)
    if origin is None or not (attempt / folders.RESULT).is_file():
        return "the notebook came to its end without saving a result (records.save)"
    actual = origin.get("parameters", {})
    plain = json.loads(json.dumps(expected))
    wrong = [name for name in plain if actual.get(name) != plain[name]]
    if wrong:
        name = wrong[0]
        return f"the notebook ran with {name} = {actual.get(name)!r}, not with {plain[name]!r}"
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

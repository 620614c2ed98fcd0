"""Runs notebooks in a batch: one process and one folder each, and an ending that is told apart and written down.

Everything is checked before anything runs. Then each run ends in one of the statuses below with a one-line reason in
its run.json, and the rest of the batch goes on. A run counts as done only if papermill ended well and the result is
there; the executed notebook is never asked.

    done         result and provenance are there
    failed       a cell raised, nothing was saved, or the kernel did not start
    killed       the kernel or papermill was killed, probably for memory
    timed_out    ran past its wall clock
    interrupted  Ctrl-C or a termination signal; the rest of the batch is not started
    refused      its folder could not be made
"""

import math
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from flashstudy.runs import endings, family, folders, inputs, launch, profiles, records, schema, targets
from flashstudy.runs.schema import RefusedError
from flashstudy.runs.targets import Target

POLL_S = 0.1
TICK_S = 0.5
OnEvent = Callable[..., object]


@dataclass(frozen=True)
class Job:
    """One run to do: `values` are the JSON parameters that differ from the defaults, `parameters` all of them."""

    target: Target
    profile: str
    values: dict[str, Any]
    parameters: dict[str, Any]
    expected_s: float
    wall_s: float


@dataclass(frozen=True)
class Outcome:
    """How a run ended. path None where no folder could be made; exit_code None where papermill was not started."""

    name: str
    run_id: str
    path: Path | None
    status: str
    reason: str
    exit_code: int | None
    start: str
    end: str


@dataclass
class Watch:
    """What is observed of a running notebook."""

    process: subprocess.Popen
    attempt: Path
    started: float = field(default_factory=time.monotonic)
    ended: family.Ended | None = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started


def run_batch(
    names: Sequence[str | Target],
    *,
    profile: str = "quick",
    overrides: Mapping[str, Any] | None = None,
    results: Path | str | None = None,
    on_event: OnEvent | None = None,
    timeout_s: float | None = None,
) -> list[Outcome]:
    """One outcome per run started, in order; a Ctrl-C ends the list early, with an `interrupted` one.

    `overrides` (name to JSON value, or to text which the schema's types then read) go to every notebook. on_event is
    called as on_event(kind, **details) with the kinds batch_started (jobs, results), run_started (job, number, n_jobs),
    step (job, elapsed_s, progress), run_ended (outcome, number, n_jobs) and batch_ended (outcomes, n_jobs).
    Raises RefusedError before anything runs: unknown notebook or parameter, ill-typed value, missing kernel, results
    folder that cannot be written.
    """
    tell = on_event or (lambda kind, **details: None)
    root = Path(results).expanduser().absolute() if results is not None else records.results_dir()
    jobs = plan(names, profile=profile, overrides=overrides or {}, results=root, timeout_s=timeout_s)
    outcomes: list[Outcome] = []
    with stop_signals() as stops:
        tell("batch_started", jobs=jobs, results=root)
        for number, job in enumerate(jobs, start=1):
            if stops:
                break
            tell("run_started", job=job, number=number, n_jobs=len(jobs))
            outcome = run_one(job, root, stops, lambda **step: tell("step", **step))
            outcomes.append(outcome)
            tell("run_ended", outcome=outcome, number=number, n_jobs=len(jobs))
        tell("batch_ended", outcomes=outcomes, n_jobs=len(jobs))
    return outcomes


def plan(
    names: Sequence[str | Target],
    *,
    profile: str,
    overrides: Mapping[str, Any],
    results: Path,
    timeout_s: float | None = None,
) -> list[Job]:
    """The checked jobs of a batch. Raises RefusedError."""
    if not names:
        raise RefusedError("no notebook named; allowed: a name, or --all")
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise RefusedError(f"a timeout of {timeout_s} s; allowed: a number of seconds above 0")
    profiles.check_name(profile)
    launch.check_kernel()
    jobs = [_job(target, profile, overrides, results, timeout_s) for target in names]
    check_writable(results, "--results")
    return jobs


def _job(
    target: str | Target, profile: str, overrides: Mapping[str, Any], results: Path, timeout_s: float | None
) -> Job:
    target = targets.find(target) if isinstance(target, str) else target
    targets.check_notebook(target)
    settings = profiles.load(target.name, profile)
    params = schema.validate(target.params_class, settings.overrides | dict(overrides), study=target.name)
    parameters = schema.to_json(params)
    values = {name: parameters[name] for name in settings.overrides | dict(overrides)}
    inputs.check(values)
    expected_s = _last_duration_s(results, target.name, profile, parameters) or settings.expected_s
    return Job(target, profile, values, parameters, expected_s, timeout_s or settings.wall_s)


def _last_duration_s(results: Path, name: str, profile: str, parameters: dict[str, Any]) -> float | None:
    """Seconds that the newest good run with the same parameters took here, None where there is none."""
    for _, record in folders.good_runs(results, name, profile):
        if record.get("parameters") == parameters and record.get("started_by") == "runner":
            return folders.seconds_between(record["start"], record["end"])
    return None


def check_writable(folder: Path, option: str) -> None:
    """Refuse a folder, given by a command's `option`, in which nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0" * 4096)
            file.flush()
    except OSError as error:
        raise RefusedError(
            f"cannot write to the folder {folder}: {error.strerror}; allowed: {option} with a writable folder"
        ) from None


def run_one(job: Job, results: Path, stops: Sequence[int] = (), on_step: OnEvent | None = None) -> Outcome:
    """Run one job to its end and write its run.json; never raises for what can go wrong with a run."""
    name, start = job.target.name, folders.timestamp()
    try:
        run_id, attempt = folders.make_attempt(results, name, schema.parameters_hash(job.parameters))
    except OSError as error:
        reason = f"cannot make a folder in {results}: {error.strerror}"
        return Outcome(name, "", None, "refused", reason, None, start, folders.timestamp())
    outcome = Outcome(name, run_id, attempt, "failed", "", None, start, "")
    try:
        with tempfile.TemporaryDirectory(prefix="flashstudy-", ignore_cleanup_errors=True) as private:
            free_bytes = psutil.virtual_memory().available
            watch = _start(job, attempt, run_id, results, Path(private))
            status, reason = _follow(watch, job, stops, on_step or (lambda **step: None))
        if not status:
            note = endings.memory_note(watch.ended.peak_memory_bytes, free_bytes)
            status, reason = endings.judge(attempt, watch.ended.exit_code, job.parameters, note)
        outcome = replace(outcome, status=status, reason=reason, exit_code=watch.ended.exit_code)
        return _finish(replace(outcome, end=folders.timestamp()), job, watch.ended.peak_memory_bytes)
    except OSError as error:  # the disk is full, or a folder has gone
        reason = endings.one_line(
            "; ".join(filter(None, [outcome.reason, f"could not be carried out or recorded: {error}"]))
        )
        return replace(outcome, status="failed", reason=reason, end=folders.timestamp())


def _start(job: Job, attempt: Path, run_id: str, results: Path, private: Path) -> Watch:
    cwd = Path.cwd()
    command = launch.command(job.target.notebook, attempt, private, job.values, cwd)
    environment = launch.environment(attempt, run_id, results, job.profile, private)
    process = family.start(command, cwd=cwd, environment=environment, log=attempt / folders.LOG)
    return Watch(process, attempt)


def _follow(watch: Watch, job: Job, stops: Sequence[int], on_step: OnEvent) -> tuple[str, str]:
    """Wait for the end, or bring it about; status and reason where the runner ended it, empty ones otherwise."""
    try:
        return _wait(watch, job, stops, on_step)
    except BaseException:  # such as a display that cannot draw: no notebook runs on unwatched
        if watch.ended is None:
            family.end(watch.process, watch.attempt)
        raise


def _wait(watch: Watch, job: Job, stops: Sequence[int], on_step: OnEvent) -> tuple[str, str]:
    next_tick = 0.0
    while watch.ended is None:
        if stops:
            return _end(watch, "interrupted", f"stopped by {signal.Signals(stops[0]).name}")
        if watch.elapsed_s > job.wall_s:
            return _end(watch, "timed_out", f"ran past its limit of {job.wall_s:g} s")
        if watch.elapsed_s >= next_tick:
            next_tick = watch.elapsed_s + TICK_S
            on_step(job=job, elapsed_s=watch.elapsed_s, progress=folders.read_json(watch.attempt / folders.PROGRESS))
        time.sleep(POLL_S)
        watch.ended = family.poll(watch.process)
    family.sweep(watch.attempt)  # workers that the notebook left behind would slow the next run
    return "", ""


def _end(watch: Watch, status: str, reason: str) -> tuple[str, str]:
    watch.ended = family.end(watch.process, watch.attempt)
    return status, f"{reason}{_last_step(watch.attempt)}"


def _last_step(attempt: Path) -> str:
    """Where the notebook was, from its progress file; empty where it told nothing."""
    progress = folders.read_json(attempt / folders.PROGRESS)
    if not progress:
        return ""
    step = f"at step {progress.get('done')} of {progress.get('total')} ({progress.get('label')})"
    return " " + endings.one_line(step)


def _finish(outcome: Outcome, job: Job, peak_memory_bytes: int) -> Outcome:
    """Write run.json, make the folder visible; raises OSError."""
    record = records.run_record(
        outcome.name,
        outcome.run_id,
        job.profile,
        job.parameters,
        overrides=job.values,
        status=outcome.status,
        reason=outcome.reason,
        exit_code=outcome.exit_code,
        start=outcome.start,
        end=outcome.end,
        started_by="runner",
        wall_s=job.wall_s,
        peak_memory_bytes=peak_memory_bytes,
    )
    return replace(outcome, path=folders.finish(outcome.path, record))


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that receives SIGINT, SIGTERM and SIGHUP, so that they end a run in order instead of anywhere.

    Outside the main thread signals cannot be received, and the list stays empty.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup wants to outlive its terminal
        wanted.append(signal.SIGHUP)
    previous = {number: signal.signal(number, lambda got, _: received.append(got)) for number in wanted}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

"""What a person sees while a batch runs: which notebook, where it is, how long, how much is left.

In a terminal one line is redrawn, twice a second and not more: redrawing costs processor time that a timing would feel.
Elsewhere (a log, a pipe) a line is printed when a notebook starts and when it ends.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from flashstudy.runs import folders
from flashstudy.runs.runner import Job, Outcome

LONGEST_LABEL = 40  # characters of the step inside a notebook
MARKS = {"done": "[green]✓[/]", "failed": "[red]✗[/]", "killed": "[red]✗[/]", "timed_out": "[red]✗[/]"}


@contextmanager
def shown(console: Console) -> Iterator[Callable[..., None]]:
    """The on_event of a batch that is shown on `console`."""
    if not console.is_terminal:
        yield lambda kind, **details: _print_plain(console, kind, details)
        return
    cut = Column(no_wrap=True, overflow="ellipsis")
    columns = TextColumn("{task.description}"), BarColumn(14), TextColumn("{task.fields[status]}", table_column=cut)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=1, status="", visible=False)
        jobs: list[Job] = []
        yield lambda kind, **details: _draw(progress, task, jobs, kind, details)


def _draw(progress: Progress, task: Any, jobs: list[Job], kind: str, details: dict[str, Any]) -> None:
    if kind == "batch_started":
        jobs[:] = details["jobs"]
    elif kind == "run_started":
        title = f"[bold]{details['number']}/{details['n_jobs']}[/] {details['job'].target.name}"
        progress.update(task, description=title, completed=0, total=1, status="starting", visible=True)
    elif kind == "step":
        share, label = step_of(details["progress"])
        rest_s = remaining_s(jobs, details["job"], details["elapsed_s"])
        status = f"{clock(details['elapsed_s'])}, about {clock(rest_s)} left · {escape(label)}"
        progress.update(task, completed=share, total=1, status=status)
    elif kind == "run_ended":
        progress.console.print(ending_line(details["outcome"]), highlight=False)
        progress.update(task, visible=False)
    progress.refresh()


def _print_plain(console: Console, kind: str, details: dict[str, Any]) -> None:
    if kind == "run_started":
        job, place = details["job"], f"{details['number']}/{details['n_jobs']}"
        expected = f"about {clock(job.expected_s)}"
        console.print(f"{place} {job.target.name}: started, {expected}", highlight=False, soft_wrap=True)
    elif kind == "run_ended":
        console.print(ending_line(details["outcome"]), highlight=False, soft_wrap=True)


def step_of(progress: dict[str, Any] | None) -> tuple[float, str]:
    """Share done (0 to 1) and label of a progress.json, whatever it holds."""
    progress = progress or {}
    done, total = progress.get("done"), progress.get("total")
    numbers = all(isinstance(number, (int, float)) for number in (done, total))
    share = min(max(done / total, 0.0), 1.0) if numbers and total > 0 else 0.0
    return share, str(progress.get("label", "starting"))[:LONGEST_LABEL]


def remaining_s(jobs: list[Job], current: Job, elapsed_s: float) -> float:
    """Seconds that the rest of the batch is expected to take; a notebook past its time counts as about to end."""
    after = jobs[jobs.index(current) + 1 :] if current in jobs else []
    return max(current.expected_s - elapsed_s, 0.0) + sum(job.expected_s for job in after)


def ending_line(outcome: Outcome) -> str:
    """One line with rich markup: name, status, seconds, reason."""
    took = clock(folders.seconds_between(outcome.start, outcome.end))
    mark = MARKS.get(outcome.status, "[yellow]![/]")
    reason = f": {escape(outcome.reason)}" if outcome.reason else ""
    status = "" if outcome.status == folders.GOOD else f" {outcome.status}"
    return f"{mark} {outcome.name}{status} after {took}{reason}"


def clock(seconds: float) -> str:
    """ "45 s" or "3 min 20 s"."""
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60} min {whole % 60:02d} s"

"""The main job: models, machine card, every notebook in reading order, a site that grows, the answers at the end."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashstudy.cli.answers import console, exit_code, fail, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from flashstudy.runs.runner import Outcome


def study(profile: str, results: Path | None, out: Path, timeout: float | None) -> int:
    """Exit code after all notebooks; the site and the answers are there for what has run."""
    from flashstudy.runs import display, records, runner, targets

    root = (results or records.results_dir()).expanduser().absolute()
    settings = {"profile": profile, "results": root, "timeout_s": timeout}
    runner.plan(targets.READING_ORDER, overrides={}, **settings)
    runner.check_writable(out, "--out")
    screen = console()
    problems = [_fetched(screen), _measured(screen)]
    refresh = _refresher(screen, root, out.absolute(), problems)
    with display.shown(screen) as show:

        def listen(kind: str, **details: Any) -> None:
            show(kind, **details)
            refresh(kind, details)

        outcomes = runner.run_batch(targets.READING_ORDER, on_event=listen, **settings)
    problems += [_answer(outcome) for outcome in outcomes]
    if (out / "index.html").is_file():
        print(f"\n{(out / 'index.html').absolute()}")
    return max(exit_code(outcomes, len(targets.READING_ORDER)), int(any(problems)))


def _fetched(screen: "Console") -> str:
    """Fetch the models; the problem in one line, empty when there was none. Without models some notebooks still run."""
    from flashstudy.compress import checkpoints

    try:
        checkpoints.fetch(progress=lambda line: screen.print(line, highlight=False, markup=False, soft_wrap=True))
    except (checkpoints.InputError, OSError) as error:
        fail(str(error), 1)
        return str(error)
    return ""


def _measured(screen: "Console") -> str:
    """Measure the machine card where none is kept, so that the first notebook need not; the problem in one line."""
    from flashstudy.measure import machine

    if machine.is_kept():
        return ""
    screen.print("measuring this machine, once: about 10 s", highlight=False)
    try:
        machine.card()
    except Exception as error:  # notebooks that need no card still run, the others say why they cannot
        fail(f"this machine could not be measured: {one_line(error)}", 1)
        return one_line(error)
    return ""


def _refresher(screen: "Console", results: Path, out: Path, problems: list[str]):
    """A function of events that rebuilds the site after each run, failed ones too; its own failure is told and kept."""

    def refresh(kind: str, details: dict[str, Any]) -> None:
        if kind != "run_ended":
            return
        first = not (out / "index.html").is_file()
        try:
            from flashstudy.share import site as pages

            index = pages.build([results], out)
        except Exception as error:  # a page that cannot be drawn must not cost the notebooks still to run
            problems.append(one_line(error))
            fail(f"the site could not be refreshed: {one_line(error)}", 1)
            return
        if first:
            screen.print(f"The first page can be read: {index}", highlight=False, soft_wrap=True)

    return refresh


def _answer(outcome: "Outcome") -> str:
    """Print what a run found, in one sentence; returns the problem that kept it from doing so, if any."""
    from importlib import import_module

    from flashstudy.runs import records

    if outcome.status != "done":
        print(f"{outcome.name}: no answer, {outcome.status}: {outcome.reason}")
        return outcome.reason
    try:
        result = records.load_run(outcome.path).result
        print(f"{outcome.name}: {import_module(f'flashstudy.studies.{outcome.name}').headline(result)}")
    except Exception as error:  # one sentence less is no reason to lose the others
        print(f"{outcome.name}: no sentence could be made of the result: {one_line(error)}")
        return one_line(error)
    return ""

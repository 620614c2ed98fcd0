"""The command line. Exit code 0: done; 1: a run failed; 2: bad input, with one line that says what and what is allowed.

Everything but typer is imported by the command that needs it, so that help comes at once. Answers go to stdout,
progress and errors to stderr.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from flashstudy.cli.answers import console, exit_code, fail, plain, print_json, shown
from flashstudy.runs import executor

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
UsageError: type[Exception] = typer.BadParameter.__base__  # typer exports only this subclass of it

AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Results = Annotated[Path | None, typer.Option("--results", help="Results folder [default: ./results].")]
ProfileName = Annotated[str, typer.Option("--profile", help="smoke, quick or full.")]
Timeout = Annotated[float | None, typer.Option("--timeout", help="Seconds after which a notebook is stopped.")]
SiteFolder = Annotated[Path, typer.Option("--out", help="Folder of the site.")]


@app.callback(invoke_without_command=True)
def about(context: typer.Context) -> None:
    """Why is the compressed version of a language model slower? Measured on this machine, with evidence."""
    from flashstudy.facts import checkout

    if context.invoked_subcommand is None:
        print(context.get_help())
        return
    checkout.root()
    try:
        Path.cwd()
    except OSError:
        raise typer.Exit(fail("the current folder is gone; allowed: a folder that exists", 2)) from None


@app.command("list")
def list_notebooks(as_json: AsJson = False) -> int:
    """The notebooks in reading order, with their question and how long the quick profile takes."""
    from flashstudy.facts import checkout
    from flashstudy.runs import display, folders, profiles, records, targets

    answers = []
    for name in targets.READING_ORDER:
        asks = targets.question(checkout.notebooks_dir() / f"{name}.ipynb")
        last = next((path.name for path, _ in folders.good_runs(records.results_dir(), name)), None)
        expected_s = profiles.load(name, "quick").expected_s
        answers.append({"name": name, "question": asks, "expected_s": expected_s, "last_good_run": last})
    if as_json:
        return print_json(answers)
    width = max(len(answer["name"]) for answer in answers)
    for answer in answers:
        print(f"{answer['name']:{width}}  {display.clock(answer['expected_s']):>6}  {answer['question']}")
    return 0


@app.command("params")
def show_parameters(name: str, as_json: AsJson = False) -> int:
    """What a notebook can be given: names, types with bounds, defaults."""
    from flashstudy.runs import schema, targets

    params_class = targets.find(name).params_class
    described = schema.describe(params_class)
    if as_json:
        parameters = [vars(one) for one in described]
        return print_json({"name": name, "parameters": parameters, "schema": params_class.model_json_schema()})
    for one in described:
        print(f"{one.name} = {json.dumps(one.default, ensure_ascii=False)}\n    {one.description}; {one.allowed}")
    return 0


@app.command()
def fetch(as_json: AsJson = False) -> int:
    """Download the default models into the user's cache and check them; installs nothing."""
    from flashstudy.compress import checkpoints

    try:
        found = checkpoints.fetch(progress=lambda line: print(line, file=sys.stderr))
    except checkpoints.InputError as error:
        return fail(str(error), 1)
    if as_json:
        return print_json({name: str(path) for name, path in found.items()})
    for name, path in found.items():
        print(f"{name}: {path}")
    return 0


@app.command()
def run(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Notebooks; see `list`.")] = None,
    parameter: Annotated[
        list[str] | None, typer.Option("-p", metavar="NAME=VALUE", help="A parameter; repeatable.")
    ] = None,
    profile: ProfileName = "quick",
    results: Results = None,
    timeout: Timeout = None,
    everything: Annotated[bool, typer.Option("--all", help="Every notebook, in reading order.")] = False,
    as_json: AsJson = False,
) -> int:
    """Run notebooks, one process and one folder each; what fails is told, and the rest goes on."""
    from flashstudy.runs import display, runner, schema, targets

    if everything and names:
        raise schema.RefusedError("notebooks are named beside --all; allowed: one of the two")
    wanted = list(targets.READING_ORDER) if everything else names or []
    overrides = schema.assignments(parameter or [])
    settings = {"profile": profile, "results": results, "timeout_s": timeout}
    with display.shown(console()) as show:
        outcomes = runner.run_batch(wanted, overrides=overrides, on_event=show, **settings)
    if as_json:
        print_json([plain(outcome) for outcome in outcomes])
    else:
        for outcome in outcomes:
            print(f"{outcome.name}: {outcome.status}, {shown(outcome.path)}")
    return exit_code(outcomes, len(wanted))


@app.command()
def site(
    results: Annotated[list[Path] | None, typer.Argument(metavar="RESULTS...", help="Results folders.")] = None,
    out: SiteFolder = Path("site"),
) -> int:
    """Build the pages from results: index.html and one page a notebook, to be read offline."""
    from flashstudy.runs import records, runner, schema

    sources = results or [records.results_dir()]
    for source in sources:
        if not source.is_dir():
            raise schema.RefusedError(f"no results folder {source}; allowed: a folder that `flashstudy run` has filled")
    runner.check_writable(out, "--out")
    from flashstudy.share import site as pages

    print(pages.build([source.absolute() for source in sources], out.absolute()))
    return 0


@app.command()
def machine(
    as_json: AsJson = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again.")] = False,
) -> int:
    """This machine's card: memory bandwidth, arithmetic rates, which formats it accelerates."""
    from flashstudy.measure import machine as cards

    card = cards.card(refresh=refresh)
    print(card.to_json() if as_json else cards.render(card))
    return 0


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Default model, folder, GGUF file or hub id.")],
    context: Annotated[int, typer.Option("--context", min=1, max=131_072, help="Tokens before the timed step.")] = 512,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, bfloat16 or float16 [default: as the model's config says].")
    ] = "",
    as_json: AsJson = False,
) -> int:
    """Why is this model slow? What is quantized, where a decode step's time goes, which change would help most."""
    from flashstudy.cli import diagnosis

    return diagnosis.doctor(model, context, dtype, as_json)


@app.command()
def study(
    profile: ProfileName = "quick", results: Results = None, out: SiteFolder = Path("site"), timeout: Timeout = None
) -> int:
    """Fetch the models, run every notebook in reading order, refresh the site after each, tell the answers."""
    from flashstudy.cli import everything

    return everything.study(profile, results, out, timeout)


def _is_refusal(error: Exception) -> bool:
    """Is it the user's input that was wrong, rather than the program?"""
    from flashstudy.facts.checkout import NotACheckoutError
    from flashstudy.runs.schema import RefusedError

    return isinstance(error, (NotACheckoutError, RefusedError))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    executor.skip_iri_grammar()
    try:
        code = app(args=arguments, prog_name="flashstudy", standalone_mode=False) or 0
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "flashstudy"
        code = fail(f"{error.format_message().rstrip('.')}; allowed: see {command} --help", 2)
    except (ValueError, RuntimeError) as error:
        if not _is_refusal(error):
            raise
        code = fail(str(error), 2)
    if code == 130:  # typer's code for Ctrl-C outside a batch
        code = fail("interrupted", 1)
    sys.exit(code)

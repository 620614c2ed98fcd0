"""Compare the times of two or more functions on a machine that may be busy: a ratio and interval, or "cannot tell".

Two times measured one after the other differ by whatever the machine did meanwhile. Here each round runs every
alternative once, in random order, so a slow second hits all of them; the ratio is taken within a round; rounds in
which other work took a core are left out. When too few are left the comparison is repeated with fewer threads and,
failing that, answered `contended` with the reason. Ratios are variant time / standard time: above 1 is slower.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .blocks import Stopwatch
from .process import default_threads, prepared, spare_core
from .trial import NO_SPARE_CORE, Trial

Function = Callable[[], Any]
MIN_PAIRS = 5


@dataclass(frozen=True)
class Comparison:
    """Time of one alternative over the time of the standard, with a 95% interval.

    n_pairs: clean pairs, of n_rounds taken. standard_s and flash_s: median seconds a call. timed_s and wall_s: seconds
    inside the functions and in all, of the last number of threads tried. contended: the ratio is not to be believed.
    """

    ratio: float
    low: float
    high: float
    n_pairs: int
    standard_s: float
    flash_s: float
    contended: bool
    reason: str
    n_threads: int
    n_rounds: int = 0
    timed_s: float = 0.0
    wall_s: float = 0.0

    def row(self) -> dict[str, Any]:
        """The comparison in the columns of a result."""
        return dict(
            time_ratio=self.ratio, low=self.low, high=self.high, n_pairs=self.n_pairs, n_threads=self.n_threads,
            time_s=self.flash_s, standard_s=self.standard_s, contended=self.contended, reason=self.reason,
        )  # fmt: skip


@dataclass(frozen=True)
class Rounds:
    """Rounds of several alternatives, from which any of them can be compared with any other.

    given_up: why more threads were tried and not used, "" otherwise. insisted: the number of threads was asked for.
    """

    trial: Trial
    given_up: str
    insisted: bool
    _answers: dict[str, dict[str, Comparison]] = field(default_factory=dict, repr=False)

    def against(self, reference: str) -> dict[str, Comparison]:
        """One Comparison a function, each against `reference`, whose own entry has ratio 1."""
        if reference not in self.trial.functions:
            raise ValueError(f"reference {reference!r} is not among the functions {list(self.trial.functions)}")
        if reference not in self._answers:
            trial = replace(self.trial, reference=reference)
            problem = trial.problem()
            self._answers[reference] = {
                name: _comparison(trial, name, problem, self.given_up, self.insisted) for name in trial.functions
            }
        return dict(self._answers[reference])

    def median_s(self, name: str) -> float:
        """Median seconds a call over the clean rounds."""
        return self.trial.median_s(name)


def compare(
    standard: Function, flash: Function, *, budget_s: float = 1.0, n_threads: int | None = None, **options: Any
) -> Comparison:
    """Time of `flash` over time of `standard`, from interleaved pairs; `budget_s` seconds for each of the two.

    `options` are those of `compare_many`.
    """
    functions = {"standard": standard, "flash": flash}
    return compare_many(functions, "standard", budget_s=budget_s, n_threads=n_threads, **options)["flash"]


def compare_many(
    functions: Mapping[str, Function],
    reference: str,
    *,
    budget_s: float = 1.0,
    n_threads: int | None = None,
    min_pairs: int = MIN_PAIRS,
    precision: float = 0.01,
    seed: int | None = None,
    stopwatch: Stopwatch | None = None,
) -> dict[str, Comparison]:
    """One Comparison a function, each against `reference` (whose own entry has ratio 1); the functions run interleaved.

    `budget_s` is per function; `min_pairs` rounds are run however long they take, and it ends early once a relative
    half-width of `precision` is reached. `n_threads` None takes torch's number and may go below it, saying so in
    `reason`; a number that was asked for and could not be had makes the answer `contended`. A tensor on an accelerator
    among the first results makes the timer wait for it; `stopwatch` replaces the clock and the way to wait.
    """
    if reference not in functions:
        raise ValueError(f"reference {reference!r} is not among the functions {list(functions)}")
    ordered = {reference: functions[reference], **functions}
    options = dict(budget_s=budget_s, n_threads=n_threads, min_pairs=min_pairs, precision=precision)
    return measure(ordered, **options, seed=seed, stopwatch=stopwatch).against(reference)


def measure(
    functions: Mapping[str, Function],
    *,
    budget_s: float = 1.0,
    n_threads: int | None = None,
    min_pairs: int = MIN_PAIRS,
    precision: float = 0.01,
    seed: int | None = None,
    stopwatch: Stopwatch | None = None,
) -> Rounds:
    """Interleaved rounds of all functions; the first is the reference while it runs. Options as in `compare_many`."""
    _check(functions, budget_s, n_threads, min_pairs)
    asked = n_threads or default_threads()
    stopwatch = stopwatch or Stopwatch()
    given_up = ""
    try:
        for threads in _fewer_and_fewer(asked):
            stopwatch.n_threads = threads
            trial = Trial(functions, next(iter(functions)), stopwatch, random.Random(seed), min_pairs, precision)
            with prepared(threads):
                trial.run(budget_s)
            if stopwatch.backend.runs_on_host and not spare_core(threads):
                trial.allowance = NO_SPARE_CORE
            if not trial.problem() or not stopwatch.backend.runs_on_host or threads == 1:
                break
            given_up = given_up or f"with {threads} threads {trial.problem()}, so this is for "
    finally:
        stopwatch.watch.close()
    return Rounds(trial, given_up, insisted=n_threads is not None)


def _check(functions: Mapping[str, Function], budget_s: float, n_threads: int | None, min_pairs: int) -> None:
    """ValueError with the offending value."""
    if len(functions) < 2:
        raise ValueError(f"a comparison needs at least two functions, not {list(functions)}")
    if not 0 < budget_s < math.inf:
        raise ValueError(f"budget_s must be a positive number of seconds, not {budget_s}")
    if n_threads is not None and n_threads < 1:
        raise ValueError(f"n_threads must be at least 1, not {n_threads}")
    if min_pairs < 2:
        raise ValueError(f"min_pairs must be at least 2 for an interval, not {min_pairs}")


def _fewer_and_fewer(n_threads: int) -> list[int]:
    """The asked number of threads, then halves of it down to one."""
    return [n_threads >> step for step in range(n_threads.bit_length())]


def _comparison(trial: Trial, name: str, problem: str, given_up: str, insisted: bool) -> Comparison:
    """The trial's answer for one function; refused where it has a problem or is not about the threads insisted on."""
    threads, interval = trial.stopwatch.n_threads, trial.interval(name)
    fewer = f"{given_up}{threads}" if given_up else ""
    return Comparison(
        ratio=math.exp(interval.estimate),
        low=math.exp(interval.low),
        high=math.exp(interval.high),
        n_pairs=len(trial.pairs(name)),
        standard_s=trial.median_s(trial.reference),
        flash_s=trial.median_s(name),
        contended=bool(problem) or (bool(fewer) and insisted),
        reason="; ".join(text for text in (fewer, problem) if text),
        n_threads=threads,
        n_rounds=len(trial.rounds),
        timed_s=trial.timed_s,
        wall_s=trial.wall_s,
    )

"""Rounds of alternatives that consist of stages, each stage timed apart: load, convert, first call, second call.

`timing.measure` times functions that stand alone. A load leaves something that the next stage needs and that must be
let go before the next load; and what goes before it, such as emptying the page cache, must not be timed. So the rounds
are taken here, every alternative once a round in random order, and compared like all others, by `timing.Comparison`.
"""

import functools
import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from .backends import HOST, Backend
from .blocks import Block, Stopwatch
from .process import default_threads, prepared, spare_core
from .timing import Comparison, Rounds
from .trial import NO_SPARE_CORE, Trial

Stage = Callable[[Any], Any]


def _nothing() -> None:
    """Nothing to prepare."""


# A load that sleeps until its pages are there: judged like one that waits for an accelerator, by run delay alone.
DISK = Backend("disk", _nothing, runs_on_host=False)


@dataclass(frozen=True)
class Staged:
    """Stages by name, each given what the one before returned (the first None), and what goes before them untimed.

    What a stage replaces is freed within its time, what the last one returned is not. `waits`: it waits for the disk,
    so time in which the thread does not compute is no sign of a disturbance.
    """

    stages: Mapping[str, Stage]
    prepare: Callable[[], object] = _nothing
    waits: bool = False


@dataclass(frozen=True)
class StageRounds:
    """Rounds in which every stage and total of every alternative has a block; any two of them can be compared."""

    trial: Trial
    insisted: bool

    def compare(self, flash: tuple[str, str], standard: tuple[str, str]) -> Comparison:
        """Time of one (alternative, stage or total) over that of another, from the rounds in which both were clean.

        Only these two decide whether it is contended: that a third was disturbed does not matter to them. One held
        against itself has ratio 1.
        """
        name, reference = (_name(*pair) for pair in (flash, standard))
        second = name if name != reference else next(other for other in self.trial.functions if other != name)
        functions = dict.fromkeys((reference, second), _nothing)
        pair = replace(self.trial, functions=functions, reference=reference)
        return Rounds(pair, given_up="", insisted=self.insisted).against(reference)[name]


@dataclass
class _Hands:
    """Holds what the last stage returned."""

    held: Any = None

    def take(self, stage: Stage) -> None:
        self.held = stage(self.held)


@dataclass
class _Plan:
    """Everything that one round needs."""

    alternatives: Mapping[str, Staged]
    totals: Mapping[str, Sequence[str]]
    stopwatch: Stopwatch
    order: random.Random = field(default_factory=random.Random)

    def round(self, chosen: Sequence[str] | None = None) -> dict[str, Block]:
        """One block for each stage and total of all alternatives, or of those chosen, by `_name`."""
        names, taken = list(chosen or self.alternatives), {}
        self.order.shuffle(names)
        for name in names:
            blocks = self._blocks(self.alternatives[name])
            taken |= {_name(name, stage): block for stage, block in blocks.items()}
        return taken

    def _blocks(self, alternative: Staged) -> dict[str, Block]:
        alternative.prepare()
        self.stopwatch.backend = DISK if alternative.waits else HOST
        hands = _Hands()
        blocks = {
            stage: self.stopwatch.block(functools.partial(hands.take, function), 1)
            for stage, function in alternative.stages.items()
        }
        del hands
        gc.collect()  # models hold themselves in circles; without this every round would keep another one
        for total, parts in self.totals.items():
            blocks[total] = _sum([blocks[part] for part in parts if part in blocks])
        return blocks


def measure(
    alternatives: Mapping[str, Staged],
    *,
    totals: Mapping[str, Sequence[str]],
    n_rounds: int,
    warm_up: Sequence[str] | None = None,
    n_threads: int | None = None,
    seed: int | None = None,
    stopwatch: Stopwatch | None = None,
) -> StageRounds:
    """Rounds of all alternatives; a total is the sum of those of its parts that an alternative has.

    Before the clock starts the alternatives in `warm_up` (all by default) run once, which imports what the libraries
    import late. Up to a quarter as many again as `n_rounds` are taken until three quarters of them are clean for every
    total; a comparison is contended with less than half of `n_rounds` clean pairs.
    Raises ValueError for fewer than two alternatives or rounds, a total named like a stage, a total without parts.
    """
    _check(alternatives, totals, n_rounds)
    stopwatch = stopwatch or Stopwatch()
    stopwatch.n_threads = n_threads or default_threads()
    plan = _Plan(alternatives, totals, stopwatch, random.Random(seed))
    judged = dict.fromkeys((_name(one, total) for one in alternatives for total in totals), _nothing)
    trial = Trial(judged, next(iter(judged)), stopwatch, plan.order, max(2, n_rounds // 2), precision=0.01)
    with prepared(stopwatch.n_threads), _only_new_garbage():
        plan.round(warm_up)
        stopwatch.watch.refresh()
        try:
            while len(trial.rounds) < n_rounds or (
                len(trial.rounds) < 1.25 * n_rounds and _n_clean(trial) < 0.75 * n_rounds
            ):
                trial.rounds.append(plan.round())
        finally:
            stopwatch.watch.close()
            stopwatch.backend = HOST
    if not spare_core(stopwatch.n_threads):
        trial.allowance = NO_SPARE_CORE
    return StageRounds(trial, insisted=n_threads is not None)


def _name(alternative: str, stage: str) -> str:
    return f"{alternative}: {stage}"


def _check(alternatives: Mapping[str, Staged], totals: Mapping[str, Sequence[str]], n_rounds: int) -> None:
    if len(alternatives) < 2:
        raise ValueError(f"a comparison needs at least two alternatives, not {list(alternatives)}")
    if n_rounds < 2:
        raise ValueError(f"n_rounds must be at least 2 for an interval, not {n_rounds}")
    for name, alternative in alternatives.items():
        for total, parts in totals.items():
            if total in alternative.stages:
                raise ValueError(f"{name} has a stage {total!r}, which is also the name of a total")
            if not set(parts) & set(alternative.stages):
                raise ValueError(f"{name} has no stage of the total {total!r}: {', '.join(parts)}")


def _n_clean(trial: Trial) -> int:
    """Clean pairs of the total that has fewest."""
    return round(trial.clean_share() * len(trial.rounds))


def _sum(blocks: list[Block]) -> Block:
    """Several blocks as one; disturbed if one of them was."""
    reason = next((block.reason for block in blocks if block.reason), "")
    return Block(
        call_s=sum(block.call_s for block in blocks),
        wall_s=sum(block.wall_s for block in blocks),
        reason=reason,
        settled=blocks[0].settled,
        faults=sum(block.faults for block in blocks),
        run_delay_s=sum(block.run_delay_s for block in blocks),
    )


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Leaves what exists already out of garbage collections: looking through all imported modules takes longer."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

"""The rounds of one comparison at one number of threads: warm-up, random order, when to stop, what may be believed."""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import backends
from .blocks import Block, Stopwatch
from .contention import pressure_s
from .statistics import Interval, correlated_interval, drift, pairs_needed, still_falling, waiting_quantum_s

# Pairs and share of the budget before the pilot decides how many pairs are enough.
PILOT_PAIRS, PILOT_SHARE = 60, 0.4
WARM_UP_SHARE, WARM_UP_WINDOW = 0.2, 8
LOOK_EVERY = 10
# Several threads wait for the slowest: beside other work even their undisturbed blocks are wrong, so less is forgiven.
FEWEST_CLEAN_SHARE = {"one thread": 0.08, "several": 2 / 3}
MOST_DELAY_SHARE_OF_SEVERAL = 0.05
GRACE = 2.0
MOST_DRIFT = 0.3
# Seconds one first-touch page fault costs, kernel and zeroing together: 0.1-1 microsecond, the lower half.
FAULT_S = 0.25e-6


@dataclass
class Trial:
    """Alternatives, how they are timed, and the rounds taken so far: one clean or spoiled block a function each."""

    functions: Mapping[str, Callable[[], Any]]
    reference: str
    stopwatch: Stopwatch
    order: random.Random
    min_pairs: int
    precision: float
    rounds: list[dict[str, Block]] = field(default_factory=list)
    enough: float = math.inf
    wall_s: float = 0.0
    timed_s: float = 0.0
    pressure: float = 0.0

    def run(self, budget_s: float) -> None:
        """Warm up, then take rounds until the budget is used, enough is known, or it is clearly hopeless.

        The first calls (allocation, first touch, compilation) are outside the budget.
        """
        clock, began, pressed_before = self.stopwatch.clock, self.stopwatch.clock(), pressure_s()
        timed_before, total_s = self.stopwatch.timed_s, budget_s * len(self.functions)
        self._first_calls()
        start = clock()
        calls = self._warm_up(WARM_UP_SHARE * total_s)
        names = list(self.functions)
        while not self._over((clock() - start) / total_s):
            self.order.shuffle(names)
            self.rounds.append({name: self.stopwatch.block(self.functions[name], calls[name]) for name in names})
        self.wall_s = clock() - began
        self.timed_s = self.stopwatch.timed_s - timed_before
        self.pressure = (pressure_s() - pressed_before) / self.wall_s if self.wall_s > 0 else 0.0

    def _first_calls(self) -> None:
        """Call each function once and learn from the results what must be waited for."""
        clock, start = self.stopwatch.clock, self.stopwatch.clock()
        results = [function() for function in self.functions.values()]
        if self.stopwatch.backend is None:
            self.stopwatch.backend = backends.for_results(results)
        self.stopwatch.backend.synchronize()
        self.stopwatch.timed_s += clock() - start
        self.stopwatch.watch.refresh()

    def _warm_up(self, most_s: float) -> dict[str, int]:
        """Run each function until its times no longer fall, for at most that long; calls a block by function."""
        clock, start = self.stopwatch.clock, self.stopwatch.clock()
        taken = {name: [self.stopwatch.block(function, 1)] for name, function in self.functions.items()}
        calls = {name: self.stopwatch.calls_per_block(blocks[0].call_s) for name, blocks in taken.items()}
        while clock() - start < most_s and not all(map(_is_warm, taken.values())):
            for name, blocks in taken.items():
                blocks.append(self.stopwatch.block(self.functions[name], calls[name]))
        return calls

    def _over(self, used: float) -> bool:
        """Whether to stop after `used` of the budget. The fewest pairs are taken however long they last."""
        n_rounds = len(self.rounds)
        if n_rounds < self.min_pairs or (used < 1 and n_rounds % LOOK_EVERY):
            return False
        self.stopwatch.watch.refresh()
        if used >= 1:
            return used >= GRACE or self._n_clean() >= self.min_pairs
        if self.enough == math.inf and used > PILOT_SHARE:
            self.enough = self._pairs_enough()
        return self._n_clean() >= self.enough or (used > PILOT_SHARE / 2 and self._hopeless())

    def _n_clean(self) -> int:
        """Clean rounds of the alternative that has fewest."""
        return min(len(self.clean_rounds(name)) for name in self.functions if name != self.reference)

    def _hopeless(self) -> bool:
        """Several threads that were mostly kept waiting will not do better: the time is worth more with fewer."""
        return self.stopwatch.n_threads > 1 and self.clean_share() < 1 / 3 and self.delay_share() > 0.1

    def _pairs_enough(self) -> float:
        """Clean pairs after which every interval will be narrow; infinite while the pilot is short or uncertain.

        Several threads have slow states that last longer than a pilot, so they always use their budget.
        """
        if self.stopwatch.n_threads > 1:
            return math.inf
        ratios = [self.log_ratios(name) for name in self.functions if name != self.reference]
        if min(map(len, ratios)) < PILOT_PAIRS:
            return math.inf
        return max(pairs_needed(values, self.precision) for values in ratios)

    def clean_rounds(self, name: str) -> list[dict[str, Block]]:
        """The rounds in which neither the function's nor the reference's block was disturbed or touched new memory.

        Where enough of them began on a settled thread, only those: just after a switch a core is a few percent slow.
        """
        faults = {key: self._usual_faults(key) for key in (name, self.reference)}
        clean = [
            taken
            for taken in self.rounds
            if all(taken[key].clean and not _touched_memory(taken[key], usual) for key, usual in faults.items())
        ]
        settled = [taken for taken in clean if all(taken[key].settled for key in faults)]
        return settled if len(settled) >= max(self.min_pairs, len(clean) / 4) else clean

    def _usual_faults(self, name: str) -> float:
        """Page faults of the function's typical block: a function that faults in every call does so in earnest."""
        return float(np.median([taken[name].faults for taken in self.rounds])) if self.rounds else 0.0

    def log_ratios(self, name: str) -> np.ndarray:
        """ln(time / reference time) of the clean rounds, in the order they were taken."""
        return _log_ratios(self.clean_rounds(name), name, self.reference)

    def clean_share(self) -> float:
        """Share of the rounds that are clean for every alternative."""
        return self._n_clean() / max(1, len(self.rounds))

    def delay_share(self) -> float:
        """Share of the timed seconds for which the thread worst off waited for a core."""
        blocks = [block for taken in self.rounds for block in taken.values()]
        return sum(block.run_delay_s for block in blocks) / max(sum(block.wall_s for block in blocks), 1e-12)

    def problem(self) -> str:
        """Why the trial cannot be trusted, in plain words, or ""."""
        several = self.stopwatch.n_threads > 1 and self.stopwatch.backend.runs_on_host
        share = FEWEST_CLEAN_SHARE["several" if several else "one thread"]
        fewest = self._n_clean()
        if fewest < max(self.min_pairs, share * len(self.rounds)):
            return f"only {fewest} of {len(self.rounds)} pairs were undisturbed{self._usual_reason()}"
        if several and self.delay_share() > MOST_DELAY_SHARE_OF_SEVERAL:
            return f"a thread waited for its core {self.delay_share():.0%} of the time{self._pressed()}"
        return self._quantum() or self._drift()

    def _usual_reason(self) -> str:
        reasons = Counter(block.reason for taken in self.rounds for block in taken.values() if block.reason)
        return f": {reasons.most_common(1)[0][0]}{self._pressed()}" if reasons else ""

    def _pressed(self) -> str:
        return f" (CPU pressure {self.pressure:.0%})" if self.pressure > 0.01 else ""

    def _quantum(self) -> str:
        for name in self.functions:
            quantum_s = waiting_quantum_s(np.array([taken[name].wall_s for taken in self.clean_rounds(name)]))
            if quantum_s:
                return f"times come in steps of {quantum_s * 1e3:.0f} ms, as when a thread waits for its core"
        return ""

    def _drift(self) -> str:
        moved = drift(np.array([taken[self.reference].call_s for taken in self.clean_rounds(self.reference)]))
        return f"the speed of {self.reference!r} changed by {moved:.0%} meanwhile" if moved > MOST_DRIFT else ""

    def interval(self, name: str) -> Interval:
        """Log ratio with its interval, from the clean rounds, or from all when fewer than two are clean."""
        values = self.log_ratios(name)
        return correlated_interval(values if len(values) > 1 else _log_ratios(self.rounds, name, self.reference))

    def median_s(self, name: str) -> float:
        """Median seconds a call over the clean rounds, or over all when none is."""
        return float(np.median([taken[name].call_s for taken in self.clean_rounds(name) or self.rounds]))


def _log_ratios(rounds: list[dict[str, Block]], name: str, reference: str) -> np.ndarray:
    return np.array([math.log(taken[name].call_s / taken[reference].call_s) for taken in rounds])


def _is_warm(blocks: list[Block]) -> bool:
    """Whether the last eight blocks show no falling trend any more; blocks that were disturbed say nothing."""
    times = [block.call_s for block in blocks[1:] if block.clean]
    return len(times) >= WARM_UP_WINDOW and not still_falling(np.array(times[-WARM_UP_WINDOW:]))


def _touched_memory(block: Block, usual_faults: float) -> bool:
    """Whether more page faults than usual cost over 1% of the block."""
    return (block.faults - 2 * usual_faults) * FAULT_S > 0.01 * block.wall_s

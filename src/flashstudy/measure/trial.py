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
from .selection import Pairs, choose
from .statistics import Interval, drift, pairs_needed, still_falling, waiting_quantum_s

# Pairs and share of the budget before the pilot decides how many pairs are enough.
PILOT_PAIRS, PILOT_SHARE = 60, 0.4
WARM_UP_SHARE, WARM_UP_WINDOW = 0.2, 8
LOOK_EVERY = 10
# Several threads wait for the slowest: beside other work even their undisturbed blocks are wrong, so less is forgiven.
FEWEST_CLEAN_SHARE = {"one thread": 0.08, "several": 2 / 3}
MOST_DELAY_SHARE_OF_SEVERAL = 0.05
GRACE = 2.0
# With every core of a small machine in use ratios differ between comparisons by up to a quarter while each of them is
# steady (two threads on two shared cores, quiet): ln of the ratio gets this on both sides.
NO_SPARE_CORE = 0.25
# A first call this long has warmed up whatever there is: one call is a block; another would cost more than it tells.
LONG_S = 0.1
MOST_DRIFT = 0.3


@dataclass
class Trial:
    """Alternatives, how they are timed, and the rounds taken so far: one clean or spoiled block a function each."""

    functions: Mapping[str, Callable[[], Any]]
    reference: str
    stopwatch: Stopwatch
    order: random.Random
    min_pairs: int
    precision: float
    allowance: float = 0.0
    rounds: list[dict[str, Block]] = field(default_factory=list)
    first_s: dict[str, float] = field(default_factory=dict)
    enough: float = math.inf
    wall_s: float = 0.0
    timed_s: float = 0.0
    pressure: float = 0.0
    _chosen: dict[tuple[str, str], tuple[int, Pairs]] = field(default_factory=dict)  # with the rounds it was made of

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
        results = []
        for name, function in self.functions.items():
            began = clock()
            results.append(function())
            self.first_s[name] = clock() - began
        if self.stopwatch.backend is None:
            self.stopwatch.backend = backends.for_results(results)
        self.stopwatch.backend.synchronize()
        self.stopwatch.timed_s += clock() - start
        self.stopwatch.watch.refresh()

    def _warm_up(self, most_s: float) -> dict[str, int]:
        """Run each function until its times no longer fall, for at most that long; calls a block by function."""
        clock, start = self.stopwatch.clock, self.stopwatch.clock()
        calls = {name: 1 for name, first_s in self.first_s.items() if first_s > LONG_S}
        taken = {name: [self.stopwatch.block(self.functions[name], 1)] for name in self.functions if name not in calls}
        calls |= {name: self.stopwatch.calls_per_block(blocks[0].call_s) for name, blocks in taken.items()}
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

    def pairs(self, name: str) -> Pairs:
        """The pairs of one function with the reference that may be believed."""
        n_rounds, chosen = self._chosen.get((name, self.reference), (-1, None))
        if chosen is None or n_rounds != len(self.rounds):
            chosen = choose(self.rounds, name, self.reference, self.min_pairs)
            self._chosen[name, self.reference] = (len(self.rounds), chosen)
        return chosen

    def _n_clean(self) -> int:
        """Believable pairs of the alternative that has fewest."""
        return min(len(self.pairs(name)) for name in self.functions if name != self.reference)

    def _hopeless(self) -> bool:
        """Several threads that were mostly kept waiting will not do better: the time is worth more with fewer."""
        return self.stopwatch.n_threads > 1 and self.clean_share() < 1 / 3 and self.delay_share() > 0.1

    def _pairs_enough(self) -> float:
        """Clean pairs after which every interval will be narrow; infinite while the pilot is short or uncertain.

        Several threads have slow states that last longer than a pilot, so they always use their budget.
        """
        if self.stopwatch.n_threads > 1:
            return math.inf
        pilots = [self.pairs(name) for name in self.functions if name != self.reference]
        if min(map(len, pilots)) < PILOT_PAIRS:
            return math.inf
        return max(pairs_needed(pilot.log_ratios, self.precision) for pilot in pilots)

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
            quantum_s = waiting_quantum_s(np.array([taken[name].wall_s for taken in self.pairs(name).rounds]))
            if quantum_s:
                return f"times come in steps of {quantum_s * 1e3:.0f} ms, as when a thread waits for its core"
        return ""

    def _drift(self) -> str:
        moved = drift(self.pairs(self.reference).times_s(self.reference))
        return f"the speed of {self.reference!r} changed by {moved:.0%} meanwhile" if moved > MOST_DRIFT else ""

    def interval(self, name: str) -> Interval:
        """Log ratio with its interval, from the believable pairs, or from all when fewer than two are left.

        `allowance` is added on both sides: what differs between comparisons and cannot be seen within one.
        """
        pairs = self.pairs(name)
        found = (pairs if len(pairs) > 1 else self._all(name)).interval
        if name == self.reference:
            return found
        return Interval(found.estimate, found.low - self.allowance, found.high + self.allowance)

    def median_s(self, name: str) -> float:
        """Median seconds a call over the believable pairs, or over all when none is left."""
        return float(np.median((self.pairs(name) or self._all(name)).times_s(name)))

    def _all(self, name: str) -> Pairs:
        return Pairs(tuple(self.rounds), 0.0, name, self.reference)


def _is_warm(blocks: list[Block]) -> bool:
    """Whether the last eight blocks show no falling trend any more; blocks that were disturbed say nothing."""
    times = [block.call_s for block in blocks[1:] if block.clean]
    return len(times) >= WARM_UP_WINDOW and not still_falling(np.array(times[-WARM_UP_WINDOW:]))

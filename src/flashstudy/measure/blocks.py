"""One block: a few calls of one function, timed together, with the judgement whether the machine was ours meanwhile."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .backends import HOST, Backend
from .contention import TOLERANCE_S, Reading, Watch, between

# Shortest block. Two readings of the accounts cost about 20 microseconds, 2% of it; a longer block would be hit more
# often by a scheduler's quantum of 3-4 ms. Queued work gets more: waiting for an accelerator costs tens of
# microseconds.
HOST_BLOCK_S, QUEUED_BLOCK_S = 1e-3, 5e-3
# The clock's step and the readings may make up this share of a block.
CLOCK_SHARE, READING_SHARE = 0.01, 0.1
# A thread that was just put back on a core is slower for about a millisecond: caches and address translations are
# cold.
SETTLED_S = 1e-3
# After a wait, so many blocks begin by offering the core to whoever else wants it.
CROWDED_BLOCKS = 20


@dataclass(frozen=True)
class Block:
    """Seconds a call, seconds of the whole block, why it is spoiled ("" when clean), and what went before it.

    settled: the process had run undisturbed for a millisecond when the block began. faults: page faults in it.
    run_delay_s: seconds for which the thread worst off waited for a core, the gap before the block included.
    """

    call_s: float
    wall_s: float
    reason: str = ""
    settled: bool = True
    faults: int = 0
    run_delay_s: float = 0.0

    @property
    def clean(self) -> bool:
        """Nothing disturbed the block."""
        return not self.reason


@dataclass
class Stopwatch:
    """Times blocks: clock, backend and accounts in one place, so that each can be replaced."""

    clock: Callable[[], float] = time.perf_counter
    backend: Backend | None = None
    watch: Watch = field(default_factory=Watch)
    n_threads: int = 1
    timed_s: float = 0.0
    _undisturbed_s: float = 0.0
    _crowded: int = 0
    _last: Reading | None = None
    _overhead_s: float | None = None

    def block(self, function: Callable[[], Any], n_calls: int) -> Block:
        """Time `n_calls` calls. The last result lives until the clock is read, so freeing it is not timed."""
        if self._overhead_s is None:
            self._overhead_s = self._empty_call_s()
        backend = self.backend or HOST
        self._give_way(backend)
        backend.synchronize()
        before = self.watch.read()
        result, calls, start = None, range(n_calls), self.clock()
        for _ in calls:
            result = function()
        backend.synchronize()
        wall_s = self.clock() - start
        after = self.watch.read()
        del result
        self.timed_s += wall_s
        call_s = max(wall_s / n_calls - self._overhead_s, wall_s / n_calls / 2)
        return self._judge(call_s, wall_s, before, after, backend.runs_on_host)

    def _give_way(self, backend: Backend) -> None:
        """Where the core is shared, let the others run now: the block then begins with a full turn of its own.

        With the core to itself the thread goes on at once. Several threads would not come back together.
        """
        if self._crowded and self.n_threads == 1 and backend.runs_on_host and hasattr(os, "sched_yield"):
            os.sched_yield()
        self._crowded = max(0, self._crowded - 1)

    def _judge(self, call_s: float, wall_s: float, before: Reading, after: Reading, runs_on_host: bool) -> Block:
        """The block with the accounts' verdict; keeps track of how long the process has run undisturbed."""
        during, waited_before = between(before, after), between(self._last or before, before).run_delay_s
        self._last = after
        if waited_before > TOLERANCE_S:
            self._undisturbed_s = 0.0
        if max(waited_before, during.run_delay_s) > TOLERANCE_S:
            self._crowded = CROWDED_BLOCKS
        settled = self._undisturbed_s >= SETTLED_S or not during.knows_delay
        self._undisturbed_s = 0.0 if during.run_delay_s > TOLERANCE_S else self._undisturbed_s + wall_s
        reason = during.reason(wall_s, self.n_threads, runs_on_host)
        return Block(call_s, wall_s, reason, settled, during.faults, during.run_delay_s + waited_before)

    def calls_per_block(self, call_s: float) -> int:
        """Calls that make a block long enough for the clock, the readings and, on an accelerator, the wait."""
        shortest = HOST_BLOCK_S if (self.backend or HOST).runs_on_host else QUEUED_BLOCK_S
        target_s = max(shortest, self._clock_step_s() / CLOCK_SHARE, self._reading_s() / READING_SHARE)
        return max(1, math.ceil(target_s / max(call_s, 1e-9)))

    def _clock_step_s(self) -> float:
        """Smallest step between successive readings of the clock: resolution and cost in one."""
        readings = [self.clock() for _ in range(50)]
        return max(1e-9, min(b - a for a, b in zip(readings, readings[1:], strict=False)))

    def _reading_s(self) -> float:
        """Seconds that one reading of the accounts costs: more threads, more files."""
        start = self.clock()
        for _ in range(10):
            self.watch.read()
        return (self.clock() - start) / 10

    def _empty_call_s(self) -> float:
        """Seconds that calling a function which does nothing costs; taken off each call."""
        calls, tries = range(1000), []
        for _ in range(3):
            start = self.clock()
            for _ in calls:
                _nothing()
            tries.append((self.clock() - start) / 1000)
        return min(tries)


def _nothing() -> None:
    """The cost of a call alone."""

"""A clock that only moves when a synthetic function is called: noise with a known truth, whatever the machine does."""

import math
from collections.abc import Callable

import numpy as np

from flashstudy.measure.blocks import Stopwatch
from flashstudy.measure.contention import Reading, Watch


class SyntheticClock:
    """Seconds that advance by what the functions made from it "take"."""

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.rng = np.random.default_rng(seed)

    def __call__(self) -> float:
        return self.now_s

    def function(self, call_s: float, *, noise: float, correlation: float) -> Callable[[], None]:
        """A function that takes `call_s` times exp(AR(1) noise): standard deviation `noise`, neighbors correlate so."""
        state = self.rng.standard_normal()

        def call() -> None:
            nonlocal state
            fresh = self.rng.standard_normal()
            state = correlation * state + math.sqrt(1 - correlation**2) * fresh
            self.now_s += call_s * math.exp(noise * state)

        return call


class SilentWatch(Watch):
    """Accounts that never show any other work: the thread computes whenever the clock moves."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock

    def refresh(self) -> None:
        """There are no threads to look for."""

    def read(self) -> Reading:
        """CPU time equals the clock."""
        return Reading(self.clock(), {}, 0, 0, 0)


def stopwatch(clock: SyntheticClock) -> Stopwatch:
    """A stopwatch on the synthetic clock."""
    return Stopwatch(clock=clock, watch=SilentWatch(clock))

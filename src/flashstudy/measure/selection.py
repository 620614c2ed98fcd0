"""Which pairs may be believed, when other work shares the cores.

Dropping every pair in which a thread waited is not enough. A thread that shares its core gets it for a few
milliseconds at a time, so long blocks survive only when they happen to be short, and each begins on a core whose
caches and address translations are cold: ratios come out wrong by up to a tenth. Pairs that began on a *settled*
thread were taken while the thread had the core to itself and have neither fault. Pairs that began just after a wait
are used only when they nearly always fit between two waits, and then with a wider interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .blocks import Block
from .statistics import Interval, correlated_interval

Round = dict[str, Block]
# Of the blocks that begin just after a wait, so many must end before the next, or those that do are the short ones.
MOSTLY_FIT = 0.6
# A cold start made ratios of 2-4 ms kernels wrong by 0-3% where the blocks fitted (two busy processes on two cores).
COLD_START = 0.02
# Seconds one first-touch page fault costs, kernel and zeroing together: 0.1-1 microsecond, the lower half.
FAULT_S = 0.25e-6


@dataclass(frozen=True)
class Pairs:
    """The rounds from which one ratio is taken, in order, and the log ratio's error that their selection leaves."""

    rounds: tuple[Round, ...]
    allowance: float
    name: str
    reference: str

    def __len__(self) -> int:
        return len(self.rounds)

    @cached_property
    def log_ratios(self) -> np.ndarray:
        """ln(time / reference time) of each round."""
        return np.array([math.log(taken[self.name].call_s / taken[self.reference].call_s) for taken in self.rounds])

    @cached_property
    def interval(self) -> Interval:
        """95% interval of the log ratio, the allowance added to both sides."""
        found = correlated_interval(self.log_ratios)
        return Interval(found.estimate, found.low - self.allowance, found.high + self.allowance)

    def times_s(self, name: str) -> np.ndarray:
        """Seconds a call of one of the two in each round."""
        return np.array([taken[name].call_s for taken in self.rounds])


def choose(rounds: Sequence[Round], name: str, reference: str, min_pairs: int) -> Pairs:
    """The settled pairs, or all that fit between two waits, whichever bounds the ratio more closely; both clean.

    Fewer than `min_pairs` come back when neither kind has enough.
    """
    usual = {key: usual_faults(rounds, key) for key in (name, reference)}
    clean = [taken for taken in rounds if all(_usable(taken[key], faults) for key, faults in usual.items())]
    settled = Pairs(tuple(taken for taken in clean if all(taken[key].settled for key in usual)), 0.0, name, reference)
    if len(settled) == len(clean) or not all(fits(rounds, key) for key in usual):
        return settled
    every = Pairs(tuple(clean), COLD_START, name, reference)
    if len(settled) < min_pairs:
        return every
    return min(settled, every, key=lambda pairs: pairs.interval.half_width)


def fits(rounds: Sequence[Round], name: str) -> bool:
    """Whether the function's blocks that begin just after a wait mostly end before the next."""
    cold = [taken[name] for taken in rounds if not taken[name].settled]
    return sum(block.clean for block in cold) >= MOSTLY_FIT * len(cold)


def usual_faults(rounds: Sequence[Round], name: str) -> float:
    """Page faults of the function's typical block: a function that faults in every call does so in earnest."""
    return float(np.median([taken[name].faults for taken in rounds])) if rounds else 0.0


def _usable(block: Block, faults: float) -> bool:
    """Clean, and not more than 1% of it spent on touching memory for the first time."""
    return block.clean and (block.faults - 2 * faults) * FAULT_S <= 0.01 * block.wall_s

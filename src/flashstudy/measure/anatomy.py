"""Where a decode step's time goes: reading its bytes, its kernels, the loop around them, the library around that.

The library's step, the same weights in the measuring loop, the kernels alone and a plain read of as many bytes run in
the same interleaved rounds; each part is the difference of two of them, as a share of the library's step. The plain
reader also is the ceiling: its time over the step's is the share of the memory bandwidth that the step reaches (MBU).
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashstudy.compress import inspect_model
from flashstudy.compress.variants import Variant

from . import rotation, steps, timing
from .statistics import Interval, correlated_interval

STEP, LOOP, KERNELS = "library step", "loop", "kernels"
ROW = 1024  # floats in a row of the memory that is read plainly
PAGE_BYTES = 4 * ROW


@dataclass(frozen=True)
class Anatomy:
    """The rounds of one step. read_bytes: what it must read. not_looped: why the measuring loop does not run it, or "".

    Without the loop KERNELS are the linear layers alone, and what lies beyond them is not taken apart.
    """

    rounds: timing.Rounds
    read_bytes: int
    readers: tuple[str, ...]
    not_looped: str

    @functools.cached_property
    def ceiling(self) -> str:
        """The fastest reader of the step's bytes; the kernels are one, so that nothing exceeds it."""
        return min((*self.readers, *(() if self.not_looped else (KERNELS,))), key=self.rounds.median_s)

    @property
    def problem(self) -> str:
        """Why the rounds are not to be believed, "" when they are."""
        found = [one for one in self.rounds.against(STEP).values() if one.contended]
        return found[0].reason or "the machine was busy" if found else ""

    @property
    def n_threads(self) -> int:
        """Threads that the rounds ran with."""
        return self.rounds.against(STEP)[STEP].n_threads

    def share(self, name: str) -> Interval:
        """Time of one alternative over the library's step, from their pairs."""
        found = self.rounds.against(STEP)[name]
        return Interval(found.ratio, found.low, found.high)

    def time_s(self, name: str) -> Interval:
        """Seconds a call of one alternative, from the clean blocks."""
        trial = self.rounds.trial
        pairs = trial.pairs(name)
        times_s = pairs.times_s(name) if len(pairs) > 1 else np.array([taken[name].call_s for taken in trial.rounds])
        found = correlated_interval(np.log(times_s))
        ends = found.estimate, found.low - trial.allowance, found.high + trial.allowance
        return Interval(*(math.exp(end) for end in ends))

    def parts(self) -> dict[str, Interval]:
        """Shares of the step that sum to 1: "read", "kernels", then "loop" and "library", or "rest" without a loop."""
        names = {"read": self.ceiling, "kernels": KERNELS}
        names |= {"rest": STEP} if self.not_looped else {"loop": LOOP, "library": STEP}
        found = {"read": self.share(self.ceiling)}
        for (_, smaller), (part, larger) in itertools.pairwise(names.items()):
            found[part] = self.difference(larger, smaller)
        return found

    def difference(self, larger: str, smaller: str) -> Interval:
        """Time of one alternative less that of another, over the step's, from the rounds in which all three are clean.

        The estimate is the difference of the two shares, so that parts sum to 1.
        """
        if larger == smaller:
            return Interval(0.0, 0.0, 0.0)
        trial = self.rounds.trial
        estimate = self.share(larger).estimate - self.share(smaller).estimate
        clean = [
            one for one in trial.pairs(larger).rounds if any(one is other for other in trial.pairs(smaller).rounds)
        ]
        taken = clean if len(clean) > 1 else trial.rounds
        samples = [(one[larger].call_s - one[smaller].call_s) / one[STEP].call_s for one in taken]
        found, allowance = correlated_interval(np.array(samples)), trial.allowance * self.share(larger).estimate
        moved = estimate - found.estimate
        return Interval(estimate, found.low + moved - allowance, found.high + moved + allowance)


def measure(
    variant: Variant,
    *,
    context: int,
    read_bytes: int,
    llc_bytes: int,
    beside: Mapping[str, Callable] | None = None,
    budget_s: float,
    n_threads: int | None = None,
    seed: int = 0,
) -> Anatomy:
    """The anatomy of one step of the variant behind `context` tokens, at batch 1.

    read_bytes: weights and cache that the step must read. beside: further calls for the same rounds. budget_s: seconds
    for each call. Raises ValueError for a model that has no decode step.
    """
    calls: dict[str, Callable] = {STEP: steps.decode(variant, context=context, seed=seed)}
    not_looped = ""
    try:
        calls[LOOP] = steps.loop(variant, context=context, seed=seed)
        calls[KERNELS] = steps.kernels(variant, context=context, seed=seed)
    except ValueError as error:
        calls.pop(LOOP, None)
        calls[KERNELS], not_looped = products(variant), str(error)
    readers = reads(read_bytes, llc_bytes)
    calls |= readers | dict(beside or {})
    rounds = timing.measure(calls, budget_s=budget_s, n_threads=n_threads, seed=seed)
    return Anatomy(rounds, read_bytes, tuple(readers), not_looped)


def products(variant: Variant) -> Callable[[], None]:
    """A call of every linear layer of the variant on one row, and nothing else."""
    like = dict(dtype=variant.model.dtype, device=variant.model.device)
    found = [layer for layer in inspect_model.layers(variant.model) if hasattr(layer, "in_features")]
    inputs = [(layer, torch.ones(1, layer.in_features, **like)) for layer in found]

    @torch.inference_mode()
    def run() -> None:
        for layer, x in inputs:
            layer(x)

    return run


def reads(n_bytes: int, llc_bytes: int) -> dict[str, Callable[[], None]]:
    """Plain readers of n_bytes of memory (to the next page), by name."""
    parts, vector = passes(n_bytes, llc_bytes), torch.ones(ROW)

    @torch.inference_mode()
    def by_sum() -> None:
        for part in parts:
            part.sum()

    @torch.inference_mode()
    def by_product() -> None:
        for part in parts:
            torch.mv(part, vector)

    return {"read by sum": by_sum, "read by matrix-vector product": by_product}


def passes(n_bytes: int, llc_bytes: int) -> list[Tensor]:
    """Views of one buffer, floats [rows, ROW], whose bytes add up to n_bytes.

    The buffer is four last-level caches long, or n_bytes where that is less: a large model needs no second copy of its
    size, a small one is read from the cache as its own weights are.
    """
    n_rows = max(1, round(n_bytes / PAGE_BYTES))
    n_held = min(n_rows, math.ceil(rotation.CACHES_BEYOND * llc_bytes / PAGE_BYTES))
    held = torch.ones(n_held, ROW)
    rest = n_rows % n_held
    return [held] * (n_rows // n_held) + ([held[:rest]] if rest else [])

"""Where one layer's time goes, each part measured by itself and none left over.

A path of several kernels is run with the clock read between them, in the order and in the caches in which they always
run; that their sum is the layer's time is then a test, against the same layer timed whole in the same rounds. One
fused kernel has no inside to read: its bytes are timed as a plain read of as many, its instructions as the same kernel
on a weight that stays in the cache, its call on a weight of a few rows. Reading and computing overlap, so these are
bounds, not terms of a sum.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashstudy.compress.linear import CompressedLinear
from flashstudy.compress.products import Dequantize

from . import rotation, timing
from .statistics import correlated_interval

WHOLE, SUM = "whole", "sum of parts"


@dataclass(frozen=True)
class Part:
    """One part's time over the whole layer's, with a 95% interval. kind: "stage" (terms of a sum) or "bound"."""

    name: str
    kind: str
    share: float
    low: float
    high: float
    contended: bool
    reason: str


def of_layer(
    copies: Sequence[CompressedLinear],
    x: Tensor,
    tiny: CompressedLinear,
    *,
    llc_bytes: int,
    budget_s: float,
    n_threads: int | None = None,
    seed: int = 0,
) -> list[Part]:
    """The parts of a layer's time, its copies in rotation: stages where it has some, else bounds.

    tiny: the same kernel on a weight that costs next to nothing. budget_s: seconds for each alternative timed.
    """
    timed = dict(budget_s=budget_s, n_threads=n_threads, seed=seed)
    if isinstance(copies[0].product, Dequantize):
        return stages(copies, x, **timed)
    calls = {WHOLE: rotation.rotate(copies, x), "bytes": rotation.plain_read(copies[0].read_bytes, llc_bytes)}
    if copies[0].read_bytes <= llc_bytes / 2:
        calls["instructions"] = rotation.rotate(copies[:1], x)
    calls["launch"] = rotation.rotate([tiny], x[:, : tiny.in_features].contiguous())
    return bounds(calls, WHOLE, **timed)


def stages(
    copies: Sequence[CompressedLinear],
    x: Tensor,
    *,
    budget_s: float,
    n_threads: int | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Part]:
    """The stages of a layer that unpacks before it multiplies, x [rows, in], its copies in rotation, and their sum.

    budget_s: seconds for each of two alternatives. Raises ValueError for a layer that is one kernel.
    """
    if not all(isinstance(layer.product, Dequantize) for layer in copies):
        raise ValueError(f"{copies[0].info.kernel} is one kernel and has no stages")
    taken: dict[str, list[float]] = {}
    calls = {WHOLE: rotation.rotate(copies, x), SUM: _staged(copies, x, taken, clock)}
    found = timing.compare_many(calls, WHOLE, budget_s=budget_s, n_threads=n_threads, seed=seed)[SUM]
    total = np.sum(list(taken.values()), axis=0)
    parts = [_scaled(name, np.array(times_s) / total, found) for name, times_s in taken.items()]
    return [*parts, Part(SUM, "stage", found.ratio, found.low, found.high, found.contended, found.reason)]


def bounds(
    calls: Mapping[str, Callable], whole: str, *, budget_s: float, n_threads: int | None = None, seed: int = 0
) -> list[Part]:
    """Each call's time over that of `calls[whole]`, from the same rounds."""
    found = timing.compare_many(calls, whole, budget_s=budget_s, n_threads=n_threads, seed=seed)
    return [
        Part(name, "bound", one.ratio, one.low, one.high, one.contended, one.reason)
        for name, one in found.items()
        if name != whole
    ]


def _staged(
    copies: Sequence[CompressedLinear], x: Tensor, taken: dict[str, list[float]], clock: Callable[[], float]
) -> Callable[[], Tensor]:
    """The layer stage by stage, each one's seconds appended to its list in `taken`."""
    turn = itertools.cycle(copies)

    @torch.inference_mode()
    def run() -> Tensor:
        before, results = clock(), ()
        for name, stage in next(turn).product.stages(x):
            results = (stage(*results),)
            after = clock()
            taken.setdefault(name, []).append(after - before)
            before = after
        return results[0]

    return run


def _scaled(name: str, shares: np.ndarray, total: timing.Comparison) -> Part:
    """A stage's share of the staged run, brought to the whole layer's time; both uncertainties in quadrature."""
    share = correlated_interval(shares)
    estimate = share.estimate * total.ratio
    relative = math.hypot(share.half_width / share.estimate, math.log(total.high / total.low) / 2)
    return Part(
        name, "stage", estimate, estimate * math.exp(-relative), estimate * math.exp(relative), total.contended,
        total.reason,
    )  # fmt: skip


def rows_of(parts: Sequence[Part]) -> Iterator[dict]:
    """The parts in the columns of a result."""
    for part in parts:
        yield dict(
            part=part.name, note=part.kind, part_share=part.share, low=part.low, high=part.high,
            contended=part.contended, reason=part.reason,
        )  # fmt: skip

"""Which kernel multiplies a stored format fastest on this machine, and does it still compute the right product?

All kernels of a format run against the best dense path in interleaved rounds, each walking through copies of its weight
that together exceed the last-level cache four times, so that every call reads from memory. A kernel is acceptable when
the error it adds stays below what the format's own rounding costs (`compress.probes`): a faster wrong product is none.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor, nn

from flashstudy.compress import probes
from flashstudy.compress.kernel_table import FLOAT_DTYPES, KernelInfo, WeightLayout, available_kernels, without_compiled
from flashstudy.compress.linear import make_linear
from flashstudy.facts.recipes import Recipe
from flashstudy.measure import host, rotation
from flashstudy.measure.timing import Comparison, compare_many

PREFILL_ROWS, DECODE_STEPS = 256, 64  # the task of the pair: 256 tokens in, 64 out
SHAPE_SHARE = 0.7  # so much of the weights is measured by `fill`, largest shapes first; the rest follows them
ACCEPTABLE = "acceptable"  # the note of a kernel whose error stays below what its format costs
HOPELESS = 3.0  # times the fastest in one warm call: left out of the interleaved rounds of `fill`


@dataclass(frozen=True, eq=False)
class Alternative:
    """One kernel set up on one weight, with the error it adds and the largest that its format allows."""

    info: KernelInfo
    layout: WeightLayout
    layer: nn.Module
    relative_error: float
    bound: float

    @property
    def acceptable(self) -> bool:
        """Is the error within the bound?"""
        return self.relative_error <= self.bound

    @property
    def note(self) -> str:
        """ACCEPTABLE, or the bound that the error exceeds."""
        return ACCEPTABLE if self.acceptable else f"error above {self.bound:g}, what the format itself costs"


def rank(
    weight_format: str,
    *,
    out_features: int,
    in_features: int,
    rows: int,
    n_threads: int | None = None,
    budget_s: float = 0.3,
    seed: int = 0,
    layout: WeightLayout | None = None,
    sparsity: float = 0.0,
    activation_format: str = "",
    standard_dtype: str = "",
    residency: str = "streamed",
) -> pd.DataFrame:
    """One row a kernel of the format, the standard's dense path first: time ratio to it with interval, and error.

    `budget_s` seconds a kernel. What cannot run here, or would be compiled first, has the reason in `skipped`; `note`
    says "acceptable" or which bound the error exceeds; role "best" marks the fastest acceptable kernel.
    `standard_dtype` "" asks the machine card. residency "hot_cache" uses one weight over and over instead of streaming
    copies.
    """
    if residency not in ("streamed", "hot_cache"):
        raise ValueError(f"residency {residency!r} is not 'streamed' or 'hot_cache'")
    layout = layout or default_layout(weight_format)
    bench = Bench((out_features, in_features), standard_type(standard_dtype), sparsity, seed)
    found = [without_compiled(info) for info in available_kernels(weight_format, layout=layout, shape=bench.shape)]
    runs = {"standard": bench.standard()}
    runs |= {info.kernel: bench.alternative(info, layout, activation_format) for info in found if info.available}
    calls = {name: bench.call(run.layer, rows, residency) for name, run in runs.items()}
    comparisons = compare_many(calls, "standard", budget_s=budget_s, n_threads=n_threads)
    table = [_row(run, comparisons[name]) for name, run in runs.items()]
    table += [_skipped(info) for info in found if not info.available]
    frame = pd.DataFrame(table).assign(
        rows=rows, out_features=out_features, in_features=in_features, sparsity=sparsity, residency=residency
    )
    return _with_best(frame)


def fill(
    recipe: Recipe,
    *,
    shapes: Sequence[tuple[int, int]],
    budget_s: float = 6.0,
    n_threads: int | None = None,
    seed: int = 0,
    standard_dtype: str = "",
) -> tuple[Recipe, bool]:
    """The recipe with "unknown" paths replaced by the best this machine has, and whether the machine was busy.

    A recipe without any comes back as it is.

    shapes: (out, in) of every layer, repeated as often as they occur. The acceptable kernel with the least time for the
    task (one prefill of 256 rows, 64 decode steps of one row) wins. `budget_s` is for all of it. A pruned recipe ends
    with its zeros stored dense where that beats decompressing. An int8 cache is dequantized: no other path is built.
    """
    if recipe.kv_path == "unknown":
        recipe = dataclasses.replace(recipe, kv_path="dequantize_then_matmul")
    if recipe.kernel_path != "unknown":
        return recipe, False
    main = main_shapes(shapes)
    totals, seen, contended = Counter(), Counter(), False
    budget_s /= 2 * len(main)  # a decode and a prefill comparison for each shape
    for shape, count in main.items():
        bench = Bench(shape, standard_type(standard_dtype), recipe.sparsity, seed)
        runs, standard = bench_runs(recipe, bench), bench.standard()
        for rows, n_calls in ((1, DECODE_STEPS), (PREFILL_ROWS, 1)):
            times, was_busy = _times(runs, standard, bench, rows, budget_s, n_threads)
            contended |= was_busy
            for key, time_s in times.items():
                totals[key] += time_s * n_calls * count
                seen[key] += 1
    complete = {key: total for key, total in totals.items() if seen[key] == 2 * len(main)}
    if not complete:
        raise ValueError(f"no kernel here multiplies {recipe.weight_format} within the bound of its format")
    return _chosen(recipe, runs[min(complete, key=complete.get)]), contended


def main_shapes(shapes: Sequence[tuple[int, int]]) -> Counter:
    """How often each of the shapes occurs that hold SHAPE_SHARE of all weights, those with the most weights first."""
    if not shapes:
        raise ValueError("shapes is empty: give (out_features, in_features) of at least one layer")
    counts = Counter(tuple(shape) for shape in shapes)
    weights = {shape: count * shape[0] * shape[1] for shape, count in counts.items()}
    chosen: Counter = Counter()
    for shape in sorted(counts, key=weights.get, reverse=True):
        if sum(weights[done] for done in chosen) < SHAPE_SHARE * sum(weights.values()):
            chosen[shape] = counts[shape]
    return chosen


def default_layout(weight_format: str) -> WeightLayout:
    """Dense and symmetric, per channel; int4 in groups of 64."""
    return (
        WeightLayout(weight_format, granularity="group", group_size=64)
        if weight_format == "int4"
        else WeightLayout(weight_format)
    )


def standard_type(standard_dtype: str = "") -> torch.dtype:
    """The named dtype, or the one in which the standard model runs on this machine."""
    if not standard_dtype:
        from flashstudy.measure import machine

        standard_dtype = machine.card().standard_dtype
    return getattr(torch, standard_dtype)


class Bench:
    """One weight shape on which kernels are set up to be timed side by side; `dtype` is the standard's."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, sparsity: float, seed: int) -> None:
        self.shape, self.dtype, self.sparsity, self.seed = shape, dtype, sparsity, seed
        self._weights: dict[WeightLayout, Tensor] = {}
        self._copies: dict[int, list[nn.Module]] = {}

    def weight(self, layout: WeightLayout) -> Tensor:
        """The float weight to store in a layout."""
        if layout not in self._weights:
            self._weights[layout] = probes.random_weight(*self.shape, layout, self.sparsity, self.seed)
        return self._weights[layout]

    def standard(self) -> Alternative:
        """The dense product in the standard's dtype."""
        name = next(name for name, dtype in FLOAT_DTYPES.items() if dtype == self.dtype)
        run = self.alternative(KernelInfo("dense", "dense", name, "standard"), WeightLayout(name))
        return dataclasses.replace(run, info=KernelInfo(f"dense {name}", "dense", name, "standard"))

    def alternative(self, info: KernelInfo, layout: WeightLayout, activation_format: str = "") -> Alternative:
        """The kernel on the weight in that layout, its error measured."""
        layer = make_linear(self.weight(layout), kernel=info.kernel, **dataclasses.asdict(layout))
        exact = probes.exact_weight(layer, self.weight(layout), layout)
        error = probes.relative_error(layer, exact, self.dtype, self.seed)
        bound = probes.error_bound(layout.weight_format, activation_format, self.dtype)
        return Alternative(info, layout, layer, error, bound)

    def call(self, layer: nn.Module, rows: int, residency: str = "streamed") -> Callable[[], Tensor]:
        """A product with `rows` rows, each time with the next of enough copies to exceed the cache, or with one."""
        x = probes.activations(rows, self.shape[1], self.seed).to(self.dtype)
        if residency == "hot_cache":
            return rotation.rotate([layer], x)
        if id(layer) not in self._copies:  # decode and prefill use the same ones
            self._copies[id(layer)] = rotation.copies(layer, host.read().llc_bytes)
        return rotation.rotate(self._copies[id(layer)], x)


def bench_runs(recipe: Recipe, bench: Bench) -> dict[tuple[str, str], Alternative]:
    """Every acceptable kernel for what the recipe stores, by its name and storage; naive ones are left out."""
    runs = {}
    for layout in _layouts(recipe):
        for info in available_kernels(recipe.weight_format, layout=layout, shape=bench.shape):
            rounds_activations = info.activation_dtype == "int8"
            may_win = info.available and info.role != "naive" and not info.compiled
            if may_win and rounds_activations <= (recipe.activation_format == "int8"):
                runs[info.kernel, info.sparse_format] = bench.alternative(info, layout, recipe.activation_format)
    return {key: run for key, run in runs.items() if run.acceptable}


def _times(
    runs: dict[tuple[str, str], Alternative],
    standard: Alternative,
    bench: Bench,
    rows: int,
    budget_s: float,
    n_threads: int | None,
) -> tuple[dict[tuple[str, str], float], bool]:
    """Seconds a call of each kernel, in rounds or of one warm call where that is hopeless; was the machine busy?"""
    warm_s = {key: _one_call_s(bench.call(run.layer, rows, "hot_cache")) for key, run in runs.items()}
    contenders = [key for key in runs if warm_s[key] < HOPELESS * min(warm_s.values())]
    calls = {"standard": bench.call(standard.layer, rows)}
    calls |= {key: bench.call(runs[key].layer, rows) for key in contenders}
    comparisons = compare_many(calls, "standard", budget_s=budget_s / len(calls), n_threads=n_threads)
    standard_s = comparisons["standard"].standard_s
    times_s = warm_s | {key: comparisons[key].ratio * standard_s for key in contenders}
    return times_s, any(comparison.contended for comparison in comparisons.values())


def _layouts(recipe: Recipe) -> list[WeightLayout]:
    """The recipe's own storage, and dense storage of the same values."""
    names = ("weight_format", "granularity", "group_size", "symmetric", "sparse_format", "block")
    own = WeightLayout(**{name: getattr(recipe, name) for name in names})
    return [own] if own.sparse_format == "dense" else [own, dataclasses.replace(own, sparse_format="dense")]


def _one_call_s(call: Callable[[], Tensor]) -> float:
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _chosen(recipe: Recipe, run: Alternative) -> Recipe:
    path = run.info.kernel_path
    zeros_kept = recipe.sparsity > 0 and run.layout.sparse_format == "dense"
    if zeros_kept and path == "dense":
        path = "stored_dense"
    block = recipe.block if run.layout.sparse_format == "bsr" or recipe.pattern == "block" else (0, 0)
    return dataclasses.replace(
        recipe, kernel=run.info.kernel, kernel_path=path, sparse_format=run.layout.sparse_format, block=block
    )


def _row(run: Alternative, comparison: Comparison) -> dict:
    time_s = comparison.ratio * comparison.standard_s
    return dict(
        weight_format=run.info.weight_format,
        sparse_format=run.info.sparse_format,
        kernel=run.info.kernel,
        kernel_path=run.info.kernel_path,
        role=run.info.role,
        time_ratio=comparison.ratio,
        low=comparison.low,
        high=comparison.high,
        n_pairs=comparison.n_pairs,
        contended=comparison.contended,
        reason=comparison.reason,
        n_threads=comparison.n_threads,
        time_s=time_s,
        standard_s=comparison.standard_s,
        read_bytes=run.layer.read_bytes,
        read_bytes_per_s=run.layer.read_bytes / time_s,
        relative_error=run.relative_error,
        note=run.note,
        skipped="",
    )


def _skipped(info: KernelInfo) -> dict:
    return dict(
        weight_format=info.weight_format,
        sparse_format=info.sparse_format,
        kernel=info.kernel,
        kernel_path=info.kernel_path,
        role=info.role,
        skipped=info.reason,
        note="",
        reason="",
    )


def _with_best(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with role "best" on its fastest acceptable kernel; "candidate" on what else an expert would try."""
    usable = frame[(frame.note == ACCEPTABLE) & (frame.role != "standard")]
    roles = frame.role.replace("best-candidate", "candidate")
    if len(usable):
        roles[usable.time_ratio.idxmin()] = "best"
    return frame.assign(role=roles)

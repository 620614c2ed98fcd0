"""Does a layer with fewer bits really read fewer bytes, and does it show?

Projections in every format and on every kernel that runs here, their weights rotated so that they come from memory,
timed in the same rounds as plain reads of that memory. The fastest of them is the ceiling of the others' share (MBU).
A kernel counts as a format's best only when it computes the format's product: `measure.kernels` bounds its error. Where
a path's time goes is measured part by part (`measure.parts`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from flashstudy.compress.kernel_table import without_compiled
from flashstudy.compress.linear import CompressedLinear, KernelInfo, WeightLayout, available_kernels, make_linear
from flashstudy.facts import claims, models
from flashstudy.facts.recipes import ARTICLE_FLASH
from flashstudy.facts.units import busy_note, format_interval
from flashstudy.measure import kernels, machine, parts, rotation, streams, timing, working_sets

Format = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4", "nf4"]
Rows = Annotated[int, Field(ge=1, le=4096)]
Matrix = Literal["q", "k", "v", "o", "gate", "up", "down"]
GROUP = 64  # weights a scale at 4 bits
ARTICLE = "article"  # INT8, half of the weights pruned, bitmap: unpacked at every call
ARTICLE_BEST = f"{ARTICLE} bitmap_table"
UNPACKED = {
    "int8 dequantize": "INT8 dense, dequantized at every call",
    ARTICLE_BEST: "INT8 bitmap at 50% sparsity",
}
TINY = (16, 64)  # a weight whose product costs next to nothing: what is left is the call
STORED = ("model", "kind", "weight_format", "sparse_format")


class Params(BaseModel):
    """Parameters of the notebook; the defaults are the quick profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    shapes: list[str] = Field(["llama3-8b"], min_length=1, description="models whose layer sizes are used")
    matrices: list[Matrix] = Field(["k"], min_length=1, description="their matrices: q, k, v, o, gate, up or down")
    rows: list[Rows] = Field([1, 16], min_length=1, description="rows multiplied at once, 1 is a decode step")
    formats: list[Format] = Field(
        ["fp32", "bf16", "int8", "int4", "nf4"], min_length=1, description="weight formats to compare"
    )
    compiled: bool = Field(False, description="also kernels that torch.compile makes, 10 s and more each")
    n_threads: int = Field(0, ge=0, le=1024, description="threads, 0 lets the machine card decide")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the random weights")
    budget_s: float = Field(0.15, gt=0, le=600, description="seconds for each timed alternative")

    @field_validator("shapes")
    @classmethod
    def _known_shapes(cls, value: list[str]) -> list[str]:
        known = models.load()
        if unknown := [name for name in value if name not in known]:
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return value


@dataclass(frozen=True)
class Alternative:
    """One way to multiply: its factors, its layers in rotation, and whether its product is the format's."""

    factors: dict
    layers: list[CompressedLinear]
    acceptable: bool


@dataclass(frozen=True)
class Case:
    """One matrix of one model's layer: what it is in the result's columns, its shape, and the standard's kernel."""

    factors: dict
    shape: tuple[int, int]
    standard: str
    card: machine.MachineCard


def run(params: Params, progress: Callable | None = None, evidence=None) -> pd.DataFrame:
    """A row a kernel and number of rows, the parts of its time, what cannot run as a row with its reason, claims."""
    report = progress or (lambda done, total, label: None)
    card = machine.card()
    cases = list(_cases(params, card))
    total = len(cases) * (len(params.rows) + 2) + 1
    done = 0
    rows = list(_ceilings(params, card))
    for case in cases:
        report(done, total, f"{case.factors['model']} {case.factors['kind']}: weights in every format")
        skipped, built = _built(params, case)
        rows += [case.factors | row for row in skipped]
        for n_rows in params.rows:
            done += 1
            report(done, total, f"{case.factors['model']} {case.factors['kind']}: {n_rows} rows")
            rows += [case.factors | row for row in _measure(params, case, built, n_rows)]
        done += 1
        report(done, total, f"{case.factors['model']} {case.factors['kind']}: parts")
        rows += [case.factors | row for row in _parts(params, case, built)]
        done += 1
    report(total - 1, total, "hot working sets")
    rows += _hot(params, cases[0])
    report(total, total, "done")
    return pd.DataFrame(rows)


def table(result: pd.DataFrame) -> pd.DataFrame:
    """One row of activations: each format's naive and library kernels and its best; faster wrong ones stay in `result`.

    The articles' pruned INT8 is a format of its own here.
    """
    timed = result[result.time_ratio.notna()].sort_values("time_ratio")
    rows = timed[(timed.rows == _fewest(result)) | (timed.residency == "hot_cache")]
    good = rows[(rows.note == kernels.ACCEPTABLE) & (rows.residency == "streamed")]
    best = good.groupby(list(STORED), dropna=False).time_ratio.idxmin()
    rows = rows.assign(role=rows.role.mask(rows.index.isin(best), "best"))
    return rows[rows.role.isin(["naive", "library", "best"]) | (rows.residency == "hot_cache")]


def headline(result: pd.DataFrame) -> str:
    """Each narrow format's fastest and naive kernel against the standard, in one sentence, on the first matrix."""
    rows = table(result)
    rows = rows[(rows.residency == "streamed") & (rows.sparse_format == "dense")]
    first = rows.iloc[0][["model", "kind"]]
    rows = rows[(rows[["model", "kind"]] == first).all(axis=1)]
    clauses = []
    for name in ("int8", "int4"):
        group = rows[rows.weight_format == name]
        if group.empty or not (group.role == "best").any():
            continue
        best, naive = group[group.role == "best"].iloc[0], result.loc[_naive(result, first, name)]
        clauses.append(
            f"{name.upper()} takes {format_interval(best.time_ratio, best.low, best.high)} of the standard's time on "
            f"{best.kernel}, {format_interval(naive.time_ratio, naive.low, naive.high)} when dequantized naively"
            + busy_note(best.contended or naive.contended)
        )
    fewest = _fewest(result)
    return f"With {fewest:.0f} row{'s' if fewest > 1 else ''}, " + "; ".join(clauses) + "."


def _fewest(result: pd.DataFrame) -> float:
    """The fewest rows of activations with which streamed weights were multiplied."""
    return result.rows[result.residency == "streamed"].min()


def _naive(result: pd.DataFrame, case: pd.Series, weight_format: str) -> int:
    """Index of the format's naive dense row at the fewest rows of activations."""
    rows = result[(result.rows == _fewest(result)) & (result.kernel == "dequantize") & result.time_ratio.notna()]
    rows = rows[(rows[["model", "kind"]] == case).all(axis=1) & (rows.weight_format == weight_format)]
    return rows.index[0]


def _cases(params: Params, card: machine.MachineCard) -> Iterator[Case]:
    standard = "bf16 dense" if card.standard_dtype == "bfloat16" else "fp32 dense"
    for name in params.shapes:
        for matrix in params.matrices:
            size = models.load()[name].layer_matrices[matrix]
            factors = dict(model=name, kind=matrix, out_features=size[0], in_features=size[1])
            yield Case(factors, size, standard, card)


def _ceilings(params: Params, card: machine.MachineCard) -> Iterator[dict]:
    """What the machine reaches at best, from its card: the roof over every point of the result."""
    one = (params.n_threads or card.n_threads) == 1
    rates = card.gemm_one_thread_flop_per_s if one else card.gemm_flop_per_s
    read = card.read_bytes_per_s["1" if one else str(card.n_threads)]
    for name, flop_per_s in rates.items():
        yield dict(role="ceiling", weight_format=name, flop_per_s=flop_per_s, ceiling_bytes_per_s=read)


def _built(params: Params, case: Case) -> tuple[list[dict], dict[str, Alternative]]:
    """Rows of what cannot run, with the reason, and the alternatives that can, the standard first."""
    benches = {
        sparsity: kernels.Bench(case.shape, kernels.standard_type(case.card.standard_dtype), sparsity, params.seed)
        for sparsity in (0.0, ARTICLE_FLASH.sparsity)
    }
    infos = list(_kernels(params, case))
    built = {_name(info): _alternative(info, benches, case.card.llc_bytes) for info in infos if info.available}
    return [_factors(info) | dict(skipped=info.reason) for info in infos if not info.available], built


def _kernels(params: Params, case: Case) -> Iterator[KernelInfo]:
    """Every kernel of the formats, the standard first, and the articles' bitmap at the end."""
    formats = dict.fromkeys([case.standard.split()[0], *params.formats, "int8"])
    for name in (*formats, ARTICLE):
        weight_format = "int8" if name == ARTICLE else name
        for info in available_kernels(weight_format, layout=_layout(name), shape=case.shape):
            if not info.kernel.endswith("pack_tiled"):  # the packed kernel at these few rows
                yield info if params.compiled else without_compiled(info)


def _layout(name: str) -> WeightLayout:
    if name == ARTICLE:
        return WeightLayout("int8", sparse_format="bitmap")
    return WeightLayout(name, granularity="group", group_size=GROUP) if name in ("int4", "nf4") else WeightLayout(name)


def _name(info: KernelInfo) -> str:
    return f"{ARTICLE if info.sparse_format == 'bitmap' else info.weight_format} {info.kernel}"


def _factors(info: KernelInfo) -> dict:
    return dict(
        weight_format=info.weight_format, kernel=info.kernel, kernel_path=info.kernel_path, role=info.role,
        sparse_format=info.sparse_format, sparsity=ARTICLE_FLASH.sparsity if info.sparse_format == "bitmap" else 0.0,
    )  # fmt: skip


def _alternative(info: KernelInfo, benches: dict[float, kernels.Bench], llc_bytes: int) -> Alternative:
    """The kernel on the weight of its sparsity, in copies beyond the cache, with the error that it adds."""
    factors = _factors(info)
    made = benches[factors["sparsity"]].alternative(info, _layout(_name(info).split()[0]))
    factors |= dict(relative_error=made.relative_error, note=made.note)
    return Alternative(factors, rotation.copies(made.layer, llc_bytes), made.acceptable)


def _activations(params: Params, built: dict[str, Alternative], standard: str, n_rows: int) -> torch.Tensor:
    dense = built[standard].layers[0].product.weight
    generator = torch.Generator().manual_seed(params.seed)
    return torch.randn(n_rows, dense.shape[1], generator=generator).to(dense.dtype)


def _measure(params: Params, case: Case, built: dict[str, Alternative], n_rows: int) -> Iterator[dict]:
    """The rows of one number of activation rows: all kernels, unpacking alone and plain reads in the same rounds."""
    x = _activations(params, built, case.standard, n_rows)
    unpacking = {f"only {name}": rotation.unpack(built[name].layers, x.dtype) for name in UNPACKED}
    layers = {name: alternative.layers for name, alternative in built.items()}
    found = streams.measure(
        layers, x, dense=case.standard, beside=unpacking, budget_s=params.budget_s,
        n_threads=params.n_threads or None, seed=params.seed,
    )  # fmt: skip
    to_standard = found.rounds.against(case.standard)
    flop = 2 * n_rows * case.shape[0] * case.shape[1]
    for name, alternative in built.items():
        row = alternative.factors | found.row(name) | to_standard[name].row()
        useful = flop * (1 - alternative.factors["sparsity"])
        yield row | dict(rows=n_rows, residency="streamed", flop=useful, flop_per_s=useful / row["time_s"])
    yield from _claim_rows(found.rounds, built, case, n_rows)


def _claim_rows(rounds: timing.Rounds, built: dict[str, Alternative], case: Case, n_rows: int) -> Iterator[dict]:
    where = f"{case.factors['model']} {case.factors['kind']}, {n_rows} row{'s' if n_rows > 1 else ''}"
    row = partial(claims.row, verdict_kind="mechanism_here")
    for name, config in UNPACKED.items():
        share = rounds.against(name)[f"only {name}"]
        values = (min(value, 1.0) for value in (share.ratio, share.low, share.high))  # no share is above 1
        estimate, low, high = values
        yield row("dequant_share", estimate=estimate, low=low, high=high, contended=share.contended,
                  config=f"{config}, {where}")  # fmt: skip
    # The pruned variant does half of the multiplications; the zeros it skips are no useful work.
    article, useful = rounds.against(case.standard)[ARTICLE_BEST], 1 - ARTICLE_FLASH.sparsity
    yield row("flops_65", estimate=useful / article.ratio, low=useful / article.high, high=useful / article.low,
              contended=article.contended, config=where)  # fmt: skip
    if n_rows == 1 and "bf16 dense" in built:
        good = [name for name, way in built.items() if name.startswith("int8") and way.acceptable]
        best = min(good, key=rounds.median_s)
        gain = rounds.against(best)["bf16 dense"]
        yield row("int8_speed", estimate=gain.ratio, low=gain.low, high=gain.high, contended=gain.contended,
                  config=f"{best} against bf16, {where}")  # fmt: skip


def _parts(params: Params, case: Case, built: dict[str, Alternative]) -> Iterator[dict]:
    """Where the time goes at one row: the two naive paths stage by stage, dense and fused kernels by their bounds."""
    x = _activations(params, built, case.standard, 1)
    for name, alternative in built.items():
        kernel, path = alternative.factors["kernel"], alternative.factors["kernel_path"]
        one_kernel = path in ("dense", "fused") and not kernel.endswith("_compiled")
        if not alternative.acceptable or not (one_kernel or name in UNPACKED):
            continue
        layout = _layout(name.split()[0])
        tiny = make_linear(torch.ones(TINY), kernel=kernel, **vars(layout))
        found = parts.of_layer(
            alternative.layers, x, tiny, llc_bytes=case.card.llc_bytes, budget_s=params.budget_s / 2,
            n_threads=params.n_threads or None, seed=params.seed,
        )  # fmt: skip
        for part in parts.rows_of(found):
            yield alternative.factors | part | dict(rows=1, residency="streamed")


def _hot(params: Params, case: Case) -> Iterator[dict]:
    """A dense weight that stays in the cache against as many bytes from memory, and plain reads by working set."""
    name, timed = case.standard.split()[0], dict(budget_s=params.budget_s, n_threads=params.n_threads or None)
    dtype = kernels.standard_type(case.card.standard_dtype)
    n_bytes, found = working_sets.resident(
        case.shape[1], case.shape[0], name, dtype, llc_bytes=case.card.llc_bytes, **timed
    )
    yield case.factors | dict(
        weight_format=name, kernel="dense", kernel_path="dense", sparse_format="dense", sparsity=0.0, rows=1,
        residency="hot_cache", role="hot cache, against the same streamed", read_bytes=n_bytes,
        note="against the same small weight streamed from memory", **found.row(),
    )  # fmt: skip
    yield claims.row(
        "hierarchical_layout", "mechanism_here", found.ratio, found.low, found.high, found.contended,
        config="dense standard, 1 row",
    )  # fmt: skip
    for row in working_sets.by_size(case.card.llc_bytes, **timed):
        yield row | dict(role="working set")

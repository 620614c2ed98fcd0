"""Does a layer with fewer bits really read fewer bytes, and does it show?

One projection in every format and on every kernel that runs here, its weights rotated so that they come from memory,
timed in the same rounds as plain reads of that memory. The fastest of them is the ceiling of the others' share (MBU).
A kernel counts as a format's best only when it computes the format's product: `measure.kernels` bounds its error.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from flashstudy.compress.linear import CompressedLinear, KernelInfo, WeightLayout, available_kernels, make_linear
from flashstudy.facts import claims, models
from flashstudy.facts.recipes import ARTICLE_FLASH
from flashstudy.facts.units import busy_note, format_interval
from flashstudy.measure import kernels, machine, rotation, streams, timing

Format = Literal["fp32", "bf16", "fp16", "int8", "int4"]
Rows = Annotated[int, Field(ge=1, le=4096)]
Matrix = Literal["q", "k", "v", "o", "gate", "up", "down"]
INT4_GROUP = 64
ARTICLE = "article"  # INT8, half of the weights pruned, bitmap: unpacked at every call
ARTICLE_BEST = f"{ARTICLE} bitmap_table"
UNPACKED = {
    "int8 dequantize": "INT8 dense, dequantized at every call",
    ARTICLE_BEST: "INT8 bitmap at 50% sparsity",
}


class Params(BaseModel):
    """Parameters of the notebook; the defaults are the quick profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    shape: str = Field("llama3-8b", min_length=1, description="model whose layer sizes are used")
    matrix: Matrix = Field("k", description="matrix of its layer: q, k, v, o, gate, up or down")
    rows: list[Rows] = Field([1, 16], min_length=1, description="rows multiplied at once, 1 is a decode step")
    formats: list[Format] = Field(
        ["fp32", "bf16", "int8", "int4"], min_length=1, description="weight formats to compare"
    )
    n_threads: int = Field(0, ge=0, le=1024, description="threads, 0 lets the machine card decide")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the random weights")
    budget_s: float = Field(0.2, gt=0, le=600, description="seconds for each timed alternative")

    @field_validator("shape")
    @classmethod
    def _known_shape(cls, value: str) -> str:
        if value not in (known := models.load()):
            raise ValueError(f"{value!r} is not one of {', '.join(known)}")
        return value


@dataclass(frozen=True)
class Alternative:
    """One way to multiply: its factors, its layers in rotation, and whether its product is the format's."""

    factors: dict
    layers: list[CompressedLinear]
    acceptable: bool


def run(params: Params, progress: Callable | None = None, evidence=None) -> pd.DataFrame:
    """One row per kernel and number of rows, what cannot run as a row with its reason, and the claims' rows."""
    report = progress or (lambda done, total, label: None)
    total = len(params.rows) + 2
    report(0, total, "weights in every format")
    card = machine.card()
    standard = "bf16 dense" if card.standard_dtype == "bfloat16" else "fp32 dense"
    shape = models.load()[params.shape].layer_matrices[params.matrix]
    infos = _kernels(params, standard, shape)
    benches = {
        sparsity: kernels.Bench(shape, kernels.standard_type(card.standard_dtype), sparsity, params.seed)
        for sparsity in (0.0, ARTICLE_FLASH.sparsity)
    }
    built = {_name(info): _alternative(info, benches, card.llc_bytes) for info in infos if info.available}
    rows = [_factors(info) | dict(skipped=info.reason) for info in infos if not info.available]
    for done, n_rows in enumerate(params.rows, start=1):
        report(done, total, f"{n_rows} rows")
        rows += _measure(params, built, standard, n_rows)
    report(total - 1, total, "a hot working set")
    rows += _hot(params, built[standard], card)
    report(total, total, "done")
    return pd.DataFrame([dict(model=params.shape) | row for row in rows])


def table(result: pd.DataFrame) -> pd.DataFrame:
    """One row of activations: each format's naive and library kernels and its best; faster wrong ones stay in `result`.

    The articles' pruned INT8 is a format of its own here.
    """
    timed = result[result.time_ratio.notna()].sort_values("time_ratio")
    rows = timed[(timed.rows == _fewest(result)) | (timed.residency == "hot_cache")]
    good = rows[(rows.note == kernels.ACCEPTABLE) & (rows.residency == "streamed")]
    best = good.groupby(["weight_format", "sparse_format"]).time_ratio.idxmin()
    rows = rows.assign(role=rows.role.mask(rows.index.isin(best), "best"))
    return rows[rows.role.isin(["naive", "library", "best"]) | (rows.residency == "hot_cache")]


def headline(result: pd.DataFrame) -> str:
    """Each narrow format's fastest and naive kernel against the standard, in one sentence."""
    rows = table(result)
    rows = rows[(rows.residency == "streamed") & (rows.sparse_format == "dense")]
    parts = []
    for name, group in rows[rows.weight_format.isin(["int8", "int4"])].groupby("weight_format"):
        best, naive = group[group.role == "best"].iloc[0], result.loc[_naive(result, name)]
        parts.append(
            f"{name.upper()} takes {format_interval(best.time_ratio, best.low, best.high)} of the standard's time on "
            f"{best.kernel}, {format_interval(naive.time_ratio, naive.low, naive.high)} when dequantized naively"
            + busy_note(best.contended or naive.contended)
        )
    fewest = _fewest(result)
    return f"With {fewest:.0f} row{'s' if fewest > 1 else ''}, " + "; ".join(parts) + "."


def _fewest(result: pd.DataFrame) -> float:
    """The fewest rows of activations with which streamed weights were multiplied."""
    return result.rows[result.residency == "streamed"].min()


def _naive(result: pd.DataFrame, weight_format: str) -> int:
    """Index of the format's naive dense row at the fewest rows of activations."""
    rows = result[(result.rows == _fewest(result)) & (result.kernel == "dequantize") & result.time_ratio.notna()]
    return rows.index[rows.weight_format == weight_format][0]


def _kernels(params: Params, standard: str, shape: tuple[int, int]) -> list[KernelInfo]:
    """Every kernel of the formats, the standard first, and the articles' bitmap at the end."""
    formats = dict.fromkeys([standard.split()[0], *params.formats, "int8"])
    found = [info for name in formats for info in available_kernels(name, layout=_layout(name), shape=shape)]
    found = [info for info in found if not info.kernel.endswith("pack_tiled")]  # the packed kernel at these few rows
    return found + available_kernels("int8", layout=_layout(ARTICLE), shape=shape)


def _layout(name: str) -> WeightLayout:
    if name == ARTICLE:
        return WeightLayout("int8", sparse_format="bitmap")
    return WeightLayout(name, granularity="group", group_size=INT4_GROUP) if name == "int4" else WeightLayout(name)


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
    run = benches[factors["sparsity"]].alternative(info, _layout(_name(info).split()[0]))
    factors |= dict(relative_error=run.relative_error, note=run.note)
    return Alternative(factors, rotation.copies(run.layer, llc_bytes), run.acceptable)


def _measure(params: Params, built: dict[str, Alternative], standard: str, n_rows: int) -> Iterator[dict]:
    """The rows of one number of activation rows: all kernels, unpacking alone and plain reads in the same rounds."""
    dense = built[standard].layers[0].product.weight
    x = torch.randn(n_rows, dense.shape[1], generator=torch.Generator().manual_seed(params.seed)).to(dense.dtype)
    unpacking = {f"only {name}": rotation.unpack(built[name].layers, dense.dtype) for name in UNPACKED}
    layers = {name: alternative.layers for name, alternative in built.items()}
    found = streams.measure(
        layers, x, dense=standard, beside=unpacking, budget_s=params.budget_s,
        n_threads=params.n_threads or None, seed=params.seed,
    )  # fmt: skip
    to_standard = found.rounds.against(standard)
    for name, alternative in built.items():
        yield alternative.factors | found.row(name) | dict(
            rows=n_rows, residency="streamed", **to_standard[name].row()
        )  # fmt: skip
    yield from _claim_rows(found.rounds, built, standard, n_rows)


def _claim_rows(rounds: timing.Rounds, built: dict[str, Alternative], standard: str, n_rows: int) -> Iterator[dict]:
    for name, config in UNPACKED.items():
        share = rounds.against(name)[f"only {name}"]
        yield claims.row(
            "dequant_share",
            "mechanism_here",
            *(min(value, 1.0) for value in (share.ratio, share.low, share.high)),  # no share is above 1
            share.contended,
            config=f"{config}, {n_rows} rows",
        )
    # The pruned variant does half of the multiplications; the zeros it skips are no useful work.
    article, useful = rounds.against(standard)[ARTICLE_BEST], 1 - ARTICLE_FLASH.sparsity
    yield claims.row(
        "flops_65",
        "mechanism_here",
        useful / article.ratio,
        useful / article.high,
        useful / article.low,
        article.contended,
        config=f"{n_rows} rows",
    )
    if n_rows == 1 and "bf16 dense" in built:
        good = [name for name, way in built.items() if name.startswith("int8") and way.acceptable]
        best = min(good, key=rounds.median_s)
        gain = rounds.against(best)["bf16 dense"]
        yield claims.row(
            "int8_speed",
            "mechanism_here",
            gain.ratio,
            gain.low,
            gain.high,
            gain.contended,
            config=f"{best} against bf16, 1 row",
        )


def _hot(params: Params, standard: Alternative, card) -> Iterator[dict]:
    """A quarter of the last-level cache of dense weight, used again and again, against the same bytes from memory."""
    weight = standard.layers[0].product.weight
    n_out = max(1, min(weight.shape[0], card.llc_bytes // 4 // (weight.shape[1] * weight.element_size())))
    layer = make_linear(weight[:n_out].clone(), weight_format=standard.factors["weight_format"], kernel="dense")
    x = torch.ones(1, weight.shape[1], dtype=weight.dtype)
    calls = {
        "streamed": rotation.rotate(rotation.copies(layer, card.llc_bytes), x),
        "hot_cache": rotation.rotate([layer], x),
    }
    found = timing.compare(
        calls["streamed"], calls["hot_cache"], budget_s=params.budget_s, n_threads=params.n_threads or None
    )
    yield standard.factors | dict(
        rows=1, residency="hot_cache", role="hot cache, against the same streamed", read_bytes=layer.read_bytes,
        note="against the same small weight streamed from memory", **found.row(),
    )  # fmt: skip
    yield claims.row(
        "hierarchical_layout",
        "mechanism_here",
        found.ratio,
        found.low,
        found.high,
        found.contended,
        config="dense standard, 1 row",
    )

"""Which sparsity, in which format, saves time or bytes at all?

The same random weight, pruned to several sparsities, stored in each format and multiplied, weights beyond the cache.
What the pattern costs in quality is measured on a real model, pruned by magnitude without recovery, with the same share
of zeros. Stored bytes are counted exactly, indices and scales included.
"""

from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Annotated, Literal

import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import Tensor

from flashstudy.compress import checkpoints, prune, rewrite, sparse
from flashstudy.compress.linear import make_linear
from flashstudy.facts import claims, models
from flashstudy.facts.units import busy_note, format_interval
from flashstudy.measure import machine, quality, rotation, streams

Matrix = Literal["q", "k", "v", "o", "gate", "up", "down"]
Sparsity = Annotated[float, Field(gt=0, lt=1)]
# Pattern, stored format, weight format and kernel of everything that is timed. CSR and BSR exist in fp32 only.
FORMATS = (
    ("unstructured", "dense", "fp32", "dense"),
    ("unstructured", "bitmap", "int8", "bitmap_table"),
    ("unstructured", "csr", "fp32", "csr"),
    ("block", "bsr", "fp32", "bsr"),
)
BASELINE = "dense fp32"


class Params(BaseModel):
    """Parameters of the notebook; the defaults are the quick profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str = Field("smollm2-135m", min_length=1, description="default model, folder, GGUF file or hub id")
    text: str = Field("pydoc", min_length=1, description="text whose last 30% is scored, default name or file")
    sparsities: list[Sparsity] = Field([0.5, 0.9], min_length=1, description="shares of weights set to zero")
    block: int = Field(16, ge=2, le=256, description="rows and columns of a square block")
    shape: str = Field("llama3-8b", min_length=1, description="model whose layer sizes are timed")
    matrix: Matrix = Field("k", description="matrix of its layer: q, k, v, o, gate, up or down")
    rows: int = Field(1, ge=1, le=4096, description="rows multiplied at once, 1 is a decode step")
    n_windows: int = Field(4, ge=1, le=1024, description="text windows scored")
    window_tokens: int = Field(64, ge=16, le=8192, description="tokens in each window")
    n_threads: int = Field(0, ge=0, le=1024, description="threads, 0 lets the machine card decide")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the random weights and the bootstrap")
    budget_s: float = Field(0.3, gt=0, le=600, description="seconds for each timed alternative")

    @field_validator("shape")
    @classmethod
    def _known_shape(cls, value: str) -> str:
        if value not in (known := models.load()):
            raise ValueError(f"{value!r} is not one of {', '.join(known)}")
        return value

    @model_validator(mode="after")
    def _enough_blocks(self) -> "Params":
        quality.check_blocks(self.n_windows, self.window_tokens)
        return self


def run(params: Params, progress: Callable | None = None, evidence=None) -> pd.DataFrame:
    """Rows of time and bytes by sparsity and format, rows of quality by sparsity and pattern, and the claims' rows."""
    report = progress or (lambda done, total, label: None)
    total = 2 * len(params.sparsities) + 1
    report(0, total, "random weight")
    card = machine.card()
    weight = rotation.random_weight(models.load()[params.shape], params.matrix, params.seed)
    dense = rotation.copies(make_linear(weight, weight_format="fp32", kernel="dense"), card.llc_bytes)
    rows: list[dict] = []
    for done, sparsity in enumerate(params.sparsities):
        report(done, total, f"time at {sparsity:.0%} sparsity")
        rows += measure_time(params, weight, dense, sparsity, card.llc_bytes)
    report(len(params.sparsities), total, "model")
    torch.set_num_threads(params.n_threads or card.physical_cores)
    rows += measure_quality(params, lambda done, label: report(len(params.sparsities) + done, total, label))
    report(total, total, "done")
    return pd.DataFrame(rows)


def table(result: pd.DataFrame) -> pd.DataFrame:
    """The timed rows, one per sparsity and format."""
    return result[result.time_ratio.notna()]


def headline(result: pd.DataFrame) -> str:
    """What unstructured and block sparsity do to time at the lowest and the highest sparsity, in one sentence."""
    rows = result[result.time_ratio.notna() & (result.sparse_format != "dense")]
    parts = []
    for sparsity in sorted({rows.sparsity.min(), rows.sparsity.max()}):
        at = rows[rows.sparsity == sparsity].sort_values("time_ratio")
        parts.append(
            f"at {sparsity:.0%} zeros "
            + ", ".join(
                f"{row.sparse_format.upper()} takes {format_interval(row.time_ratio, row.low, row.high)}"
                for row in at.itertuples()
            )
            + busy_note(at.contended.any())
        )
    return "Of the dense product's time, " + "; ".join(parts) + "."


def measure_time(params: Params, weight: Tensor, dense: list, sparsity: float, llc_bytes: int) -> Iterator[dict]:
    """One row per format at one sparsity, all in the same rounds as the dense product and plain reads."""
    generator = torch.Generator().manual_seed(params.seed)
    masks = {
        "unstructured": prune.random_mask(tuple(weight.shape), sparsity, generator),
        "block": _random_blocks(tuple(weight.shape), sparsity, params.block, generator),
    }
    layers = {_name(fmt): _layers(weight, masks, fmt, params.block, llc_bytes) for fmt in FORMATS} | {BASELINE: dense}
    x = torch.randn(params.rows, weight.shape[1], generator=generator)
    found = streams.measure(
        layers, x, dense=BASELINE, budget_s=params.budget_s, n_threads=params.n_threads or None, seed=params.seed
    )
    to_dense = found.rounds.against(BASELINE)
    for fmt in FORMATS:
        name = _name(fmt)
        yield (
            _factors(params, fmt, sparsity)
            | _storage(fmt, masks[fmt[0]], params.block)
            | dict(residency="streamed", **found.row(name), **to_dense[name].row())
        )
    yield from _claim_rows(params, sparsity, masks, found)


def _name(fmt: tuple) -> str:
    pattern, sparse_format, weight_format, _ = fmt
    return f"{sparse_format} {weight_format} {pattern}"


def measure_quality(params: Params, report: Callable) -> Iterator[dict]:
    """One row per sparsity and pattern: what the pruned real model loses, paired token by token."""
    loaded = checkpoints.load_model(params.model, dtype="float32")
    text = checkpoints.load_text(params.text)
    windows = checkpoints.windows(
        text.evaluation, loaded.tokenizer, n_windows=params.n_windows, window_tokens=params.window_tokens
    )
    reference = quality.token_nll(loaded.model, windows)
    for done, sparsity in enumerate(params.sparsities, start=1):
        report(done, f"quality at {sparsity:.0%} sparsity")
        for pattern in ("unstructured", "block"):
            pruned = rewrite.rewrite(
                loaded.model, lambda matrix, s=sparsity, p=pattern: _pruned(matrix.weight, s, p, params.block)
            )
            nll = quality.token_nll(pruned, windows)
            change = quality.paired_difference(nll, reference, seed=params.seed)
            yield dict(
                model=loaded.name, text=text.name, sparsity=sparsity, pattern=pattern,
                block=_block_name(params.block, pattern),
                nll_nats=nll.mean().item(), delta_nll_nats=change.estimate, low=change.low, high=change.high,
                n_tokens=nll.numel(), contended=False,
            )  # fmt: skip


def _layers(weight: Tensor, masks: dict, fmt: tuple, block: int, llc_bytes: int) -> list:
    pattern, sparse_format, weight_format, kernel = fmt
    size = (block, block) if sparse_format == "bsr" else (0, 0)
    layer = make_linear(
        weight * masks[pattern], weight_format=weight_format, kernel=kernel, sparse_format=sparse_format, block=size
    )
    return rotation.copies(layer, llc_bytes)


def _random_blocks(shape: tuple[int, int], sparsity: float, block: int, generator: torch.Generator) -> Tensor:
    """A mask that drops whole random blocks. Raises ValueError when the block does not divide the shape."""
    if shape[0] % block or shape[1] % block:
        raise ValueError(f"block {block} does not divide the shape {shape}")
    coarse = prune.random_mask((shape[0] // block, shape[1] // block), sparsity, generator)
    return coarse.repeat_interleave(block, 0).repeat_interleave(block, 1)


def _pruned(weight: Tensor, sparsity: float, pattern: str, block: int) -> Tensor:
    if pattern == "block":
        return weight * prune.block_mask(weight, sparsity, (block, block))
    return weight * prune.magnitude_mask(weight, sparsity)


def _block_name(block: int, pattern: str) -> str | None:
    return f"{block}×{block}" if pattern == "block" else None


def _factors(params: Params, fmt: tuple, sparsity: float) -> dict:
    pattern, sparse_format, weight_format, kernel = fmt
    return dict(
        model=params.shape, sparsity=sparsity, pattern=pattern, sparse_format=sparse_format,
        weight_format=weight_format, kernel=kernel, rows=params.rows, block=_block_name(params.block, pattern),
    )  # fmt: skip


def _storage(fmt: tuple, mask: Tensor, block: int) -> dict:
    """Exact stored bytes, compression against fp32 dense, and how many blocks the mask leaves occupied."""
    pattern, sparse_format, weight_format, _ = fmt
    value_bytes = {"fp32": 4, "int8": 1}[weight_format]
    scale_bytes = 2 * mask.shape[0] if weight_format == "int8" else 0
    stored = sparse.stored_bytes(
        sparse_format, mask, value_bytes=value_bytes, block=(block, block), scale_bytes=scale_bytes
    )
    return dict(
        stored_bytes=stored.total, index_bytes=stored.index_bytes, compression=4 * mask.numel() / stored.total,
        occupancy=sparse.block_occupancy(mask, (block, block)),
    )  # fmt: skip


def _claim_rows(params: Params, sparsity: float, masks: dict, found: streams.Streams) -> Iterator[dict]:
    config = f"{sparsity:.0%} zeros, {params.rows} rows"
    shares = {"bandwidth_dense": [BASELINE]}
    if sparsity == 0.5:  # the articles' sparsity, to which the claim is confined
        shares["bandwidth_sparse"] = ["csr fp32 unstructured", "bitmap int8 unstructured"]
    for claim_id, names in shares.items():
        for name in names:
            yield claims.row(claim_id, "mechanism_here", *astuple(found.share(name)), config=f"{name}, {config}")
    config = f"BSR {params.block}×{params.block} against CSR, {config}"
    block = found.rounds.against("csr fp32 unstructured")["bsr fp32 block"]
    saved = 1 - block.ratio, 1 - block.high, 1 - block.low
    yield claims.row("block_latency", "mechanism_here", *saved, block.contended, config=config)
    csr, bsr = (_storage(FORMATS[index], masks[FORMATS[index][0]], params.block)["stored_bytes"] for index in (2, 3))
    for kind in claims.VERDICT_KINDS:
        yield claims.row("block_compression", kind, csr / bsr, csr / bsr, csr / bsr, False, config=config)

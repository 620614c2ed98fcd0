"""What does each bit, and each way of sharing a scale, cost in quality?

Every projection of the model is rounded to a few levels and back. First the error of each matrix by kind and depth,
then what the whole model loses when all of them are rounded: likelihood and KL divergence, paired token by token with
the unrounded model. Weights only; the embedding and the output head stay in floating point.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from flashstudy.compress import checkpoints, quantize, rewrite
from flashstudy.facts import claims
from flashstudy.measure import machine, quality

Bits = Annotated[int, Field(ge=2, le=8)]
Granularity = Literal["tensor", "channel", "group"]
ATTENTION = ("q", "k", "v", "o")
N_RESAMPLES = 2000


class Params(BaseModel):
    """Parameters of the notebook; the defaults are the quick profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str = Field("smollm2-135m", min_length=1, description="default model, folder, GGUF file or hub id")
    text: str = Field("pydoc", min_length=1, description="text whose last 30% is scored, default name or file")
    bits: list[Bits] = Field([8, 4], min_length=1, description="integer widths to try")
    granularities: list[Granularity] = Field(
        ["tensor", "channel", "group"], min_length=1, description="weights that share one scale"
    )
    group_size: int = Field(64, ge=1, le=65_536, description="consecutive weights of a row in one group")
    layer_stride: int = Field(5, ge=1, description="use every n-th layer for the error of single matrices")
    n_windows: int = Field(4, ge=1, le=1024, description="text windows scored")
    window_tokens: int = Field(64, ge=16, le=8192, description="tokens in each window")
    n_threads: int = Field(0, ge=0, le=1024, description="threads, 0 lets the machine card decide")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the bootstrap")

    @model_validator(mode="after")
    def _enough_blocks(self) -> "Params":
        quality.check_blocks(self.n_windows, self.window_tokens)
        return self


def run(params: Params, progress: Callable | None = None, evidence=None) -> pd.DataFrame:
    """One row per matrix and format (sqnr_db), one per format (quality of the whole model), and the claims' rows."""
    report = progress or (lambda done, total, label: None)
    formats = _formats(params)
    report(0, len(formats) + 2, "model")
    torch.set_num_threads(params.n_threads or machine.card().physical_cores)
    loaded = checkpoints.load_model(params.model, dtype="float32")
    rewrite.check_groups(loaded.model, [f["group_size"] for f in formats])
    matrices = pd.DataFrame(measure_matrices(loaded, formats, params.layer_stride))
    text = checkpoints.load_text(params.text)
    windows = checkpoints.windows(
        text.evaluation, loaded.tokenizer, n_windows=params.n_windows, window_tokens=params.window_tokens
    )
    report(1, len(formats) + 2, "reference")
    reference = quality.remember(loaded.model, windows)
    rows = [_reference_row(quality.reference_nll(reference))]
    for done, fmt in enumerate(formats, start=2):
        report(done, len(formats) + 2, f"int{fmt['bits']} per {fmt['granularity']}")
        rows.append(measure_quality(loaded, fmt, windows, reference, params.seed) | _mean_error(matrices, fmt))
    names = dict(model=loaded.name, text=text.name)
    judged = list(_claim_rows(loaded, matrices, params))
    return pd.concat(
        [pd.DataFrame(rows).assign(**names), matrices.assign(**names), pd.DataFrame(judged)], ignore_index=True
    )


def table(result: pd.DataFrame) -> pd.DataFrame:
    """Quality rows: one per format, the reference first."""
    return result[result.nll_nats.notna()]


def headline(result: pd.DataFrame) -> str:
    """The answer in one sentence: the widest and the narrowest format's cost at its finest granularity."""
    rows = table(result).dropna(subset=["bits"])
    finest = rows.loc[rows.groupby("bits").bits_per_weight.idxmax()].sort_values("bits", ascending=False)
    parts = [
        f"INT{row.bits:.0f} per {row.granularity} changes the loss by {row.delta_nll_nats:+.3f} nats a token "
        f"[{row.low:+.3f}, {row.high:+.3f}]"
        for row in finest.itertuples()
    ]
    return "; ".join(parts) + f" ({rows.n_tokens.iloc[0]:.0f} tokens, measured)."


def measure_matrices(loaded, formats: list[dict], layer_stride: int) -> list[dict]:
    """One row per (layer, kind, format): sqnr_db and bits_per_weight of one matrix against its float32 original."""
    chosen = [matrix for matrix in rewrite.matrices(loaded.model) if matrix.layer % layer_stride == 0]
    return [_matrix_row(matrix, fmt) for matrix, fmt in itertools.product(chosen, formats)]


def measure_quality(loaded, fmt: dict, windows: torch.Tensor, reference: quality.Reference, seed: int) -> dict:
    """Loss, paired loss difference and divergence of the model with every projection rounded to one format."""
    rounded = rewrite.rewrite(loaded.model, lambda matrix: quantize.fake_quantize(matrix.weight, **fmt))
    found = quality.kl_and_top1(reference, rounded, windows)
    change = quality.paired_difference(found.nll_b, found.nll_a, seed=seed)
    return fmt | dict(
        nll_nats=found.nll_b.mean().item(), delta_nll_nats=change.estimate, low=change.low, high=change.high,
        kl_nats=found.kl_nats.mean().item(), top1_agreement=found.same_top1.float().mean().item(),
        n_tokens=change.n_tokens, contended=False,
    )  # fmt: skip


def _formats(params: Params) -> list[dict]:
    return [
        dict(bits=bits, granularity=granularity, group_size=params.group_size if granularity == "group" else 0)
        for bits, granularity in itertools.product(params.bits, params.granularities)
    ]


def _matrix_row(matrix, fmt: dict) -> dict:
    stored = quantize.quantize(matrix.weight, **fmt)
    return fmt | dict(
        layer=matrix.layer, kind=matrix.kind, sqnr_db=quantize.sqnr_db(matrix.weight, stored.dequantize(torch.float32)),
        bits_per_weight=8 * stored.stored_bytes / matrix.weight.numel(), stored_bytes=stored.stored_bytes,
    )  # fmt: skip


def _reference_row(nll: torch.Tensor) -> dict:
    return dict(
        granularity="fp32", bits_per_weight=32.0, nll_nats=nll.mean().item(), delta_nll_nats=0.0, low=0.0, high=0.0,
        kl_nats=0.0, top1_agreement=1.0, n_tokens=nll.numel(), contended=False,
    )  # fmt: skip


def _of_format(matrices: pd.DataFrame, fmt: dict) -> pd.DataFrame:
    return matrices[(matrices.bits == fmt["bits"]) & (matrices.granularity == fmt["granularity"])]


def _mean_error(matrices: pd.DataFrame, fmt: dict) -> dict:
    rows = _of_format(matrices, fmt)
    return dict(sqnr_db=rows.sqnr_db.mean(), bits_per_weight=rows.bits_per_weight.mean())


def _claim_rows(loaded, matrices: pd.DataFrame, params: Params) -> Iterator[dict]:
    stored = sum(
        quantize.quantize(m.weight, bits=8, granularity="channel").stored_bytes for m in rewrite.matrices(loaded.model)
    )
    fp16 = sum(2 * matrix.weight.numel() for matrix in rewrite.matrices(loaded.model))
    for kind in claims.VERDICT_KINDS:
        yield claims.row(
            "int8_memory",
            kind,
            fp16 / stored,
            fp16 / stored,
            fp16 / stored,
            False,
            config="stored bytes, scales included",
        )
    for fmt in (f for f in _formats(params) if f["bits"] == 8):
        low, estimate, high = attention_gap_db(_of_format(matrices, fmt), params.seed)
        yield claims.row(
            "attention_error",
            "mechanism_here",
            estimate,
            low,
            high,
            False,
            config=f"INT8 per {fmt['granularity']}, {loaded.name}",
        )


def attention_gap_db(matrices: pd.DataFrame, seed: int) -> tuple[float, float, float]:
    """(low, estimate, high) of mean SQNR of attention minus MLP matrices in dB; bootstrap over layers, 95%."""
    by_layer = (
        matrices.assign(attention=matrices.kind.isin(ATTENTION))
        .groupby(["layer", "attention"])
        .sqnr_db.mean()
        .unstack()
    )
    gaps = (by_layer[True] - by_layer[False]).to_numpy()
    draws = np.random.default_rng(seed).choice(gaps, size=(N_RESAMPLES, len(gaps))).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(gaps.mean()), float(high)

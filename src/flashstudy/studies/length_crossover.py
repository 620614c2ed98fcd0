"""At which sequence length does Flash start or stop paying?

The ratio of Flash to standard is followed over length, prefill and decode apart, and `measure.crossover` chooses the
lengths. A call runs a few decoder layers: all are alike, the embedding and the output head do not depend on length,
and a layer's ratio needs seconds where the whole model's needs minutes. Successive calls take successive layers, so
that weights come from memory as they do in the whole model.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial

import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from flashstudy.compress import checkpoints, rewrite, variants
from flashstudy.facts import claims, recipes
from flashstudy.measure import choices, crossover, machine, steps, timing
from flashstudy.predict import roofline

FLASH = ("ARTICLE_FLASH", "BEST_FLASH")
SHORT_TOKENS = 1024  # the article's "short": tasks below 1K tokens
KV_CONTEXT = 4096  # the ledger's length for the share of KV decompression


class Params(BaseModel):
    """Parameters of the notebook; the defaults are the quick profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str = Field("smollm2-135m", min_length=1, description="default model, folder, GGUF file or hub id")
    n_layers: int = Field(2, ge=0, le=1000, description="decoder layers run by a call, 0 for all")
    prefill_start: int = Field(32, ge=8, le=100_000, description="shortest prompt in tokens")
    prefill_stop: int = Field(384, ge=16, le=100_000, description="longest prompt in tokens")
    decode_start: int = Field(128, ge=8, le=1_000_000, description="shortest cache in tokens")
    decode_stop: int = Field(8192, ge=16, le=1_000_000, description="longest cache in tokens")
    max_points: int = Field(5, ge=4, le=24, description="lengths measured for each curve at most")
    n_threads: int = Field(0, ge=0, le=1024, description="threads, 0 lets the machine card decide")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the random tokens")
    budget_s: float = Field(1.5, gt=0, le=3600, description="seconds for each curve")

    @model_validator(mode="after")
    def _stop_above_start(self) -> "Params":
        for phase in ("prefill", "decode"):
            start, stop = getattr(self, f"{phase}_start"), getattr(self, f"{phase}_stop")
            if stop <= start:
                raise ValueError(f"{phase}_stop {stop} must be above {phase}_start {start}")
        return self


def run(params: Params, progress: Callable | None = None, evidence=None) -> pd.DataFrame:
    """One row per curve with its crossover, one per measured length, and the rows that the claims are judged by."""
    report = progress or (lambda done, total, label: None)
    curves = [(phase, name) for phase in ("prefill", "decode") for name in FLASH]
    report(0, len(curves) + 2, "model and variants")
    card = machine.card()
    loaded, n_layers = _layers(params, card)
    built = {
        recipe.name: rewrite.layer_slices(variants.build(loaded, recipe), n_layers)
        for recipe in _recipes(params, card, loaded)
    }
    rows: list[dict] = []
    for done, (phase, name) in enumerate(curves, start=1):
        report(done, len(curves) + 2, f"{phase}, {name}")
        found = _find(params, built, phase, name)
        rows += _curve_rows(params, loaded, built, card, phase, name, found)
    report(len(curves) + 1, len(curves) + 2, "share of KV decompression")
    judged = [*_length_claims(rows), _kv_share(params, built["ARTICLE_FLASH"])]
    report(len(curves) + 2, len(curves) + 2, "done")
    return pd.DataFrame(rows + judged)


def table(result: pd.DataFrame) -> pd.DataFrame:
    """One row per curve, then the lengths at its ends."""
    curves = result[result.crossover_status.notna()]
    points = result[result.context.notna() & result.claim_id.isna()]
    by_curve = points.groupby(["phase", "recipe"], sort=False).context
    at_ends = (points.context == by_curve.transform("min")) | (points.context == by_curve.transform("max"))
    return pd.concat([curves, points[at_ends]])


def phase(result: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows of one phase, claims left out."""
    return result[(result.phase == name) & result.claim_id.isna()]


def headline(result: pd.DataFrame) -> str:
    """Each Flash variant's crossover, or that there is none, in one sentence."""
    curves = result[result.crossover_status.notna()]
    return "; ".join(f"{row.recipe} in {row.phase}: {_in_words(row)}" for row in curves.itertuples()) + "."


def _in_words(row) -> str:
    if row.crossover_status == "crosses":
        side = row.direction.replace("flash_wins_", "Flash wins ")
        return f"{side} {row.crossover_tokens:,.0f} tokens [{row.low:,.0f}, {row.high:,.0f}]"
    return (
        row.crossover_status.replace("_", " ") + " in the measured range"
        if row.crossover_status != "inconclusive"
        else "inconclusive"
    )


def _layers(params: Params, card: machine.MachineCard) -> tuple[checkpoints.LoadedModel, int]:
    """Enough of the model's layers that INT8 weights exceed the cache, and how many of them a call runs.

    The shape is that of a call and has no vocabulary, because neither embedding nor head is run.
    """
    loaded = checkpoints.load_model(params.model, dtype=card.standard_dtype)
    n_layers = min(params.n_layers or loaded.shape.n_layers, loaded.shape.n_layers)
    beyond = steps.layers_beyond(loaded.shape, weight_bytes=1.0, llc_bytes=card.llc_bytes)
    streamed = min(math.ceil(beyond / n_layers) * n_layers, loaded.shape.n_layers)
    shape = dataclasses.replace(loaded.shape, n_layers=n_layers, vocab=1)
    return dataclasses.replace(loaded, model=rewrite.first_layers(loaded.model, streamed), shape=shape), n_layers


def _recipes(params: Params, card, loaded) -> Iterator[recipes.Recipe]:
    yield recipes.standard("bf16" if card.standard_dtype == "bfloat16" else "fp32")
    yield recipes.ARTICLE_FLASH
    yield choices.best_kernels(
        recipes.BEST_FLASH,
        shapes=[tuple(m.weight.shape) for m in rewrite.matrices(loaded.model)],
        n_threads=params.n_threads or None,
    )


def _find(params: Params, built: dict, phase: str, name: str) -> crossover.Crossover:
    start, stop = (getattr(params, f"{phase}_{end}") for end in ("start", "stop"))
    ratio_at = partial(_ratio_at, params, built, phase, name)
    return crossover.find(ratio_at, start, stop, budget_s=params.budget_s, max_points=params.max_points)


def _ratio_at(params: Params, built: dict, phase: str, name: str, n_tokens: int) -> timing.Comparison:
    """Flash over standard at one length; the decoder stack alone, without embedding look-up or head."""
    calls = {role: _call(params, built[role], phase, n_tokens) for role in ("standard", name)}
    budget_s = params.budget_s / params.max_points / 2
    return timing.compare(calls["standard"], calls[name], budget_s=budget_s, n_threads=params.n_threads or None)


def _call(params: Params, slices: list, phase: str, n_tokens: int) -> Callable:
    if phase == "decode":
        return steps.in_turns([steps.decode(part, context=n_tokens, seed=params.seed, head=False) for part in slices])
    generator = torch.Generator().manual_seed(params.seed)
    ids = torch.randint(slices[0].model.config.vocab_size, (1, n_tokens), generator=generator)
    return steps.in_turns([steps.prefill(part, ids, head=False) for part in slices])


def _curve_rows(params, loaded, built, card, phase, name, found: crossover.Crossover) -> Iterator[dict]:
    """The curve's summary, then its points with the cost model's ratio beside the measured one."""
    factors = dict(model=loaded.name, recipe=name, phase=phase, kernel=built[name][0].recipe.kernel)
    yield factors | dict(
        crossover_status=found.status, crossover_tokens=found.estimate, low=found.low, high=found.high,
        direction=found.direction, contended=any(point.contended for point in found.points),
    )  # fmt: skip
    for point in found.points:
        yield factors | _predicted(loaded, card, built, phase, name, point.n) | point.row()


def _predicted(loaded, card, built, phase: str, name: str, n_tokens: int) -> dict:
    hardware = machine.as_hardware(card)
    flash, standard = (
        roofline.step_time(loaded.shape, hardware, built[role][0].recipe, phase=phase, batch=1, context=n_tokens)
        for role in (name, "standard")
    )
    estimate, low, high = roofline.ratio(flash, standard)
    return dict(predicted_ratio=estimate, predicted_ratio_low=low, predicted_ratio_high=high)


def _length_claims(rows: list[dict]) -> Iterator[dict]:
    """short_gain from the longest length below 1,024 tokens, long_loss from the longest length of each curve."""
    points = pd.DataFrame([row for row in rows if "context" in row])
    for (phase_name, recipe), curve in points.groupby(["phase", "recipe"], sort=False):
        short, longest = curve[curve.context < SHORT_TOKENS], curve.loc[curve.context.idxmax()]
        config = f"{recipe}, {phase_name}"
        if len(short):
            at = short.loc[short.context.idxmax()]
            yield claims.row(
                "short_gain",
                "mechanism_here",
                1 - at.time_ratio,
                1 - at.high,
                1 - at.low,
                at.contended,
                config=f"{config}, {at.context:.0f} tokens",
            )
        yield claims.row(
            "long_loss",
            "mechanism_here",
            longest.time_ratio,
            longest.low,
            longest.high,
            longest.contended,
            config=f"{config}, {longest.context:.0f} tokens",
        )


def _kv_share(params: Params, slices: list) -> dict:
    """Share of an ARTICLE_FLASH decode step that dequantizing the cache takes: that work alone against the whole."""
    context = min(KV_CONTEXT, params.decode_stop)
    step = _call(params, slices, "decode", context)
    alone = steps.in_turns([steps.dequantize_cache(part, context=context, seed=params.seed) for part in slices])
    share = timing.compare(step, alone, budget_s=params.budget_s / 2, n_threads=params.n_threads or None)
    return claims.row(
        "kv_decompression",
        "mechanism_here",
        share.ratio,
        share.low,
        share.high,
        share.contended,
        config=f"INT8 cache of {context} tokens",
    )

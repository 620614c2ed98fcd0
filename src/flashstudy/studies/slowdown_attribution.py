"""Why can the Flash model take twice as long?

The standard, the Flash variant that the articles describe and the same formats on this machine's best kernels run the
same prompt in turns. The task is composed from its two measured phases: T = prefill + (N - 1) decode steps at the
middle of the answer, N tokens written. Each element of the article's recipe is also switched on alone.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, Field

from flashstudy.compress import checkpoints, decoder, rewrite, variants
from flashstudy.facts import claims, recipes
from flashstudy.facts.recipes import Recipe
from flashstudy.facts.units import busy_note, format_interval
from flashstudy.measure import choices, machine, steps, timing
from flashstudy.predict import roofline

Phase = Literal["prefill", "decode"]
PHASES = ("prefill", "decode", "task")
WHOLE = ("standard", "ARTICLE_FLASH", "BEST_FLASH")
MIN_PAIRS = 4  # a naive step takes up to seconds; blocks that long scatter by a percent or two
N_DRAWS = 20_000  # Monte Carlo draws for the task's interval; its own error is below 1% of the half-width


class Params(BaseModel):
    """Parameters of the notebook; the defaults are the quick profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str = Field("smollm2-135m", min_length=1, description="default model, folder, GGUF file or hub id")
    text: str = Field("pydoc", min_length=1, description="text that fills the prompt, default name or file")
    device: str = Field("cpu", pattern=r"^(cpu|cuda|mps)(:\d+)?$", description="cpu, cuda or mps")
    input_tokens: int = Field(256, ge=8, le=32_768, description="prompt length of the task")
    output_tokens: int = Field(64, ge=2, le=32_768, description="answer length of the task")
    sparsity: float = Field(0.5, gt=0, lt=1, description="share of weights pruned in both Flash variants")
    prefill_layers: int = Field(4, ge=0, le=1000, description="decoder layers run by a prefill call, 0 for all")
    loop: Literal["measuring", "transformers"] = Field(
        "measuring", description="decode steps without library code between the kernels, or by transformers' forward"
    )
    element_phases: list[Phase] = Field(["decode"], description="phases with each element alone too, may be empty")
    n_threads: int = Field(0, ge=0, le=1024, description="threads, 0 lets the machine card decide")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of every random choice")
    budget_s: float = Field(0.5, gt=0, le=600, description="seconds for each timed alternative")


def run(params: Params, progress: Callable | None = None, evidence=None) -> pd.DataFrame:
    """Rows of measured and predicted time ratios by recipe and phase, and the rows that the claims are judged by."""
    report = progress or (lambda done, total, label: None)
    torch.manual_seed(params.seed)
    report(0, 4, "machine card")
    card = machine.card()
    report(1, 4, "model and variants")
    loaded = checkpoints.load_model(params.model, dtype=card.standard_dtype, device=params.device)
    built = {recipe.name: variants.build(loaded, recipe) for recipe in _recipes(params, card, loaded)}
    report(2, 4, "prefill")
    prefill, length = _prefill(params, loaded, built)
    report(3, 4, "decode")
    decode, outside = _decode(params, _chosen(params, built, "decode"))
    both = prefill.keys() & decode.keys()
    task = {name: _task(prefill[name], decode[name], length, params) for name in built if name in both}
    rows = [
        _row(phase, built[name], built["standard"], comparison, params, loaded, card)
        for phase, found in zip(PHASES, (prefill, decode, task), strict=True)
        for name, comparison in found.items()
    ]
    report(4, 4, "done")
    return pd.DataFrame(rows + outside + list(_claim_rows(rows, params)))


def table(result: pd.DataFrame) -> pd.DataFrame:
    """The measured rows, the article's Flash and the best one first, then each element alone."""
    rows = result[result.claim_id.isna() & (result.recipe != "standard") & result.time_ratio.notna()]
    return rows.sort_values("element", key=lambda names: names != "all", kind="stable")


def overhead(result: pd.DataFrame) -> pd.DataFrame:
    """The share of a decode step that its kernels do not explain, where it was measured."""
    return result[result.part.notna()] if "part" in result else result.iloc[:0]


def headline(result: pd.DataFrame) -> str:
    """The answer in one sentence, with intervals, from the task rows."""
    task = result[result.claim_id.isna() & (result.phase == "task")].set_index("recipe")
    article, best = task.loc["ARTICLE_FLASH"], task.loc["BEST_FLASH"]
    sentence = (
        f"Compressed as the articles describe, a task of {article.input_tokens:.0f} tokens in and "
        f"{article.output_tokens:.0f} out takes "
        f"{format_interval(article.time_ratio, article.low, article.high)} the standard's time; "
        f"the same formats on this machine's best kernels take {format_interval(best.time_ratio, best.low, best.high)}"
    )
    return sentence + busy_note(article.contended or best.contended) + "."


def _recipes(params: Params, card: machine.MachineCard, loaded: checkpoints.LoadedModel) -> Iterator[Recipe]:
    """Standard, ARTICLE_FLASH, BEST_FLASH with its kernels chosen here, and the elements of ARTICLE_FLASH alone."""
    base = recipes.standard("bf16" if card.standard_dtype == "bfloat16" else "fp32")
    article = dataclasses.replace(recipes.ARTICLE_FLASH, sparsity=params.sparsity)
    best = dataclasses.replace(recipes.BEST_FLASH, sparsity=params.sparsity)
    yield base
    yield article
    yield choices.best_kernels(
        best,
        shapes=[tuple(m.weight.shape) for m in rewrite.matrices(loaded.model)],
        n_threads=params.n_threads or None,
    )
    if not params.element_phases:
        return
    yield from recipes.elements(article, base).values()
    other = {"fp32": "bf16", "bf16": "fp32"}[base.weight_format]
    yield dataclasses.replace(recipes.standard(other), name=f"standard in {other}")


def _prefill(params: Params, loaded, built: dict) -> tuple[dict[str, timing.Comparison], timing.Comparison]:
    """Prefill ratios by recipe, and the standard's prefill in units of its own decode step, from the same rounds."""
    text = checkpoints.load_text(params.text).evaluation
    ids = checkpoints.windows(text, loaded.tokenizer, n_windows=1, window_tokens=params.input_tokens).to(params.device)
    chosen = _chosen(params, built, "prefill")
    n_layers = min(params.prefill_layers or loaded.shape.n_layers, loaded.shape.n_layers)
    calls = {name: _prefills(variant, n_layers, ids) for name, variant in chosen.items()}
    one_step = _decodes(params, {"standard": built["standard"]})["standard"]
    rounds = _measure(calls | {"one step": one_step, "head": steps.head(built["standard"])}, params)
    found = rounds.against("standard")
    length = rounds.against("one step")["standard"]
    share, head = loaded.shape.n_layers / n_layers, found["head"].ratio  # all layers are alike; one head, left as it is
    return {name: _whole_prefill(found[name], share, head) for name in calls}, _scaled_ratio(length, share + head)


def _chosen(params: Params, built: dict, phase: str) -> dict[str, variants.Variant]:
    """The variants of one phase: the elements alone only where they are asked for."""
    return built if phase in params.element_phases else {name: built[name] for name in WHOLE}


def _prefills(variant: variants.Variant, n_layers: int, ids: torch.Tensor) -> Callable:
    """Prefills of `n_layers` consecutive layers in turns, so that all others come before a layer comes again."""
    return steps.in_turns([steps.prefill(part, ids, head=False) for part in rewrite.layer_slices(variant, n_layers)])


def _whole_prefill(layers: timing.Comparison, share: float, head: float) -> timing.Comparison:
    """The ratio for `share` times as many layers and a head that takes both `head` times the standard's layers."""
    ratio, low, high = ((share * one + head) / (share + head) for one in (layers.ratio, layers.low, layers.high))
    standard_s = layers.standard_s * (share + head)
    return dataclasses.replace(
        layers, ratio=ratio, low=low, high=high, standard_s=standard_s, flash_s=standard_s * ratio
    )


def _scaled_ratio(comparison: timing.Comparison, factor: float) -> timing.Comparison:
    """A ratio whose numerator alone grows by `factor`."""
    ratio, low, high = (comparison.ratio * factor, comparison.low * factor, comparison.high * factor)
    return dataclasses.replace(comparison, ratio=ratio, low=low, high=high)


def _decode(params: Params, built: dict) -> tuple[dict[str, timing.Comparison], list[dict]]:
    """Decode ratios by recipe, and how much of a step of the standard and the best Flash its kernels do not explain."""
    calls, products = _decodes(params, built), {}
    if _looped(params, built["standard"]):
        options = dict(context=_context(params), seed=params.seed)
        products = {name: steps.kernels(built[name], **options) for name in ("standard", "BEST_FLASH")}
    rounds = _measure(calls | {f"kernels of {name}": call for name, call in products.items()}, params)
    found = rounds.against("standard")
    outside = [_outside(name, rounds.against(name)[f"kernels of {name}"]) for name in products]
    return {name: found[name] for name in calls}, outside


def _decodes(params: Params, built: dict) -> dict[str, Callable]:
    """One decode step of each variant, all in the measuring loop or, for models it does not run, in the library."""
    step = steps.loop if _looped(params, built["standard"]) else steps.decode
    return {name: step(variant, context=_context(params), seed=params.seed) for name, variant in built.items()}


def _looped(params: Params, variant: variants.Variant) -> bool:
    return params.loop == "measuring" and params.device == "cpu" and decoder.runs(variant.model)


def _context(params: Params) -> int:
    """Tokens in the cache at the middle of the answer."""
    return params.input_tokens + params.output_tokens // 2


def _outside(name: str, kernels: timing.Comparison) -> dict:
    """The share of a step outside its kernels as a row; measured as the share inside them."""
    return dict(
        recipe=name, element="all", phase="decode", part="outside kernels", part_share=1 - kernels.ratio,
        low=1 - kernels.high, high=1 - kernels.low, contended=kernels.contended, reason=kernels.reason,
        n_pairs=kernels.n_pairs, n_threads=kernels.n_threads,
    )  # fmt: skip


def _measure(calls: dict[str, Callable], params: Params) -> timing.Rounds:
    return timing.measure(
        calls, budget_s=params.budget_s, n_threads=params.n_threads or None, seed=params.seed, min_pairs=MIN_PAIRS
    )


def _task(prefill, decode, length, params: Params) -> timing.Comparison:
    """Task ratio (k · R_prefill + n · R_decode) / (k + n), n steps after a prefill as long as k of them.

    The interval is a Monte Carlo over the three measured intervals.
    """
    generator = np.random.default_rng(params.seed)
    n_steps = params.output_tokens - 1
    draws = [_log_normal(part, generator) for part in (prefill, decode, length)]
    ratios = (draws[2] * draws[0] + n_steps * draws[1]) / (draws[2] + n_steps)
    ratio = (length.ratio * prefill.ratio + n_steps * decode.ratio) / (length.ratio + n_steps)
    low, high = np.quantile(ratios, [0.025, 0.975])
    reasons = {part.reason for part in (prefill, decode, length) if part.reason}
    standard_s = prefill.standard_s + n_steps * decode.standard_s
    return dataclasses.replace(
        decode, ratio=ratio, low=float(low), high=float(high),
        n_pairs=min(prefill.n_pairs, decode.n_pairs, length.n_pairs),
        standard_s=standard_s, flash_s=standard_s * ratio,
        contended=prefill.contended or decode.contended or length.contended, reason="; ".join(sorted(reasons)),
    )  # fmt: skip


def _log_normal(comparison: timing.Comparison, generator: np.random.Generator) -> np.ndarray:
    """Draws of a ratio whose logarithm is normal with the comparison's 95% interval."""
    deviation = math.log(comparison.high / comparison.low) / (2 * 1.96)
    return comparison.ratio * np.exp(deviation * generator.standard_normal(N_DRAWS))


def _row(phase: str, variant, standard, comparison, params: Params, loaded, card) -> dict:
    recipe: Recipe = variant.recipe
    predicted = _predict(phase, recipe, standard.recipe, params, loaded, card)
    return dict(
        model=loaded.name, device=params.device, recipe=recipe.name.split(":")[0], element=_element(recipe),
        phase=phase, weight_format=recipe.weight_format,
        kernel_path=recipe.kernel_path, kernel=recipe.kernel, kv_format=recipe.kv_format, sparsity=recipe.sparsity,
        sparse_format=recipe.sparse_format, input_tokens=params.input_tokens, output_tokens=params.output_tokens,
        stored_bytes=variant.stored_bytes,
        size_ratio=variant.stored_bytes / standard.stored_bytes, **predicted, **comparison.row(),
    )  # fmt: skip


def _element(recipe: Recipe) -> str:
    """ "all" for a whole recipe, else the element that its name says is alone."""
    return recipe.name.split(": ")[1].removesuffix(" alone") if ":" in recipe.name else "all"


def _predict(phase: str, recipe: Recipe, base: Recipe, params: Params, loaded, card) -> dict:
    """The cost model's ratio and interval, from the machine card alone."""
    flash, standard = (_predicted_time(phase, r, params, loaded, card) for r in (recipe, base))
    estimate, low, high = (1.0, 1.0, 1.0) if recipe is base else roofline.ratio(flash, standard)
    return dict(predicted_ratio=estimate, predicted_ratio_low=low, predicted_ratio_high=high)


def _predicted_time(phase: str, recipe: Recipe, params: Params, loaded, card) -> roofline.Prediction:
    hardware = machine.as_hardware(card)
    context = {"prefill": params.input_tokens, "decode": _context(params)}
    step = {
        name: roofline.step_time(loaded.shape, hardware, recipe, phase=name, batch=1, context=n_tokens)
        for name, n_tokens in context.items()
    }
    return step.get(phase) or roofline.in_sequence([(step["prefill"], 1), (step["decode"], params.output_tokens - 1)])


def _claim_rows(rows: list[dict], params: Params) -> Iterator[dict]:
    for row in rows:
        if row["recipe"] == "ARTICLE_FLASH" and row["element"] == "all":
            yield claims.row(
                "slowdown", "mechanism_here", row["time_ratio"], row["low"], row["high"], row["contended"],
                config=f"{row['phase']}, {params.input_tokens} tokens in, {params.output_tokens} out",
            )  # fmt: skip
    # Article B: 18% invalid operations, 22% of the time dequantizing, bandwidth use 85% -> 58%; multiplied by us.
    product = 1.18 * 1 / (1 - 0.22) * 85 / 58
    yield claims.row("reconstruction_overheads", "as_stated", product, product, product, False, config="our arithmetic")

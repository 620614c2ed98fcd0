"""What does the first answer cost: load, convert, compile, peak memory?

The same weights are loaded in several ways in turns, each load followed by the first and the second call of the model,
once with the file in the page cache and once with its pages dropped before. Weights count as ready when they lie in
this process's memory, converted to what the model multiplies. Peak memory is that of a new process for each way.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import nan

import numpy as np
import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

from flashstudy.compress import cache, checkpoints, loading, rewrite
from flashstudy.compress.loading import Way
from flashstudy.compress.variants import Variant
from flashstudy.facts import claims
from flashstudy.facts.units import busy_note, format_bytes, format_interval, format_seconds
from flashstudy.measure import compiling, machine, memory, memory_limit, page_cache, process, stages, starts, steps
from flashstudy.measure.statistics import correlated_interval

STANDARD = "safetensors"
NAMES = {
    "safetensors": "safetensors",
    "mapped": "safetensors, mapped",
    "gguf": "GGUF, converted",
    "quantize": "quantized on load",
    "prequantized": "INT8, prequantized",
    "dequantize": "INT8, dequantized",
}
CONVERTED = ("gguf", "dequantize")  # a compressed file that becomes floats when it is loaded
TOTALS = {"ready": ("load", "convert"), "first token": ("load", "convert", "first call")}
COLUMNS = ["way", "page_cache", "time_ratio", "time_s", "first_token_s", "over_baseline_bytes", "n_pairs"]
COMPILED_LAYERS, COMPILE_ROUNDS = 2, 3
# Memory limit of the paging test over what the standard holds while it decodes: it fits, and little else does.
LIMIT, PAGED_STEPS = 1.02, 12


class Params(BaseModel):
    """Parameters of the notebook; the defaults are the quick profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str = Field("smollm2-135m", min_length=1, description="default model, folder, GGUF file or hub id")
    n_layers: int = Field(4, ge=0, le=1000, description="decoder layers that are loaded, 0 for all")
    ways: list[Way] = Field(
        ["safetensors", "gguf", "quantize", "prequantized", "dequantize"], min_length=1,
        description="ways to load, safetensors always among them",
    )  # fmt: skip
    input_tokens: int = Field(16, ge=1, le=32_768, description="prompt of the first call in tokens")
    n_rounds: int = Field(4, ge=2, le=100, description="loads of each way, page cache warm and cold each")
    peak_ways: list[Way] = Field(["prequantized", "dequantize"], description="ways whose peak memory is taken too")
    n_peaks: int = Field(1, ge=1, le=20, description="new processes for each peak")
    compiled: bool = Field(False, description="whether to time compiling too, two minutes")
    n_threads: int = Field(0, ge=0, le=1024, description="threads, 0 lets the machine card decide")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the order and of the prompt")

    @field_validator("ways")
    @classmethod
    def _compares_something(cls, value: list[str]) -> list[str]:
        if not set(value) - {STANDARD, "gguf"}:  # not every model comes as a GGUF file
            raise ValueError("needs one of mapped, quantize, prequantized, dequantize to compare with")
        return value


@dataclass(frozen=True)
class Bench:
    """The model on disk in its forms, its dtype, and the prompt [1, input_tokens]."""

    files: loading.Files
    loaded: checkpoints.LoadedModel
    n_layers: int
    ids: Tensor


def run(params: Params, progress: Callable | None = None, evidence=None) -> pd.DataFrame:
    """Rows by way, page cache and phase with times; by way and phase with peaks; and those the claims are judged by."""
    report = progress or (lambda done, total, label: None)
    report(0, 4, "the model on disk in every form")
    with _bench(params, machine.card().standard_dtype) as bench:
        report(1, 4, "loads and first calls")
        rows = list(_times(params, bench))
        report(2, 4, "peak memory")
        peaks = _peaks(params, bench)
        rows += _peak_rows(peaks)
        rows.append(_paging(params, bench, peaks.get(STANDARD, [])))
        report(3, 4, "compiling")
        rows += _compiling(params, bench)
        factors = dict(model=bench.loaded.name, n_layers=bench.n_layers)
    report(4, 4, "done")
    return pd.DataFrame([factors | row for row in rows])


def table(result: pd.DataFrame) -> pd.DataFrame:
    """One row per way and state of the page cache: loading, the time to the first token, and the way's peak memory."""
    ready = result[result.phase == "ready"]
    first = result[result.phase == "first token"].set_index(["way", "page_cache"]).time_s
    peaks = result[result.phase == "peak"].set_index("way").get("over_baseline_bytes", pd.Series(dtype=float))
    places = pd.MultiIndex.from_frame(ready[["way", "page_cache"]])
    return ready.assign(first_token_s=first.reindex(places).array, over_baseline_bytes=ready.way.map(peaks).array)


def headline(result: pd.DataFrame) -> str:
    """How long a load takes, how much longer the other ways take, and what the naive one adds to memory."""
    ready = result[(result.phase == "ready") & result.time_ratio.notna()]
    state = "cold" if (ready.page_cache == "cold").any() else "warm"
    rows = ready[ready.page_cache == state].set_index("way")
    parts = [
        f"{name} {format_interval(rows.time_ratio[name], rows.low[name], rows.high[name])}"
        for name in (NAMES[way] for way in ("gguf", "dequantize", "prequantized"))
        if name in rows.index
    ]
    peak = result[(result.phase == "peak") & (result.way == NAMES["dequantize"])]
    memory_part = "".join(
        f"; floats kept beside their codes peak at {format_interval(row.memory_ratio, row.low, row.high)} "
        "of the standard's memory"
        for row in peak.itertuples()
    )
    return (
        f"With a {state} page cache, {result.n_layers.iloc[0]} layers are ready in "
        f"{format_seconds(rows.time_s[STANDARD])} from safetensors, in times of that: {', '.join(parts)}"
        f"{busy_note(rows.contended.astype(bool).any())}{memory_part}."
    )


@contextlib.contextmanager
def _bench(params: Params, dtype: str) -> Iterator[Bench]:
    """The model in its forms, in a folder of the user's cache that is gone afterward: /tmp may lie in memory."""
    source = checkpoints.locate(params.model).path
    loaded = checkpoints.load_model(params.model, dtype=dtype)
    n_layers = min(params.n_layers or loaded.shape.n_layers, loaded.shape.n_layers)
    with cache.locked("cold-start"), cache.scratch_folder(cache.cache_dir() / "cold-start") as folder:
        files = loading.write(loaded, source, folder, n_layers=n_layers)
        generator = torch.Generator().manual_seed(params.seed)
        ids = torch.randint(loaded.shape.vocab, (1, params.input_tokens), generator=generator)
        yield Bench(files, loaded, n_layers, ids)


def _times(params: Params, bench: Bench) -> Iterator[dict]:
    """The rows of every way with the page cache warm and cold, from the same rounds; what cannot be had, skipped."""
    ways = [way for way in dict.fromkeys([STANDARD, *params.ways]) if bench.files.of(way)]
    why_not_cold = next(filter(None, (page_cache.drop(path).reason for path in bench.files.of(STANDARD))), "")
    states = ["warm"] if why_not_cold else ["warm", "cold"]
    stayed: list[str] = []
    alternatives = {f"{way} {state}": _alternative(bench, way, state, stayed) for way in ways for state in states}
    rounds = stages.measure(
        alternatives, totals=TOTALS, n_rounds=params.n_rounds, warm_up=[f"{way} warm" for way in ways],
        n_threads=params.n_threads or None, seed=params.seed,
    )  # fmt: skip
    for way in ways:
        for state in states:
            why = next(filter(None, stayed), "") if state == "cold" else ""
            yield from _way_rows(params, bench, rounds, way, state, why, [*alternatives[f"{way} {state}"].stages])
        if why_not_cold:
            yield dict(way=NAMES[way], page_cache="cold", phase="ready", skipped=why_not_cold)
    if "gguf" in {*params.ways} - {*ways}:
        yield dict(way=NAMES["gguf"], phase="ready", skipped=bench.files.why_no_gguf)


def _alternative(bench: Bench, way: str, state: str, stayed: list[str]) -> stages.Staged:
    """One way's steps and two calls; before them the page cache is filled or emptied, and what stayed is noted."""
    paths = bench.files.of(way)

    def prepare() -> None:
        for path in paths:
            if state == "warm":
                page_cache.fill(path)
            else:
                stayed.append(page_cache.drop(path).reason)

    call = functools.partial(_call, bench.ids)
    own = loading.steps(way, bench.files, bench.loaded.dtype)
    return stages.Staged({**own, "first call": call, "second call": call}, prepare, waits=state == "cold")


def _call(ids: Tensor, variant: Variant) -> Variant:
    """Read the prompt; the variant goes on to the next stage."""
    steps.prefill(variant, ids)()
    return variant


def _way_rows(params, bench: Bench, rounds, way: str, state: str, why: str, own_stages: list[str]) -> Iterator[dict]:
    """A way's stages and totals against the standard's loading, the first call against the second of the same way."""
    name, standard = f"{way} {state}", f"{STANDARD} {state}"
    against = {"first token": (standard, "first token"), "first call": (name, "second call")}
    for phase in (*TOTALS, *(stage for stage in own_stages if stage != "second call")):
        found = rounds.compare((name, phase), against.get(phase, (standard, "ready")))
        row = dict(
            way=NAMES[way], page_cache=state, phase=phase, input_tokens=params.input_tokens,
            stored_bytes=bench.files.stored_bytes(way), **found.row(),
        )  # fmt: skip
        if phase == "first call":
            row |= dict(note="against the second call of the same way")
        if why:
            row |= dict(contended=True, reason=why)
        yield row
        if phase == "ready" and way in CONVERTED:
            yield claims.row(
                "cold_start", "mechanism_here", found.ratio, found.low, found.high, row["contended"],
                config=f"{NAMES[way]} on load, page cache {state}",
            ) | dict(reason=row["reason"])  # fmt: skip


def _peaks(params: Params, bench: Bench) -> dict[str, list[memory.Peak]]:
    """Peaks of the standard and of each way asked for, `n_peaks` processes each; none where none is asked for."""
    wanted = dict.fromkeys([STANDARD, *params.peak_ways] if params.peak_ways else [])
    ways = [way for way in wanted if bench.files.of(way)]
    jobs = [_start(params, bench, way) for way in ways for _ in range(params.n_peaks)]
    # floats and codes in private memory, and the larger of their files mapped at the same time
    found = iter(starts.peaks(jobs, 2 * bench.files.stored_bytes(STANDARD) + bench.files.stored_bytes("prequantized")))
    return {way: [next(found) for _ in range(params.n_peaks)] for way in ways}


def _start(params: Params, bench: Bench, way: str) -> starts.Start:
    threads = params.n_threads or process.default_threads()
    return starts.Start(way, bench.files, bench.loaded.dtype, bench.ids.tolist(), threads)


def _peak_rows(peaks: dict[str, list[memory.Peak]]) -> Iterator[dict]:
    """Each way's phases and their highest point, from its first process; its ratio to the standard; the claim's row."""
    for way, found in peaks.items():
        estimate, low, high = (1.0, 1.0, 1.0) if way == STANDARD else starts.ratio(way, found, peaks[STANDARD])
        held, phases = found[0].value, starts.counted(found[0])
        for phase in phases:
            yield _peak_row(way, phase.phase, held, [phase], phase.private_bytes - held["libraries"])
        yield _peak_row(way, "peak", held, phases, starts.over_libraries(found[0])) | dict(
            predicted_bytes=held["weights"], memory_ratio=estimate, low=low, high=high, contended=False
        )
        if way == "dequantize":
            yield claims.row(
                "peak_memory", "mechanism_here", estimate, low, high, False,
                config="floats kept beside the INT8 codes they were made of, private memory over the libraries'",
            )  # fmt: skip


def _peak_row(way: str, name: str, held: dict[str, int], phases: list[memory.PhasePeak], over_bytes: int) -> dict:
    """The highest points of these phases; `over_bytes` of private memory beyond the libraries'."""
    return dict(
        way=NAMES[way], phase=name, peak_bytes=max(phase.total_bytes for phase in phases),
        private_bytes=held["libraries"] + over_bytes, baseline_bytes=held["libraries"], over_baseline_bytes=over_bytes,
        file_mapped_bytes=max(0, *(phase.file_mapped_bytes - held["mapped_libraries"] for phase in phases)),
    )  # fmt: skip


def _paging(params: Params, bench: Bench, standard: list[memory.Peak]) -> dict:
    """The claim's row on swapping: the naive way's faults where the standard just fits, or why there are none."""
    limit_bytes = int(LIMIT * max((peak.phases[-1].total_bytes for peak in standard), default=0))
    counts = {}
    try:
        if not standard:
            raise memory_limit.NoLimitError("the standard's own peak was not asked for, so there is no limit to set")
        with memory_limit.limited_group(limit_bytes) as group:
            for way in (STANDARD, "dequantize"):
                found = memory.peak(starts.faults, _start(params, bench, way), str(group), PAGED_STEPS)
                counts[way] = correlated_interval(np.array(found.value, dtype=float))
    except (RuntimeError, OSError, MemoryError) as error:  # no limit to be had, or killed at it
        reason = str(error).strip().splitlines()[-1]
        return claims.row("swapping", "mechanism_here", nan, nan, nan, False) | dict(skipped=reason)
    naive = counts["dequantize"]
    return claims.row(
        "swapping", "mechanism_here", naive.estimate, max(0.0, naive.low), naive.high, False,
        config=f"a limit of {format_bytes(limit_bytes)}, where the standard has {counts[STANDARD].estimate:.3g} a step",
    )  # fmt: skip


def _compiling(params: Params, bench: Bench) -> Iterator[dict]:
    """torch.compile of a few layers: the first call and a later one, against a plain call of the same layers."""
    named = dict(way=f"torch.compile, {COMPILED_LAYERS} layers", input_tokens=params.input_tokens)
    if not params.compiled:
        yield named | dict(phase="compile", skipped="compiled is off: it takes two minutes")
        return
    try:
        rounds = compiling.measure(
            rewrite.first_layers(bench.loaded.model, min(COMPILED_LAYERS, bench.n_layers)).get_decoder(),
            bench.ids, n_rounds=COMPILE_ROUNDS, n_threads=params.n_threads or None, seed=params.seed,
        )  # fmt: skip
    except Exception as error:  # whatever is missing here: a compiler, an operator that it cannot take
        reason = str(error).strip().splitlines() or [type(error).__name__]
        yield named | dict(phase="compile", skipped=f"torch.compile: {reason[0]}")
        return
    for phase, stage in (("compile", "first call"), ("compiled call", "second call")):
        found = rounds.compare(("compiled", stage), ("eager", "second call"))
        yield named | dict(phase=phase, note="against a plain call of the same layers", **found.row())

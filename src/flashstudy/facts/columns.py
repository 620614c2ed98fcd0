"""The one vocabulary of result columns: what each name means, and in which unit.

A frame is read as factors (what was varied), values (what was found), quality (how far to trust it) and claim rows
(what judging reads). Analytic values carry the prefix `predicted_`; a column never mixes them with measured ones.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

ROLES = ("factor", "value", "quality", "claim")


@dataclass(frozen=True)
class Column:
    """unit "" where dimensionless. meaning: the axis label, and after a colon what is counted or allowed."""

    unit: str
    meaning: str
    role: str


_FACTORS = {
    "model": ("", "Model"),
    "text": ("", "Text"),
    "recipe": ("", "Recipe: name of the variant"),
    "element": ("", "Recipe element: the one that is switched on alone"),
    "phase": ("", "Phase: prefill, decode, task or layer"),
    "weight_format": ("", "Weight format"),
    "kernel_path": ("", "Kernel path: how stored weights are multiplied, see facts/recipes.py"),
    "kernel": ("", "Kernel"),
    "engine": ("", "Engine: eager, compiled, graph or cpp"),
    "granularity": ("", "Granularity: weights that share a scale (tensor, channel, group)"),
    "group_size": ("weights", "Group size: weights that share one scale, 0 outside groups"),
    "symmetric": ("", "Symmetric: whether the grid has no zero point"),
    "bits": ("bits", "Width of a stored value: scales and indices left out"),
    "sparsity": ("", "Sparsity: share of zeros"),
    "pattern": ("", "Sparsity pattern"),
    "sparse_format": ("", "Sparse storage format"),
    "block": ("rows × columns", "Block"),
    "kv_format": ("", "KV-cache format"),
    "rows": ("rows", "Activation rows: tokens multiplied at once"),
    "in_features": ("", "Input features"),
    "out_features": ("", "Output features"),
    "layer": ("", "Layer: index from the input"),
    "kind": ("", "Matrix kind: q, k, v, o, gate, up, down, head"),
    "context": ("tokens", "Context: tokens in the cache before the step"),
    "batch": ("sequences", "Batch"),
    "input_tokens": ("tokens", "Input tokens"),
    "output_tokens": ("tokens", "Output tokens"),
    "n_threads": ("threads", "Threads"),
    "device": ("", "Device"),
    "part": ("", "Part: what of one call was timed by itself"),
    "working_set_bytes": ("bytes", "Working set: bytes used again and again"),
    "residency": ("", "Residency: streamed from memory or hot_cache"),
    "way": ("", "Way to load"),
    "page_cache": ("", "Page cache: warm, or cold where the file's pages were dropped before"),
    "n_layers": ("layers", "Decoder layers: as many of the model as were loaded"),
    "config": ("", "Configuration: one line of text"),
    "skipped": ("", "Skipped: why this configuration was not measured, blank otherwise"),
    "note": ("", "Note"),
    "role": ("", "Role: naive, library, best or standard"),
    "direction": ("", "Direction: flash_wins_below or flash_wins_above"),
    "crossover_status": ("", "Crossover: crosses, always_faster, always_slower or inconclusive"),
}
_VALUES = {
    "time_s": ("s", "Time"),
    "standard_s": ("s", "Time of the standard"),
    "time_ratio": ("variant / standard", "Time ratio: above 1 is slower"),
    "first_token_s": ("s", "Time to first token: load, convert and first call"),
    "memory_ratio": ("variant / standard", "Peak memory ratio: private memory, what the libraries hold left out"),
    "peak_bytes": ("bytes", "Peak memory: private and mapped, libraries included"),
    "private_bytes": ("bytes", "Peak private memory: libraries included"),
    "over_baseline_bytes": ("bytes", "Peak private memory: what the libraries hold left out"),
    "baseline_bytes": ("bytes", "Private memory of the imported libraries alone"),
    "file_mapped_bytes": ("bytes", "Peak memory mapped from files: what the libraries map left out"),
    "predicted_bytes": ("bytes", "Predicted private memory: the weights held, activations left out"),
    "stored_bytes": ("bytes", "Stored size: scales and indices included"),
    "index_bytes": ("bytes", "Index size"),
    "read_bytes": ("bytes", "Bytes read: matmul weights, head included, and KV cache"),
    "read_bytes_per_s": ("bytes/s", "Read rate"),
    "ceiling_bytes_per_s": ("bytes/s", "Measured read ceiling of the machine"),
    "mbu": ("of the ceiling", "Memory bandwidth used"),
    "mbu_low": ("of the ceiling", "Memory bandwidth used, low end of the 95% interval"),
    "mbu_high": ("of the ceiling", "Memory bandwidth used, high end of the 95% interval"),
    "ceiling": ("", "What reached the ceiling: a plain read, or the fastest kernel"),
    "part_share": ("of the whole call", "Time of the part"),
    "flop": ("FLOP", "Useful work: a multiply-add is 2"),
    "flop_per_s": ("FLOP/s", "Useful work per second"),
    "bits_per_weight": ("bits per weight", "Stored size: scales and indices included"),
    "sqnr_db": ("dB", "Signal-to-quantization-noise ratio"),
    "relative_error": ("", "Relative error: norm of the difference / norm of the reference"),
    "nll_nats": ("nats per token", "Negative log-likelihood"),
    "delta_nll_nats": ("nats per token", "NLL over the standard's: same tokens, paired"),
    "kl_nats": ("nats per token", "KL divergence from the standard"),
    "perplexity": ("", "Perplexity"),
    "top1_agreement": ("", "Top-1 agreement: share of tokens with the standard's first choice"),
    "density": ("", "Density: share of weights kept"),
    "occupancy": ("", "Block occupancy: share of blocks stored"),
    "compression": ("dense bytes / stored bytes", "Compression"),
    "size_ratio": ("variant / standard", "Stored size ratio"),
    "predicted_s": ("s", "Predicted time"),
    "predicted_low_s": ("s", "Predicted time, low end"),
    "predicted_high_s": ("s", "Predicted time, high end"),
    "predicted_ratio": ("variant / standard", "Predicted time ratio"),
    "predicted_ratio_low": ("variant / standard", "Predicted time ratio, low end"),
    "predicted_ratio_high": ("variant / standard", "Predicted time ratio, high end"),
    "crossover_tokens": ("tokens", "Crossover: length at which both take the same time"),
}
_QUALITY = {
    "low": ("", "Low end of the 95% interval: of the row's main value or estimate"),
    "high": ("", "High end of the 95% interval: of the row's main value or estimate"),
    "n_pairs": ("pairs", "Interleaved pairs kept"),
    "n_tokens": ("tokens", "Tokens scored"),
    "contended": ("", "Contended: whether the machine was busy meanwhile"),
    "reason": ("", "Reason: why a row is contended or inconclusive"),
}
_CLAIMS = {
    "claim_id": ("", "Claim: its id in the ledger, blank on other rows"),
    "verdict_kind": ("", "Verdict kind: as_stated or mechanism_here"),
    "estimate": ("", "Estimate: in the claim's unit"),
}

COLUMNS: dict[str, Column] = {
    name: Column(unit, meaning, role)
    for role, group in zip(ROLES, (_FACTORS, _VALUES, _QUALITY, _CLAIMS), strict=True)
    for name, (unit, meaning) in group.items()
}


def check(frame: "pd.DataFrame") -> None:
    """Raise ValueError naming the frame's columns that are outside the vocabulary."""
    if unknown := [str(name) for name in frame.columns if name not in COLUMNS]:
        raise ValueError(f"unknown result columns {unknown}: use or extend the vocabulary of facts/columns.py")


def label(name: str) -> str:
    """Axis label with the unit in brackets: "bits_per_weight" is "Stored size (bits per weight)"."""
    if name not in COLUMNS:
        raise ValueError(f"no column {name!r} in facts/columns.py")
    column = COLUMNS[name]
    title = column.meaning.split(":")[0]
    return f"{title} ({column.unit})" if column.unit else title

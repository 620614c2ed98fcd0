"""Time of a step from its counted work: parts that sum to the total, and an interval.

Within one group of kernels reading hides arithmetic or the other way round, so the larger counts and `arithmetic` is
what sticks out; converting weights hides behind neither (fused int8 and int4 decode on an A100 and on CPUs are met by
the sum, not by the maximum). On a GPU the host runs ahead, so launches count where they outlast the device's work; on a
CPU they always count. The interval moves each constant alone to its slow end and adds the shifts of ln(time) in
quadrature: every time below is an array of scenarios, the nominal one first.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flashstudy.facts.hardware import Hardware
from flashstudy.facts.models import ModelShape
from flashstudy.facts.recipes import Recipe, allowed_kernel_paths
from flashstudy.facts.units import format_bytes
from flashstudy.predict import cost
from flashstudy.predict.constants import CONSTANTS, SCENARIOS
from flashstudy.predict.cost import Work

Seconds = NDArray[np.float64]  # [scenario]

PARTS = (
    "weights", "kv", "activations", "arithmetic", "dequantize", "decompress", "index", "launch", "communication",
    "padding",
)  # fmt: skip
MATRIX_ROWS = {"gpu": 16, "cpu": 1}  # tensor cores multiply whole tiles of 16 rows (mma.m16n8k16)


@dataclass(frozen=True)
class Prediction:
    """A predicted time with its 95% interval. parts_s sums to total_s.

    shifts: by constant, ln of the time's growth when that constant alone is at its slow end; two predictions that share
    their shifts move together, which `ratio` uses.
    """

    total_s: float
    low_s: float
    high_s: float
    parts_s: dict[str, float]
    shifts: dict[str, float]


def step_time(
    model: ModelShape,
    hardware: Hardware,
    recipe: Recipe,
    *,
    phase: str,
    batch: int,
    context: int,
    n_devices: int = 1,
) -> Prediction:
    """Time of one decode step with `context` cached tokens, or of the prefill of `context` tokens, for the whole batch.

    n_devices share every matrix and the heads (tensor parallelism). kernel_path and kv_path "unknown" lie between the
    naive path and the fused one. Raises ValueError where weights and cache do not fit, with both sizes.
    """
    size = {"batch": batch, "context": context, "compute_format": compute_format_of(recipe, hardware)}
    _check_capacity(model, hardware, recipe, n_devices, size)

    def parts(resolved: Recipe) -> dict[str, Seconds]:
        works = list(cost.step(model, resolved, phase=phase, **size))
        busy = _busy_parts(works, hardware)
        if n_devices > 1:
            rows = batch if phase == "decode" else batch * context
            busy = _share(
                busy, model, hardware, rows * model.hidden * cost.width_bytes(size["compute_format"]), n_devices
            )
        return busy | {"launch": _launch_s(busy, works, hardware, resolved.engine)}

    return _predict(recipe, parts)


def linear_time(out_features: int, in_features: int, rows: int, hardware: Hardware, recipe: Recipe) -> Prediction:
    """Time of one product, activations [rows, in] × weight [out, in], with the weight read from memory."""
    if min(out_features, in_features, rows) < 1:
        raise ValueError(f"a product of {rows} rows with [{out_features}, {in_features}] has no work")

    def parts(resolved: Recipe) -> dict[str, Seconds]:
        works = [(cost.linear(out_features, in_features, rows, resolved, compute_format_of(recipe, hardware)), 1)]
        busy = _busy_parts(works, hardware)
        return busy | {"launch": _launch_s(busy, works, hardware, resolved.engine)}

    return _predict(recipe, parts)


def ratio(variant: Prediction, standard: Prediction) -> tuple[float, float, float]:
    """(estimate, low, high) of variant time / standard time; constants that both depend on cancel from the interval."""
    estimate = variant.total_s / standard.total_s
    shared = (variant.shifts[name] - standard.shifts[name] for name in variant.shifts if name != "remainder")
    growth = math.exp(math.hypot(*shared, variant.shifts["remainder"], standard.shifts["remainder"]))
    return estimate, estimate / growth, estimate * growth


def in_sequence(steps: Iterable[tuple[Prediction, float]]) -> Prediction:
    """The time of several steps after another, as (prediction, how often): a task is a prefill and its decode steps.

    Times add; a constant's shift of the sum is that of the parts, weighted by their time (first order).
    """
    steps = list(steps)
    total_s = sum(step.total_s * times for step, times in steps)
    weights = [step.total_s * times / total_s for step, times in steps]
    shifts = {
        name: sum(weight * step.shifts[name] for weight, (step, _) in zip(weights, steps, strict=True))
        for name in steps[0][0].shifts
    }
    parts_s = {name: sum(step.parts_s[name] * times for step, times in steps) for name in PARTS}
    growth = math.exp(math.hypot(*shifts.values()))
    return Prediction(total_s, total_s / growth, total_s * growth, parts_s, shifts)


def compute_format_of(recipe: Recipe, hardware: Hardware) -> str:
    """The format of activations: the recipe's own, that of float weights, else the best 16-bit format or fp32."""
    if recipe.activation_format in ("fp32", "bf16", "fp16"):
        return recipe.activation_format
    if not recipe.is_quantized:
        return recipe.weight_format
    return next((name for name in ("bf16", "fp16") if hardware.accelerates(name)), "fp32")


def _check_capacity(model: ModelShape, hardware: Hardware, recipe: Recipe, n_devices: int, size: dict) -> None:
    needed, offered = cost.stored_bytes(model, recipe, **size), n_devices * hardware.memory_bytes
    if needed > offered:
        raise ValueError(
            f"{model.name} as {recipe.name} with {size['batch']} × {size['context']} cached tokens needs "
            f"{format_bytes(needed)}, {n_devices} × {hardware.name} offers {format_bytes(offered)}"
        )


def _predict(recipe: Recipe, parts: Callable[[Recipe], dict[str, Seconds]]) -> Prediction:
    """The prediction from the parts of every scenario; an unknown path lies midway between its ends, in ln(time)."""
    ends = [parts(end) for end in dict.fromkeys(_resolve(recipe, path) for path in ("fused", "dequantize_then_matmul"))]
    totals_s = [sum(end.values()) for end in ends]  # [end][scenario]
    log_s = np.log(totals_s)
    middle_s = np.exp(log_s.mean(axis=0))
    shifts = dict(zip(CONSTANTS, np.log(middle_s[1:] / middle_s[0]).tolist(), strict=True))
    shifts["kernel_path"] = float(np.ptp(log_s[:, 0])) / 2
    growth = math.exp(math.hypot(*shifts.values()))
    scale = middle_s[0] / sum(total[0] for total in totals_s)
    parts_s = {name: float(sum(end[name][0] for end in ends) * scale) for name in PARTS}
    total_s = sum(parts_s.values())
    return Prediction(total_s, total_s / growth, total_s * growth, parts_s, shifts)


def _resolve(recipe: Recipe, path: str) -> Recipe:
    """The recipe with each "unknown" replaced by `path`, or by "dense" where weights are plain."""
    changes = {}
    if recipe.kernel_path == "unknown":
        changes["kernel_path"] = path if path in allowed_kernel_paths(recipe) else "dense"
    if recipe.kv_path == "unknown":
        changes["kv_path"] = path
    return replace(recipe, **changes) if changes else recipe


def _busy_parts(works: Iterable[tuple[Work, float]], hardware: Hardware) -> dict[str, Seconds]:
    parts = {name: np.zeros(len(CONSTANTS) + 1) for name in PARTS}
    for work, times in works:
        for name, seconds in _work_parts(work, hardware).items():
            parts[name] += seconds * times
    return {name: seconds * SCENARIOS["remainder"] for name, seconds in parts.items()}


def _work_parts(work: Work, hardware: Hardware) -> dict[str, Seconds]:
    """The parts that this work has; those without are left out."""
    bytes_per_s = _bytes_per_s(work, hardware)
    streams = {
        "weights": work.weight_bytes,
        "index": work.index_bytes,
        "kv": work.kv_bytes,
        "activations": work.activation_bytes,
    }
    parts = {name: n_bytes / bytes_per_s for name, n_bytes in streams.items() if n_bytes}
    if work.flop:
        parts |= _arithmetic_parts(work, hardware, sum(parts.values()))
    if widened := _widened_values(work, hardware):
        parts["dequantize"] = _convert_s("dequantize", widened, work.dequantized_bytes, work, hardware)
    if work.unpacked_values:
        parts["decompress"] = _convert_s("decompress", work.unpacked_values, work.unpacked_bytes, work, hardware)
    return parts


def _arithmetic_parts(work: Work, hardware: Hardware, read_s: Seconds) -> dict[str, Seconds]:
    """Arithmetic beyond what reading hides, useful and, in the empty rows of a tile, padding."""
    arithmetic_s = work.flop / _flop_per_s(work, hardware)
    sticking_out_s = np.maximum(arithmetic_s - read_s, 0.0)
    tile = MATRIX_ROWS[hardware.kind] if work.rows > 1 else 1  # a single row takes vector kernels
    padded_rows = math.ceil(work.rows / tile) * tile
    if padded_rows == work.rows:
        return {"arithmetic": sticking_out_s}
    padded_s = np.maximum(arithmetic_s * (padded_rows / work.rows) - read_s, 0.0)
    return {"arithmetic": sticking_out_s, "padding": padded_s - sticking_out_s}


def _bytes_per_s(work: Work, hardware: Hardware) -> NDArray[np.float64]:
    share = SCENARIOS["measured_ceiling" if hardware.measured else "datasheet_bandwidth"]
    if work.sparse_product:
        share = share * SCENARIOS["sparse_bandwidth"]
    elif work.path == "fused":
        share = share * SCENARIOS["fused_bandwidth"]
    return hardware.bytes_per_s * share


def _flop_per_s(work: Work, hardware: Hardware) -> NDArray[np.float64]:
    share = SCENARIOS["measured_ceiling" if hardware.measured else "datasheet_arithmetic"]
    if work.sparse_product:
        return hardware.rate("fp32") * share * SCENARIOS["sparse_arithmetic"]
    if work.arithmetic_format not in hardware.flop_per_s:
        share = share * SCENARIOS["emulated_arithmetic"]
    elif work.path == "fused":
        share = share * SCENARIOS["fused_arithmetic"]
    elif work.path in ("native_lowbit", "decomposed_int8"):
        share = share * SCENARIOS["native_arithmetic"]
    return hardware.rate(work.arithmetic_format) * share


def _widened_values(work: Work, hardware: Hardware) -> float:
    """Values that are widened: those of the path, and every weight in a float format that the device emulates."""
    if work.path == "dense" and hardware.emulates(work.arithmetic_format):
        return work.dequantized_values + work.weight_bytes / cost.width_bytes(work.arithmetic_format)
    return work.dequantized_values


def _convert_s(kind: str, values: float, moved_bytes: float, work: Work, hardware: Hardware) -> Seconds:
    """Time to "dequantize" or "decompress" values; moved_bytes are written and read again, half each, 0 where fused.

    A CPU converts through memory at a rate of its own, measured or assumed of its bandwidth, that includes the writing.
    """
    bytes_per_s = _bytes_per_s(work, hardware)
    if hardware.kind == "gpu" or not moved_bytes:
        lanes_per_s = hardware.rate("fp32") / 2  # a fused multiply-add is 2 FLOP and one instruction
        return values * SCENARIOS[f"{kind}_instructions"] / lanes_per_s + moved_bytes / bytes_per_s
    measured_per_s = hardware.conversion_rate(kind, work.converted_at_once)
    if measured_per_s:
        per_value_s = 1 / (measured_per_s * SCENARIOS["measured_conversion"])
    else:
        per_value_s = SCENARIOS[f"cpu_{kind}_bytes"] / hardware.bytes_per_s
    return values * per_value_s + moved_bytes / 2 / bytes_per_s


def _launch_s(busy: dict[str, Seconds], works: list[tuple[Work, float]], hardware: Hardware, engine: str) -> Seconds:
    """Time that launching adds to the busy parts; a graph is launched once."""
    n_kernels = sum(work.n_kernels * times for work, times in works)
    dispatch_s = SCENARIOS.get(f"{engine}_dispatch_s", np.zeros(len(CONSTANTS) + 1))
    host_s = (1 if engine == "graph" else n_kernels) * (hardware.launch_s + dispatch_s)
    if hardware.kind == "cpu":
        return host_s
    gaps_s = n_kernels * SCENARIOS["gpu_kernel_gap_s"]
    return gaps_s + np.maximum(host_s - sum(busy.values()) - gaps_s, 0.0)


def _share(
    busy: dict[str, Seconds], model: ModelShape, hardware: Hardware, reduced_bytes: float, n_devices: int
) -> dict[str, Seconds]:
    """Busy parts of the slowest of n_devices that share every layer, with two all-reduces of reduced_bytes a layer.

    Heads that n_devices do not divide leave it ceil(heads / n) of them, counted as padding. Ring all-reduce: each
    device sends 2 (n - 1) / n of the bytes.
    """
    if not hardware.interconnect_bytes_per_s:
        raise ValueError(f"{hardware.name} has no interconnect, so n_devices must be 1, not {n_devices}")
    shared = {name: seconds / n_devices for name, seconds in busy.items()}
    shared["padding"] += sum(shared.values()) * (math.ceil(model.n_heads / n_devices) * n_devices / model.n_heads - 1)
    sent_s = 2 * (n_devices - 1) / n_devices * reduced_bytes / hardware.interconnect_bytes_per_s
    return shared | {"communication": 2 * model.n_layers * (SCENARIOS["all_reduce_s"] + sent_s)}

"""Devices as their vendors state them: dense rates per number format, bandwidth, capacity, links.

A format that is absent from `flop_per_s` has no units of its own on the device; its products then run in a wider
format, which `rate` answers for. Sparse peaks are never stored. `measure/machine.py` fills the same record for the
machine at hand.
"""

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path

from flashstudy.facts import checkout
from flashstudy.facts.units import GIB, GIGA, TERA

FORMATS = ("fp32", "fp16", "bf16", "int8", "fp8", "int4")

# What a product runs in where its own format has no units, first present wins. Low-bit values widen to 16 bits (to the
# format that the model computes in), not to another low-bit format: that would need quantized activations.
FALLBACK = {
    "fp32": (),
    "fp16": ("fp32",),
    "bf16": ("fp32",),
    "int8": ("bf16", "fp16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "int4": ("bf16", "fp16", "fp32"),
}

# Host time to issue one kernel. 5 µs is what a CUDA launch costs (range 3–10 µs; NVIDIA, "Getting Started with CUDA
# Graphs": 2.2 µs launch on top of 2.9 µs work); 1 µs is a call from one loop to the next on a CPU.
LAUNCH_S = {"gpu": 5e-6, "cpu": 1e-6}


@dataclass(frozen=True)
class Hardware:
    """One device. flop_per_s: dense peak by format, fp32 accumulation. interconnect_bytes_per_s: one direction.

    kind: "gpu" or "cpu". The two conversion rates (weights/s that are widened from a low-bit format, or unpacked from a
    sparse one, by weights converted at once: a matrix that fits the cache is up to ten times faster) are measured where
    known; None lets the cost model derive them. measured: rates are what kernels reached here, not a vendor's word.
    """

    name: str
    device_key: str
    kind: str
    bytes_per_s: float
    flop_per_s: dict[str, float] = field(hash=False)
    memory_bytes: float
    launch_s: float
    interconnect_bytes_per_s: float
    source: str
    dequantize_weights_per_s: dict[int, float] | None = field(default=None, hash=False)
    decompress_weights_per_s: dict[int, float] | None = field(default=None, hash=False)
    measured: bool = False

    def __post_init__(self) -> None:
        if self.kind not in LAUNCH_S:
            raise ValueError(f"{self.name}: kind {self.kind!r} is not one of {tuple(LAUNCH_S)}")
        if unknown := set(self.flop_per_s) - set(FORMATS):
            raise ValueError(f"{self.name}: unknown formats {sorted(unknown)}; allowed are {', '.join(FORMATS)}")
        if "fp32" not in self.flop_per_s or min(self.bytes_per_s, *self.flop_per_s.values()) <= 0:
            raise ValueError(f"{self.name}: needs a positive bandwidth and positive rates, fp32 among them")

    def rate(self, number_format: str) -> float:
        """Dense FLOP/s (OP/s for integers) of products in this format, or in the one it falls back to (FALLBACK)."""
        if number_format not in FALLBACK:
            raise ValueError(f"no rate for format {number_format!r}; allowed are {', '.join(FORMATS)}")
        order = (number_format, *FALLBACK[number_format])
        return next(self.flop_per_s[name] for name in order if name in self.flop_per_s)

    def conversion_rate(self, kind: str, n_weights: float) -> float | None:
        """Measured weights/s that are converted, `n_weights` at once; kind "dequantize" or "decompress". None: unknown.

        Between two measured sizes on a straight line of the logarithms, outside them the nearest one's.
        """
        by_size = {"dequantize": self.dequantize_weights_per_s, "decompress": self.decompress_weights_per_s}[kind]
        if not by_size:
            return None
        smaller = max((size for size in by_size if size <= n_weights), default=min(by_size))
        larger = min((size for size in by_size if size >= n_weights), default=max(by_size))
        if smaller == larger:
            return by_size[smaller]
        share = math.log(n_weights / smaller) / math.log(larger / smaller)
        return by_size[smaller] ** (1 - share) * by_size[larger] ** share

    def accelerates(self, number_format: str) -> bool:
        """Whether the device multiplies faster in this format than in the wider ones it would fall back to.

        V100 has INT8 instructions (62.8 TOP/s) but no INT8 tensor cores (fp16: 125), so it does not accelerate INT8.
        """
        if number_format not in self.flop_per_s:
            return False
        wider = [self.flop_per_s[name] for name in FALLBACK[number_format] if name in self.flop_per_s]
        return self.flop_per_s[number_format] > max(wider, default=0.0)

    def emulates(self, number_format: str) -> bool:
        """Whether products in this format have no units: the rate is missing or below that of fp32."""
        return self.flop_per_s.get(number_format, 0.0) < self.flop_per_s["fp32"]

    @property
    def not_accelerated(self) -> tuple[str, ...]:
        """The formats of FORMATS that gain no speed in arithmetic here."""
        return tuple(name for name in FORMATS if not self.accelerates(name))

    def ridge_flop_per_byte(self, number_format: str) -> float:
        """Arithmetic intensity above which products in this format are bound by arithmetic, not by memory."""
        return self.rate(number_format) / self.bytes_per_s


def load(path: Path | None = None) -> dict[str, Hardware]:
    """The devices of data/hardware.csv by `device_key`. Blank rates mean: not accelerated."""
    with open(path or checkout.data_dir() / "hardware.csv", newline="", encoding="utf-8") as lines:
        return {row["device_key"]: _from_row(row) for row in csv.DictReader(lines)}


def _from_row(row: dict[str, str]) -> Hardware:
    rates = {name: float(row[f"{name}_tflop_per_s"] or 0) * TERA for name in FORMATS}
    return Hardware(
        name=row["name"],
        device_key=row["device_key"],
        kind=row["kind"],
        bytes_per_s=float(row["bandwidth_gb_per_s"]) * GIGA,
        flop_per_s={name: rate for name, rate in rates.items() if rate},
        memory_bytes=float(row["memory_gib"]) * GIB,
        launch_s=LAUNCH_S[row["kind"]],
        interconnect_bytes_per_s=float(row["interconnect_gb_per_s_both_ways"] or 0) / 2 * GIGA,
        source=row["source"],
    )

"""The few constants of the cost model: what share of a peak each kernel path reaches, and what conversions cost.

A constant carries its value and the value at the slow end of its 95% range; the fast end mirrors it on a log scale.
First estimates, from the sources named; the shares of the paths are relative to the dense path.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Constant:
    """value: best estimate. slow: what it may be at worst, in the direction that takes longer."""

    value: float
    slow: float


CONSTANTS: dict[str, Constant] = {
    # Share of a datasheet's bandwidth that long reads reach: gpt-fast gets 83% of an A100, llama.cpp 69–83% of consumer
    # GPUs and M2 Ultra. A measured machine states what it reaches, so neither this nor the next share applies to it.
    "datasheet_bandwidth": Constant(0.80, 0.65),
    # Share of a datasheet's dense arithmetic peak that large products reach: 60–75% on A100 and H100 (cuBLAS, bf16).
    "datasheet_arithmetic": Constant(0.65, 0.45),
    # A measured ceiling, reached by whole products: 66–97% by format on two CPUs.
    "measured_ceiling": Constant(0.90, 0.70),
    # Low-bit kernels against the dense one, conversion counted apart. Marlin reaches 0.9, torch's packed int4 0.6.
    "fused_bandwidth": Constant(0.90, 0.60),
    # The same at many rows: shared memory and registers go to unpacking. Packed int8 on AVX2: 0.55; Marlin: 0.8.
    "fused_arithmetic": Constant(0.60, 0.35),
    # INT8 and FP8 products against their own peak, relative to what 16 bits reach of theirs (cuBLASLt: 0.7–0.9).
    "native_arithmetic": Constant(0.80, 0.55),
    # CSR and BSR gather: torch CSR breaks even with dense fp32 at densities of 0.25–0.44 where bytes alone say 0.5.
    "sparse_bandwidth": Constant(0.70, 0.40),
    # Their products use no matrix units: about a tenth of the fp32 rate (cuSPARSE and MKL at 80–95% sparsity).
    "sparse_arithmetic": Constant(0.10, 0.03),
    # Products in a float format without units, relative to fp32: bf16 at 128 rows on AVX2 is 7 times slower.
    "emulated_arithmetic": Constant(0.20, 0.08),
    # Instructions per converted weight inside a kernel (load, widen, scale), each lane at half the fp32 FLOP rate.
    # Packed int8 on AVX2 and AVX-512: 3.4–3.8; packed int4: 2.3–5.3.
    "dequantize_instructions": Constant(3.5, 6.0),
    # Instructions per bit tested and value placed of a bitmap (test, prefix sum, select).
    "decompress_instructions": Constant(12.0, 30.0),
    # On a CPU, a tensor expression that widens weights into fresh memory costs as much as moving so many bytes per
    # weight: 3–5 ns at 25 GB/s (int8 to fp32, two passes, page faults) and 10 ns for a bitmap. Used where the hardware
    # record carries no measured rate.
    "cpu_dequantize_bytes": Constant(100.0, 200.0),
    "cpu_decompress_bytes": Constant(250.0, 500.0),
    # Share of a measured conversion rate that a tensor expression into fresh memory reaches (page faults).
    "measured_conversion": Constant(0.80, 0.50),
    # Host time to dispatch one kernel before it is launched, by engine: Python and the dispatcher take 8–20 µs in
    # eager mode (1,376 kernels of a 7B step in 25–33 ms); a CUDA graph replays without the host.
    "eager_dispatch_s": Constant(12e-6, 20e-6),
    "compiled_dispatch_s": Constant(2e-6, 4e-6),
    "cpp_dispatch_s": Constant(0.5e-6, 1.5e-6),
    # Time between two kernels on a GPU when nothing waits for the host: drain, launch, ramp.
    "gpu_kernel_gap_s": Constant(1.5e-6, 3e-6),
    # One all-reduce beyond its bytes: NCCL 10–30 µs over NVLink or PCIe.
    "all_reduce_s": Constant(15e-6, 30e-6),
    # What the model leaves out altogether (clocks, tails, softmax, the quality of one implementation): roofline models
    # miss published times by 32–46% in the median. Independent between two predictions, unlike all the others.
    "remainder": Constant(1.0, 1.4),
}


def _scenarios() -> dict[str, NDArray[np.float64]]:
    """By constant, its value in every scenario: the nominal one, then each constant alone at its slow end, in order."""
    scenarios = {name: np.full(len(CONSTANTS) + 1, constant.value) for name, constant in CONSTANTS.items()}
    for scenario, (name, constant) in enumerate(CONSTANTS.items(), start=1):
        scenarios[name][scenario] = constant.slow
    return scenarios


SCENARIOS = _scenarios()

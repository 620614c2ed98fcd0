"""The measurements behind a machine card: bandwidth by working-set size, products by format, conversions."""

from typing import Any

import psutil
import torch

from flashstudy.facts.units import GIB, MIB

from . import rates
from .backends import accelerator
from .blocks import Stopwatch
from .host import Host
from .process import prepared

GEMM_ROWS = 256
CONVERTED_SIDES = (512, 4096)  # of square matrices: within a core's caches, and far beyond them
FORMATS = ("fp32", "bf16", "fp16", "int8")
# From inside one core's second-level cache to far outside the last one.
CACHE_SIZES = (MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB)


def stream_bytes(llc_bytes: int) -> int:
    """Working set that must come from memory: four last-level caches, at most 2 GiB or an eighth of what is free."""
    return int(min(max(4 * llc_bytes, 128 * MIB), 2 * GIB, psutil.virtual_memory().available / 8))


def host_ceilings(host: Host, n_threads: int) -> dict[str, Any]:
    """The measured fields of a machine card, by their names there."""
    bandwidth, gemms = [], {}
    for threads in sorted({1, n_threads}):
        with prepared(threads):
            stopwatch = Stopwatch(n_threads=threads)
            bandwidth += _bandwidth(stopwatch, stream_bytes(host.llc_bytes))
            gemms[threads] = {name: rates.gemm_rate(name, GEMM_ROWS, 2048, stopwatch) for name in FORMATS}
    flop_per_s = {threads: {name: rate.per_s for name, rate in found.items()} for threads, found in gemms.items()}
    fast_bf16 = flop_per_s[n_threads]["bf16"] >= flop_per_s[n_threads]["fp32"]
    dtype = torch.bfloat16 if fast_bf16 else torch.float32
    with prepared(n_threads):
        widen = {side * side: rates.dequantize_rate(stopwatch, dtype, side=side) for side in CONVERTED_SIDES}
        unpack = {side * side: rates.decompress_rate(stopwatch, side=side) for side in CONVERTED_SIDES}
    best = {str(threads): _streamed(bandwidth, threads, host.llc_bytes) for threads in gemms}
    return dict(
        read_bytes_per_s={threads: row["read_bytes_per_s"] for threads, row in best.items()},
        copy_bytes_per_s={threads: row["copy_bytes_per_s"] for threads, row in best.items()},
        triad_bytes_per_s={threads: row["triad_bytes_per_s"] for threads, row in best.items()},
        read_kernel={threads: row["read_kernel"] for threads, row in best.items()},
        bandwidth_by_size=bandwidth,
        gemm_flop_per_s=flop_per_s[n_threads],
        gemm_one_thread_flop_per_s=flop_per_s[1],
        gemm_kernel={name: rate.kernel for name, rate in gemms[n_threads].items()},
        dequantize_weights_per_s={str(n_weights): rate.per_s for n_weights, rate in widen.items()},
        decompress_weights_per_s={str(n_weights): rate.per_s for n_weights, rate in unpack.items()},
        fast_bf16=fast_bf16,
        standard_dtype="bfloat16" if fast_bf16 else "float32",
        contended=any(row["contended"] for row in bandwidth)
        or any(rate.contended for found in gemms.values() for rate in found.values()),
    )


def _streamed(bandwidth: list[dict[str, Any]], n_threads: int, llc_bytes: int) -> dict[str, Any]:
    """Best rates from memory with at most so many threads: one thread of two may always be left idle."""
    rows = [row for row in bandwidth if row["n_threads"] <= n_threads]
    largest = max(row["working_set_bytes"] for row in rows)
    far = [row for row in rows if row["working_set_bytes"] >= min(4 * llc_bytes, largest)]
    names = ("copy_bytes_per_s", "triad_bytes_per_s")
    return max(far, key=lambda row: row["read_bytes_per_s"]) | {name: max(row[name] for row in far) for name in names}


def _bandwidth(stopwatch: Stopwatch, largest: int) -> list[dict[str, Any]]:
    """One row a working-set size, the largest last."""
    sizes = [size for size in CACHE_SIZES if size < largest] + [largest]
    return [_bandwidth_row(size, stopwatch) for size in sizes]


def _bandwidth_row(size: int, stopwatch: Stopwatch) -> dict[str, Any]:
    read, copy, triad = (measure(size, stopwatch) for measure in (rates.read_rate, rates.copy_rate, rates.triad_rate))
    return dict(
        working_set_bytes=size,
        n_threads=stopwatch.n_threads,
        read_bytes_per_s=read.per_s,
        read_kernel=read.kernel,
        copy_bytes_per_s=copy.per_s,
        triad_bytes_per_s=triad.per_s,
        contended=any(rate.contended for rate in (read, copy, triad)),
    )


def gpu_ceilings() -> dict[str, Any] | None:
    """Name, memory, capability and rates of the CUDA device; None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    stopwatch = Stopwatch(backend=accelerator())
    gemms = {name: rates.gemm_rate(name, 4096, 4096, stopwatch, "cuda").per_s for name in FORMATS}
    return dict(
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory_bytes=properties.total_memory,
        n_devices=torch.cuda.device_count(),
        read_bytes_per_s=rates.read_rate(GIB, stopwatch, "cuda").per_s,
        copy_bytes_per_s=rates.copy_rate(GIB, stopwatch, "cuda").per_s,
        gemm_flop_per_s=gemms,
    )

"""A machine card as plain text: one fact a line, units at the numbers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flashstudy.facts.units import GIGA, MIB, TERA, format_bytes

if TYPE_CHECKING:
    from .machine import MachineCard


def lines(card: "MachineCard") -> Iterator[str]:
    """The lines of the card."""
    quota = "no quota" if card.cpu_quota is None else f"a quota of {card.cpu_quota:g} CPUs"
    cores = f"{card.physical_cores} physical, {card.usable_cpus} CPUs usable, {quota}, {card.numa_nodes} NUMA node(s)"
    yield f"{card.cpu_model} ({card.arch})"
    yield _row("cores", cores)
    yield _row("threads", f"{card.n_threads}: {card.thread_reason}")
    yield _row("instructions", " ".join(card.simd) or "unknown")
    yield _row(
        "memory", f"{format_bytes(card.memory_limit_bytes)} usable, last-level cache {card.llc_bytes / MIB:.0f} MiB"
    )
    for threads, read in card.read_bytes_per_s.items():
        copy, triad = card.copy_bytes_per_s[threads], card.triad_bytes_per_s[threads]
        rates = f"read {_gb(read)} ({card.read_kernel[threads]}), copy {_gb(copy)}, triad {_gb(triad)}"
        yield _row(f"bandwidth, {threads} thread(s)", rates)
    yield from _by_size(card)
    products = ", ".join(f"{name} {rate / TERA:.3g}" for name, rate in card.gemm_flop_per_s.items())
    yield _row(
        "products (TFLOP/s)",
        f"{products}: bf16 is {'fast' if card.fast_bf16 else 'slow'}, standard is {card.standard_dtype}",
    )
    widen, unpack = (_by_matrix(rates) for rates in (card.dequantize_weights_per_s, card.decompress_weights_per_s))
    yield _row("conversions", f"billion weights/s, INT8 to float {widen}; bitmap to INT8 {unpack}")
    yield _row("GPU", "none" if card.gpu is None else _gpu(card.gpu))
    busy = "; other work ran meanwhile, figures may be low" if card.contended else ""
    yield _row("measured", f"{card.measured_at}, in {card.measured_in_s:.0f} s{busy}")


def _by_size(card: "MachineCard") -> Iterator[str]:
    """One line a working set, read rate by number of threads: the caches show as steps."""
    for size in sorted({row["working_set_bytes"] for row in card.bandwidth_by_size}):
        rows = [row for row in card.bandwidth_by_size if row["working_set_bytes"] == size]
        text = ", ".join(f"{_gb(row['read_bytes_per_s'])} with {row['n_threads']}" for row in rows)
        yield _row(f"  read in {size / MIB:g} MiB", text)


def _by_matrix(rates: dict[str, float]) -> str:
    return ", ".join(f"{rate / GIGA:.2g} ({int(n_weights) / 1e6:.2g}M at once)" for n_weights, rate in rates.items())


def _gpu(gpu: dict) -> str:
    products = ", ".join(f"{name} {rate / TERA:.3g}" for name, rate in gpu["gemm_flop_per_s"].items())
    memory = format_bytes(gpu["memory_bytes"])
    read = _gb(gpu["read_bytes_per_s"])
    return f"{gpu['name']} ({gpu['capability']}), {memory}, read {read}, products (TFLOP/s) {products}"


def _row(name: str, text: str) -> str:
    return f"{name:<24}{text}"


def _gb(rate: float) -> str:
    return f"{rate / GIGA:.1f} GB/s"

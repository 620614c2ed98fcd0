"""How fast this machine reads, copies, multiplies and converts: the best of several kernels, each tried several times.

A ceiling must not be beaten by a kernel that is measured later, so the fastest kernel and the best of its tries
count, not a mean. Arrays are written before they are read: pages that nobody wrote all map to one page of zeros,
which stays in cache.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import threadpoolctl
import torch
from torch import Tensor

from .blocks import Stopwatch

Kernel = Callable[[], Any]
TRIES, SAMPLE_S = 7, 2e-3
# One kernel gets no more tries after so long: a slow path shows its rate at once.
ENOUGH_S = 0.12


@dataclass(frozen=True)
class Rate:
    """The best rate (units a second), the kernel that reached it, and whether other work spoiled every try of it."""

    per_s: float
    kernel: str
    contended: bool


def best_rate(kernels: dict[str, Kernel], units: float, stopwatch: Stopwatch, tries: int = TRIES) -> Rate:
    """Most `units` a second over the kernels; kernels that this build of torch lacks are passed over."""
    rates = [rate for name, kernel in kernels.items() if (rate := _rate(name, kernel, units, stopwatch, tries))]
    if not rates:
        raise RuntimeError(f"none of the kernels {list(kernels)} runs on this machine")
    return max(rates, key=lambda rate: rate.per_s)


def _rate(name: str, kernel: Kernel, units: float, stopwatch: Stopwatch, tries: int) -> Rate | None:
    """The kernel's best undisturbed try; None where it is not implemented."""
    try:
        kernel()
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
    stopwatch.watch.refresh()
    taken = [stopwatch.block(kernel, 1)]
    n_calls = max(1, int(SAMPLE_S / max(taken[0].call_s, 1e-7)))
    while len(taken) <= tries and sum(block.wall_s for block in taken) < ENOUGH_S:
        taken.append(stopwatch.block(kernel, n_calls))
    return Rate(units / min(block.call_s for block in taken), name, not any(block.clean for block in taken))


def read_rate(n_bytes: int, stopwatch: Stopwatch, device: str = "cpu") -> Rate:
    """Bytes read a second from a working set of `n_bytes`, with the stopwatch's number of threads."""
    columns = 4096 if n_bytes >= 2**22 else 1024
    values = torch.ones(n_bytes // 4 // columns, columns, device=device)
    vector = torch.ones(columns, device=device)
    readers: dict[str, Kernel] = {"torch.sum": values.sum, "torch.mv": lambda: torch.mv(values, vector)}
    if device == "cpu":
        array, ones = values.numpy(), vector.numpy()
        readers["numpy.matmul"] = lambda: array @ ones
    with threadpoolctl.threadpool_limits(stopwatch.n_threads, user_api="blas"):
        return best_rate(readers, values.numel() * 4, stopwatch)


def copy_rate(n_bytes: int, stopwatch: Stopwatch, device: str = "cpu") -> Rate:
    """Bytes read and written a second while half of the working set is copied to the other half."""
    source, target = (torch.ones(n_bytes // 8, device=device) for _ in range(2))
    return best_rate({"torch.copy_": lambda: target.copy_(source)}, source.numel() * 8, stopwatch)


def triad_rate(n_bytes: int, stopwatch: Stopwatch, device: str = "cpu") -> Rate:
    """Bytes moved a second by a = b + 3 c over three arrays that share the working set. Source: STREAM's triad."""
    b, c, a = (torch.ones(n_bytes // 12, device=device) for _ in range(3))
    return best_rate({"torch.add": lambda: torch.add(b, c, alpha=3.0, out=a)}, a.numel() * 12, stopwatch)


def gemm_rate(number_format: str, rows: int, side: int, stopwatch: Stopwatch, device: str = "cpu") -> Rate:
    """FLOP a second of a product [rows, side] × [side, side] in one format (fp32, bf16, fp16 or int8), best path."""
    kernels = (
        _int8_products(rows, side, device) if number_format == "int8" else _products(number_format, rows, side, device)
    )
    return best_rate(kernels, 2.0 * rows * side * side, stopwatch, tries=4)


def _products(number_format: str, rows: int, side: int, device: str) -> dict[str, Kernel]:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[number_format]
    x, weight = _normal(rows, side, device).to(dtype), _normal(side, side, device).to(dtype)
    return {"torch.nn.functional.linear": lambda: torch.nn.functional.linear(x, weight)}


def _int8_products(rows: int, side: int, device: str) -> dict[str, Kernel]:
    """Integer products: torch's own, and on the CPU the dynamically quantized linear of oneDNN, FBGEMM or QNNPACK."""
    x, weight = (_integers(n, side, device) for n in (rows, side))
    products: dict[str, Kernel] = {"torch._int_mm": lambda: torch._int_mm(x, weight.t())}
    engine = torch.backends.quantized.engine
    if device == "cpu" and engine != "none":
        with warnings.catch_warnings():  # of a removal in later versions: it is then passed over
            warnings.simplefilter("ignore", UserWarning)
            linear = torch.ao.nn.quantized.dynamic.Linear(side, side)
        activations = _normal(rows, side, device)
        products[f"dynamic quantized linear ({engine})"] = lambda: linear(activations)
    return products


def dequantize_rate(stopwatch: Stopwatch, dtype: torch.dtype, device: str = "cpu", side: int = 4096) -> Rate:
    """Weights a second turned from INT8 with one scale a row into `dtype`, as the naive path does it."""
    from flashstudy.compress import stores

    weight, scale = _integers(side, side, device), torch.rand(side, 1, device=device).to(dtype)
    return best_rate({"stores.scaled": lambda: stores.scaled(weight, scale, None, dtype)}, side * side, stopwatch)


def decompress_rate(stopwatch: Stopwatch, device: str = "cpu", side: int = 4096) -> Rate:
    """Weights a second unpacked from a bitmap with half of the INT8 values kept, by the fastest way built here."""
    from flashstudy.compress import sparse, stores

    weight = _integers(side, side, device)
    weight[torch.rand(side, side, device=device) < 0.5] = 0
    bitmap = sparse.to_bitmap(weight)
    ways = {way.__name__: way for way in (stores.gather_by_table, stores.scatter)}
    kernels = {name: partial(way, bitmap.bits, bitmap.values, side * side) for name, way in ways.items()}
    return best_rate(kernels, side * side, stopwatch, tries=4)


def _normal(rows: int, side: int, device: str) -> Tensor:
    """Values of a matrix's usual size: no denormals, no overflow in 16 bits."""
    return torch.from_numpy(np.random.default_rng(0).standard_normal((rows, side), dtype=np.float32)).to(device)


def _integers(rows: int, side: int, device: str) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(-127, 128, (rows, side), dtype=np.int8)).to(device)

"""The pair that the timing figures are about: bf16 linear against packed INT8, 4096², one row, streamed from memory."""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

SIDE = 4096
ROTATED_BYTES = 128 * 2**20  # four times a 32 MiB last-level cache


def standard_and_flash(seed: int = 0) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """bf16 linear and `_weight_int8pack_mm` on one row; each call uses the next of several weight copies."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, SIDE, generator=generator).bfloat16()
    scales = torch.rand(SIDE, generator=generator).bfloat16()
    n_bf16, n_int8 = ROTATED_BYTES // (SIDE * SIDE * 2), ROTATED_BYTES // (SIDE * SIDE)
    weights = itertools.cycle([torch.randn(SIDE, SIDE, generator=generator).bfloat16() for _ in range(n_bf16)])
    packed = [torch.randint(-127, 128, (SIDE, SIDE), dtype=torch.int8, generator=generator) for _ in range(n_int8)]
    packed_cycle = itertools.cycle(packed)
    return (
        lambda: torch.nn.functional.linear(x, next(weights)),
        lambda: torch._weight_int8pack_mm(x, next(packed_cycle), scales),
    )


@contextmanager
def busy_processes(n: int, longest_s: float = 600.0) -> Iterator[None]:
    """`n` processes that compute without a pause beside this one; ended on leaving, at the latest after `longest_s`."""
    loop = f"import time\nend = time.time() + {longest_s}\nwhile time.time() < end: pass"
    processes = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(n)]
    time.sleep(0.3 if n else 0.0)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def torch_benchmark_ratio(standard: Callable, flash: Callable, budget_s: float, n_threads: int) -> float:
    """The peer: flash over standard from two medians of torch.utils.benchmark, one after the other."""
    from torch.utils.benchmark import Timer

    medians = [
        Timer("f()", globals={"f": function}, num_threads=n_threads).blocked_autorange(min_run_time=budget_s).median
        for function in (standard, flash)
    ]
    return medians[1] / medians[0]

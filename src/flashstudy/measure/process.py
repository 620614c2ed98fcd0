"""The state of this process while something is timed: threads, garbage collection, denormals. Restored afterward."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


def usable_cpus() -> list[int]:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def default_threads() -> int:
    """The machine's choice for timed kernels (`host.choose_threads`), but not more than torch uses now."""
    import torch

    from . import host

    return max(1, min(torch.get_num_threads(), host.choose_threads(host.read())[0]))


def spare_core(n_threads: int) -> bool:
    """Whether so many threads leave a small machine the core that `host.choose_threads` would; one always does."""
    from . import host

    return n_threads == 1 or n_threads <= host.choose_threads(host.read())[0]


@contextmanager
def prepared(n_threads: int) -> Iterator[None]:
    """Torch on `n_threads`, no garbage collection, denormals flushed to zero in the calling thread; restored afterward.

    Denormal inputs make some CPUs a hundred times slower, which says nothing about a kernel. Worker threads that exist
    already keep their own setting: torch can change the calling thread's only.
    """
    import torch

    threads, collecting, flushing = torch.get_num_threads(), gc.isenabled(), _flushes_denormals()
    torch.set_num_threads(n_threads)
    torch.set_flush_denormal(True)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flushing)
        if collecting:
            gc.enable()


def _flushes_denormals() -> bool:
    """Whether the calling thread computes 1e-40 × 1 as 0 in fp32."""
    import torch

    return bool((torch.tensor([1e-40]) * 1.0).item() == 0.0)

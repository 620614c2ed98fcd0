"""Where the timed work runs: what must be waited for before the clock is read.

A CPU kernel is over when its call returns. On an accelerator the call only queues the work, so the clock is read after
waiting for it. Everything else in the timer is the same, so a backend is just a name and a way to wait.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Backend:
    """How to wait for queued work, and whether the calling threads do the work themselves."""

    name: str
    synchronize: Callable[[], None]
    runs_on_host: bool


def _return_at_once() -> None:
    """Nothing is queued on the host."""


HOST = Backend("cpu", _return_at_once, runs_on_host=True)


def accelerator() -> Backend:
    """CUDA, MPS or XPU, whichever torch calls the accelerator of this process. RuntimeError if there is none."""
    import torch

    device = torch.accelerator.current_accelerator()
    if device is None:
        raise RuntimeError("torch finds no accelerator on this machine")
    return Backend(device.type, torch.accelerator.synchronize, runs_on_host=False)


def for_results(results: list[Any]) -> Backend:
    """The accelerator if any tensor in `results` (nested as deep as four levels) lives on one, else the host.

    A function that returns no tensor is taken to run on the accelerator once this process has used one: waiting for an
    idle device costs microseconds, not waiting for a busy one falsifies the time.
    """
    import torch

    devices = {tensor.device.type for result in results for tensor in _tensors(result, depth=4)}
    silent = any(next(_tensors(result, depth=4), None) is None for result in results)
    if devices - {"cpu", "meta"} or (silent and torch.cuda.is_initialized()):
        return accelerator()
    return HOST


def _tensors(value: Any, depth: int) -> Iterator[Any]:
    """Tensors in nested lists, tuples and mappings."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item, depth - 1)

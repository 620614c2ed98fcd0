"""What compiling costs before it can gain: the first call of a compiled module, against a plain call of the same.

Every round compiles from nothing: torch's caches in memory are dropped and those on disk lie in a new folder, which is
what a first start on a machine finds. Later starts find the folder filled; that is another measurement.
"""

import functools

import torch
from torch import Tensor, nn

from . import stages

TOTALS = {"both calls": ("first call", "second call")}


def measure(
    decoder: nn.Module, ids: Tensor, *, n_rounds: int, n_threads: int | None = None, seed: int | None = None
) -> stages.StageRounds:
    """Rounds of "eager" and "compiled", each with a "first call" and a "second call" over ids [1, tokens].

    Raises whatever torch raises where it cannot compile: no C++ compiler, an operator that it does not know.
    """
    second = functools.partial(_call, ids)
    alternatives = {
        "eager": stages.Staged({"first call": lambda _: _call(ids, decoder), "second call": second}),
        "compiled": stages.Staged({"first call": lambda _: _compiled(ids, decoder), "second call": second}),
    }
    return stages.measure(alternatives, totals=TOTALS, n_rounds=n_rounds, n_threads=n_threads, seed=seed)


@torch.no_grad()
def _call(ids: Tensor, module: nn.Module) -> nn.Module:
    module(input_ids=ids, use_cache=False)
    return module


def _compiled(ids: Tensor, decoder: nn.Module) -> nn.Module:
    """The module compiled, after its first call."""
    from torch._inductor.utils import fresh_cache  # a new TORCHINDUCTOR_CACHE_DIR, and the caches in memory emptied

    torch.compiler.reset()
    with fresh_cache():
        return _call(ids, torch.compile(decoder))

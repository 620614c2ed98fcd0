"""Layers that come from memory: enough copies of one weight, used in turn, that none is still in the cache.

A real model reads every weight once per step, so when a layer's turn comes again the others have pushed it out of the
cache. One copy used again and again would sit in the last-level cache and look several times faster.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashstudy.compress.linear import CompressedLinear
from flashstudy.facts.models import ModelShape

CACHES_BEYOND = 4  # the copies together are at least this many last-level caches


def copies(layer: CompressedLinear, llc_bytes: int) -> list[CompressedLinear]:
    """The layer and as many copies that they together exceed four last-level caches; two at least."""
    n_copies = max(2, math.ceil(CACHES_BEYOND * llc_bytes / max(layer.read_bytes, 1)))
    return [layer, *(_copy(layer) for _ in range(n_copies - 1))]


def _copy(layer: CompressedLinear) -> CompressedLinear:
    # deepcopy knows no sparse tensor, but takes one that is already copied
    sparse = {id(buffer): buffer.clone() for buffer in layer.buffers() if buffer.layout != torch.strided}
    return copy.deepcopy(layer, memo=sparse)


def rotate(layers: Sequence[CompressedLinear], x: Tensor) -> Callable[[], Tensor]:
    """A call that multiplies x [rows, in] by the next layer, in x's dtype."""
    turn = itertools.cycle(layers)

    @torch.inference_mode()
    def multiply() -> Tensor:
        return next(turn)(x)

    return multiply


def unpack(layers: Sequence[CompressedLinear], dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    """A call that only unpacks the next layer's whole weight to `dtype`; ValueError for a product that never does."""
    if not all(hasattr(layer.product, "store") for layer in layers):
        raise ValueError(f"{layers[0].info.kernel} multiplies its weight packed and never unpacks all of it")
    turn = itertools.cycle([layer.product.store for layer in layers])

    @torch.inference_mode()
    def dequantize() -> Tensor:
        store = next(turn)
        return store.rows(0, store.out_features, dtype)

    return dequantize


def reads(layers: Sequence[CompressedLinear]) -> dict[str, Callable[[], object]]:
    """Plain readers of the next dense layer's bytes, by name: what the memory gives without any further work."""
    weights = [layer.product.weight.view(torch.float32) for layer in layers]
    vector = torch.ones(weights[0].shape[1])
    turns = [itertools.cycle(weights) for _ in range(2)]
    return {
        "read by sum": lambda: next(turns[0]).sum(),
        "read by matrix-vector product": lambda: torch.mv(next(turns[1]), vector),
    }


def plain_read(n_bytes: int, llc_bytes: int) -> Callable[[], Tensor]:
    """A call that reads the next `n_bytes` of a buffer beyond the cache and does no more with them than it must.

    With llc_bytes 0 it reads the same bytes again and again.
    """
    n_pieces = max(1, math.ceil(CACHES_BEYOND * llc_bytes / n_bytes))
    turn = itertools.cycle(torch.ones(n_pieces, max(1, n_bytes // 4)))  # written: pages nobody wrote all map to one
    return torch.inference_mode()(lambda: next(turn).sum())


def random_weight(shape: ModelShape, matrix: str, seed: int) -> Tensor:
    """A normal fp32 weight [out, in] of the size of one of a model's matrices, spread as trained ones are."""
    size = shape.layer_matrices[matrix]
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) / math.sqrt(size[1])

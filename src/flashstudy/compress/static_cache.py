"""Keys and values of a fixed capacity: one tensor a layer, written in place, so that a decode step allocates no cache.

Integer caches keep codes and scales and dequantize all tokens of a layer into one float buffer at each use, as
`kv_cache.IntegerCache` does; the values are the same.
"""

import torch
from torch import Tensor

from flashstudy.compress.kv_cache import BITS, dequantize_tokens, quantize_tokens


class StaticCache:
    """Keys and values [batch, n_heads, capacity, head_dim] of every layer, in `dtype` or as integers.

    Raises ValueError for a kv_format that is not built.
    """

    def __init__(
        self, n_layers: int, batch: int, n_heads: int, capacity: int, head_dim: int, dtype: torch.dtype, kv_format: str
    ):
        if kv_format != "none" and kv_format not in BITS:
            raise ValueError(f"kv_format {kv_format!r} is not one of 'none', {', '.join(map(repr, BITS))}")
        self.bits = BITS.get(kv_format, 0)
        self.capacity = capacity
        # written, not only reserved: pages that nobody wrote share one page of zeros and would be read from the cache
        blank = torch.ones(batch, n_heads, capacity, head_dim, dtype=dtype)
        stored = quantize_tokens(blank, self.bits) if self.bits else (blank,)
        self.layers = [[tuple(part.clone() for part in stored) for _ in ("keys", "values")] for _ in range(n_layers)]

    def put(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        """Writes new tokens [batch, n_heads, n, head_dim] from position `start` on."""
        stop = start + keys.shape[2]
        for stored, states in zip(self.layers[layer], (keys, values), strict=True):
            parts = quantize_tokens(states, self.bits) if self.bits else (states,)
            for target, part in zip(stored, parts, strict=True):
                target[:, :, start:stop] = part

    def get(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `stop` tokens as floats; of a float cache the stored ones themselves."""
        keys, values = (self._floats(stored, stop) for stored in self.layers[layer])
        return keys, values

    def _floats(self, stored: tuple[Tensor, ...], stop: int) -> Tensor:
        parts = [part[:, :, :stop] for part in stored]
        return dequantize_tokens(*parts, self.bits) if self.bits else parts[0]

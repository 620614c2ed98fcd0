"""How a stored weight is multiplied: x [rows, in] times the transposed weight, in x's dtype.

Every class here is one kernel path. All take at least one row; bias, shapes and empty inputs are the business of
`linear.CompressedLinear`. `read_bytes` is what a call must at least read: the stored tensors, once. What a path writes
and reads again (unpacked copies) is its own overhead and is not in it.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from flashstudy.compress.stores import buffer_bytes

TILE_BYTES = 1 << 20  # of floats in one tile, to stay inside a core's share of the second and third level cache
FEW_ROWS = 16  # up to here the packed int8 and int4 kernels beat tiles; they break even at 16 to 32 rows on AVX2


class Dense(nn.Module):
    """torch's dense product; `weight` is used as it is, not copied."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.register_buffer("weight", weight)

    @property
    def read_bytes(self) -> int:
        """Bytes of the weight."""
        return buffer_bytes(self)

    def forward(self, x: Tensor) -> Tensor:
        """Converts x to the weight's dtype and back where they differ."""
        return linear(x.to(self.weight.dtype), self.weight).to(x.dtype)


class Dequantize(nn.Module):
    """Unpacks the whole weight to x's dtype at every call, then multiplies: the naive path."""

    def __init__(self, store: nn.Module):
        super().__init__()
        self.store = store

    @property
    def read_bytes(self) -> int:
        """Bytes of the stored form."""
        return buffer_bytes(self)

    def forward(self, x: Tensor) -> Tensor:
        """One dequantized copy, one dense product."""
        return linear(x, self.store.rows(0, self.store.out_features, x.dtype))

    def stages(self, x: Tensor) -> list[tuple[str, Callable[..., Tensor]]]:
        """What `forward` does, step by step: (name, call), each but the first taking the result of the one before."""
        store, n_out = self.store, self.store.out_features
        multiply = ("multiply", lambda weight: linear(x, weight))
        if hasattr(store, "unpacked"):
            widen = ("dequantize", lambda codes: store.widened(codes, x.dtype))
            return [("decompress", store.unpacked), widen, multiply]
        return [("dequantize", lambda: store.rows(0, n_out, x.dtype)), multiply]


class Tiled(nn.Module):
    """Dequantizes a tile of rows that fits the cache, multiplies it, and goes on: no large copy is ever written."""

    def __init__(self, store: nn.Module):
        super().__init__()
        self.store = store
        self.scale_after = getattr(store, "scales_rows", False)

    @property
    def read_bytes(self) -> int:
        """Bytes of the stored form."""
        return buffer_bytes(self)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, out], filled tile by tile."""
        n_out, n_in = self.store.out_features, self.store.in_features
        n_tile = max(1, TILE_BYTES // (max(n_in, 1) * x.element_size()))
        result = x.new_empty(x.shape[0], n_out)
        for start in range(0, n_out, n_tile):
            stop = min(start + n_tile, n_out)
            tile = (
                self.store.values[start:stop].to(x.dtype) if self.scale_after else self.store.rows(start, stop, x.dtype)
            )
            result[:, start:stop] = linear(x, tile)
        return result.mul_(self.store.scale[:, 0].to(x.dtype)) if self.scale_after else result


class ByRows(nn.Module):
    """One product for few rows (decode), another for many (prefill), over the same stored weight."""

    def __init__(self, few: nn.Module, many: nn.Module, few_rows: int = FEW_ROWS):
        super().__init__()
        self.few, self.many, self.few_rows = few, many, few_rows

    @property
    def read_bytes(self) -> int:
        """Bytes that the product for few rows reads."""
        return self.few.read_bytes

    def forward(self, x: Tensor) -> Tensor:
        """Up to `few_rows` rows by the first, more by the second."""
        return self.few(x) if x.shape[0] <= self.few_rows else self.many(x)


class SparseRows(nn.Module):
    """torch's CSR or BSR product in fp32."""

    def __init__(self, matrix: Tensor):
        super().__init__()
        self.register_buffer("matrix", matrix)

    @property
    def read_bytes(self) -> int:
        """Bytes of values, columns and row pointers."""
        parts = (self.matrix.values(), self.matrix.col_indices(), self.matrix.crow_indices())
        return sum(part.numel() * part.element_size() for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        """The sparse matrix on the left of the transposed activations."""
        return (self.matrix @ x.float().T).T.to(x.dtype)


class SemiStructured(nn.Module):
    """torch's 2:4 product on an accelerator: half of the values and two bits for each are read."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.register_buffer("weight", torch.sparse.to_sparse_semi_structured(weight))

    @property
    def read_bytes(self) -> int:
        """Bytes of the kept values and their places."""
        packed = self.weight.packed
        return packed.numel() * packed.element_size()

    def forward(self, x: Tensor) -> Tensor:
        """Converts x to the weight's dtype and back where they differ."""
        return linear(x.to(self.weight.dtype), self.weight).to(x.dtype)


class Structured(nn.Module):
    """A smaller dense product: rows and columns of zeros are left out, what they would give is zeros."""

    def __init__(self, weight: Tensor):
        super().__init__()
        kept = weight != 0
        rows, columns = kept.any(dim=1).nonzero().flatten(), kept.any(dim=0).nonzero().flatten()
        self.out_features, self.all_columns = weight.shape[0], len(columns) == weight.shape[1]
        self.register_buffer("kept_rows", rows)
        self.register_buffer("kept_columns", columns)
        self.register_buffer("weight", weight[rows][:, columns].contiguous())

    @property
    def read_bytes(self) -> int:
        """Bytes of the smaller weight; the index of a kept row or column is 8 bytes for thousands of weights."""
        return self.weight.numel() * self.weight.element_size()

    def forward(self, x: Tensor) -> Tensor:
        """The columns that count, multiplied, and the result spread over the rows that count."""
        kept_x = x if self.all_columns else x.index_select(1, self.kept_columns)
        result = linear(kept_x.to(self.weight.dtype), self.weight).to(x.dtype)
        if len(self.kept_rows) == self.out_features:
            return result
        return x.new_zeros(x.shape[0], self.out_features).index_copy_(1, self.kept_rows, result)

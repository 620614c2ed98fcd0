"""Weights as they lie in memory, each able to give back any of its rows as floats.

A store holds tensors as buffers and answers `rows(start, stop, dtype)`: the dequantized rows, scales applied. What is
done with them (all at once, or tile by tile inside the cache) is the business of `products`.
"""

import functools

import torch
from torch import Tensor, nn

from flashstudy.compress.quantize import QuantizedWeight
from flashstudy.compress.sparse import Bitmap, to_bitmap, unpack_bits

PIECE_BYTES = 1 << 15  # of a bitmap at once: 256k weights, 1 MiB of places


def buffer_bytes(module: nn.Module) -> int:
    """Bytes of all tensors the module keeps."""
    return sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())


def scaled(codes: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(codes - zero_point) · scale for codes [rows, in] and scales [rows or 1, n_groups], computed in `dtype`.

    In place after the conversion: a second temporary of this size is faulted in page by page, up to 30 times slower.
    """
    n_rows, n_groups = codes.shape[0], scale.shape[1]
    groups = codes.reshape(n_rows, n_groups, codes.shape[1] // n_groups).to(dtype, copy=True)
    if zero_point is not None:
        groups.sub_(zero_point[..., None].to(dtype))
    return groups.mul_(scale[..., None].to(dtype)).reshape(codes.shape)


def part_of(per_row: Tensor | None, start: int, stop: int) -> Tensor | None:
    """Rows start … stop of a per-row tensor; one that all rows share (per-tensor scales), or None, as it is."""
    return per_row if per_row is None or per_row.shape[0] == 1 else per_row[start:stop]


class Int8Store(nn.Module):
    """One int8 code a weight, row by row: what packed int8 kernels read as well."""

    def __init__(self, quantized: QuantizedWeight):
        super().__init__()
        self.out_features, self.in_features = quantized.values.shape
        self.register_buffer("values", quantized.values)
        self.register_buffer("scale", quantized.scale)
        self.register_buffer("zero_point", quantized.zero_point)

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Dequantized rows [stop - start, in]."""
        scale, zero_point = part_of(self.scale, start, stop), part_of(self.zero_point, start, stop)
        return scaled(self.values[start:stop], scale, zero_point, dtype)


class Int4Store(nn.Module):
    """Two codes a byte, the earlier weight in the low half; codes are shifted by 8 to be 0 … 15."""

    def __init__(self, quantized: QuantizedWeight):
        super().__init__()
        self.out_features, self.in_features = quantized.values.shape
        if self.in_features % 2:
            raise ValueError(f"int4 packs two weights a byte: in_features {self.in_features} is odd")
        halves = (quantized.values + 8).to(torch.uint8).reshape(self.out_features, -1, 2)
        self.register_buffer("packed", halves[..., 0] | (halves[..., 1] << 4))
        self.register_buffer("scale", quantized.scale)
        self.register_buffer("zero_point", quantized.zero_point)

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Dequantized rows [stop - start, in]."""
        packed = self.packed[start:stop]
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(stop - start, self.in_features)
        scale, zero_point = part_of(self.scale, start, stop), part_of(self.zero_point, start, stop)
        return scaled(codes.to(torch.int8) - 8, scale, zero_point, dtype)


class BitmapStore(nn.Module):
    """One bit a weight, the kept values packed, and scales when the values are codes.

    by_table False: bits unpacked by shifts, values put in place by `masked_scatter`, the plain way to write it. True:
    a table gives for each byte of the bitmap which of its values stands where, which is two to three times as fast.
    """

    def __init__(self, bitmap: Bitmap, scale: Tensor | None, *, by_table: bool):
        super().__init__()
        self.out_features, self.in_features = bitmap.shape
        self.register_buffer("bits", bitmap.bits)
        self.register_buffer("values", bitmap.values)
        self.register_buffer("scale", scale)
        self.by_table = by_table

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """All rows; a part cannot be found without counting the bits before it."""
        if (start, stop) != (0, self.out_features):
            raise ValueError(f"a bitmap gives all {self.out_features} rows, not {start} … {stop}")
        n = self.out_features * self.in_features
        flat = gather_by_table(self.bits, self.values, n) if self.by_table else scatter(self.bits, self.values, n)
        dense = flat.reshape(self.out_features, self.in_features)
        return dense.to(dtype) if self.scale is None else scaled(dense, self.scale, None, dtype)


def bitmap_store(weight: Tensor | QuantizedWeight, *, by_table: bool) -> BitmapStore:
    """The store of a float weight, or of symmetric codes (whose zeros are the pruned and the rounded-away weights)."""
    if isinstance(weight, Tensor):
        return BitmapStore(to_bitmap(weight), None, by_table=by_table)
    if weight.zero_point is not None:
        raise ValueError("a bitmap drops zeros: asymmetric codes have theirs at the zero point")
    return BitmapStore(to_bitmap(weight.values), weight.scale, by_table=by_table)


def scatter(bits: Tensor, values: Tensor, n: int) -> Tensor:
    """The n weights: zeros with the values put where a bit stands."""
    return values.new_zeros(n).masked_scatter_(unpack_bits(bits, n), values)


def gather_by_table(bits: Tensor, values: Tensor, n: int) -> Tensor:
    """The n weights: each byte of the bitmap looks up which of its values stands at which of its eight places.

    Done in pieces, so that places (four bytes a weight) stay in the cache instead of being written out and faulted in.
    """
    masks, ranks, counts = (table.to(bits.device) for table in _byte_tables())
    byte_codes = bits.int()
    per_byte = counts.index_select(0, byte_codes)
    first = torch.cumsum(per_byte, 0, dtype=torch.int32).sub_(per_byte)  # values before each byte's own
    padded = torch.cat([values, values.new_zeros(1)])  # the place after the last, which closing zero bits point to
    dense = values.new_empty(8 * len(bits))
    for start in range(0, len(bits), PIECE_BYTES):
        piece = slice(start, start + PIECE_BYTES)
        place = ranks.index_select(0, byte_codes[piece]).add_(first[piece, None]).flatten()
        part = torch.index_select(padded, 0, place, out=dense[8 * start : 8 * (start + PIECE_BYTES)])
        part.mul_(masks.index_select(0, byte_codes[piece]).view(torch.bool))
    return dense[:n]


@functools.cache
def _byte_tables() -> tuple[Tensor, Tensor, Tensor]:
    """For each of 256 bytes: its bits as the 8 bytes of an int64, the set bits before each place, all set bits."""
    shifts = torch.arange(8, dtype=torch.uint8)
    places = (torch.arange(256, dtype=torch.uint8)[:, None] >> shifts) & 1
    ranks = torch.cumsum(places, dim=1, dtype=torch.int32) - places.int()  # set bits before the place
    return places.contiguous().view(torch.int64).flatten(), ranks, places.sum(dim=1, dtype=torch.int32)

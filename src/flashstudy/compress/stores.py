"""Weights as they lie in memory, each able to give back any of its rows as floats.

A store holds tensors as buffers and answers `rows(start, stop, dtype)`: the dequantized rows, scales applied. What is
done with them (all at once, or tile by tile inside the cache) is the business of `products`.
"""

import functools

import torch
from torch import Tensor, nn

from flashstudy.compress.quantize import QuantizedWeight
from flashstudy.compress.sparse import Bitmap, to_bitmap, unpack_bits

INT4_SHIFT = 8  # added to signed 4-bit codes, so that half a byte holds them
INT4_LEVELS = tuple(range(-INT4_SHIFT, 16 - INT4_SHIFT))
PIECE_BYTES = 1 << 15  # of a bitmap at once: 256k weights, 1 MiB of places


def buffer_bytes(module: nn.Module) -> int:
    """Bytes of all tensors the module keeps."""
    return sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())


def scaled(codes: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(codes - zero_point) · scale for codes [rows, in] and scales [rows or 1, n_groups], computed in `dtype`.

    In place after the conversion: a second temporary of this size is faulted in page by page, up to 30 times slower.
    """
    return scale_in_place(codes.to(dtype, copy=True), scale, zero_point)


def scale_in_place(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """The float `codes` [rows, in] themselves, turned into (codes - zero_point) · scale."""
    n_rows, n_groups = codes.shape[0], scale.shape[1]
    groups = codes.view(n_rows, n_groups, codes.shape[1] // n_groups)
    if zero_point is not None:
        groups.sub_(zero_point[..., None].to(codes.dtype))
    groups.mul_(scale[..., None].to(codes.dtype))
    return codes


def in_pairs(codes: Tensor) -> Tensor:
    """Codes 0 … 15 [..., 2 n], two a byte [..., n], the earlier in the low half."""
    halves = codes.unflatten(-1, (-1, 2))
    return halves[..., 0] | (halves[..., 1] << 4)


def out_of_pairs(packed: Tensor) -> Tensor:
    """The codes 0 … 15 of bytes [..., n]: [..., 2 n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pairs_by_table(packed: Tensor, levels: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """Bytes [rows, n] as the two levels each names, low half first: [rows, 2 n] of `dtype`, one look-up a byte."""
    places = pair_table(levels, dtype).to(packed.device).index_select(0, packed.flatten().int())
    return places.view(dtype).view(packed.shape[0], -1)


@functools.cache
def pair_table(levels: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """For each of 256 bytes the levels of its low and its high half, as one integer of their joint width [256]."""
    wide = torch.tensor(levels, dtype=dtype)
    pairs = torch.stack((wide.repeat(16), wide.repeat_interleave(16)), dim=-1)
    return pairs.view(torch.int64 if dtype == torch.float32 else torch.int32).flatten()


def part_of(per_row: Tensor | None, start: int, stop: int) -> Tensor | None:
    """Rows start … stop of a per-row tensor; one that all rows share (per-tensor scales), or None, as it is."""
    return per_row if per_row is None or per_row.shape[0] == 1 else per_row[start:stop]


class ByteStore(nn.Module):
    """One byte a weight, row by row: int8 codes, which packed int8 kernels read as well, or FP8 values."""

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

    @property
    def scales_rows(self) -> bool:
        """Is there one scale a row (or one for all) and no zero point, so that it can wait until after the product?"""
        return self.scale.shape[1] == 1 and self.zero_point is None


class NibbleStore(nn.Module):
    """Two codes a byte, the earlier weight in the low half; integer codes are shifted by 8 to be 0 … 15.

    Each byte looks its two weights up in a table, as integers (int4) or as levels (nf4).
    """

    def __init__(self, quantized: QuantizedWeight):
        super().__init__()
        self.out_features, self.in_features = quantized.values.shape
        if self.in_features % 2:
            raise ValueError(f"two weights share a byte: in_features {self.in_features} is odd")
        codes = quantized.values + INT4_SHIFT if quantized.levels is None else quantized.values
        self.register_buffer("packed", in_pairs(codes.to(torch.uint8)))
        self.register_buffer("scale", quantized.scale)
        self.register_buffer("zero_point", quantized.zero_point)
        self.levels = INT4_LEVELS if quantized.levels is None else tuple(quantized.levels.tolist())

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Dequantized rows [stop - start, in]."""
        codes = pairs_by_table(self.packed[start:stop], self.levels, dtype)
        scale, zero_point = part_of(self.scale, start, stop), part_of(self.zero_point, start, stop)
        return scale_in_place(codes, scale, zero_point)


class MaskedStore(nn.Module):
    """A dense weight and one byte a weight that says whether it counts, as pruning utilities leave them."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight)
        self.register_buffer("mask", weight != 0)

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Masked rows [stop - start, in]."""
        return (self.weight[start:stop] * self.mask[start:stop]).to(dtype)


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
        return self.widened(self.unpacked(), dtype)

    def unpacked(self) -> Tensor:
        """All values among their zeros, as stored [out, in]."""
        n = self.out_features * self.in_features
        flat = gather_by_table(self.bits, self.values, n) if self.by_table else scatter(self.bits, self.values, n)
        return flat.reshape(self.out_features, self.in_features)

    def widened(self, dense: Tensor, dtype: torch.dtype) -> Tensor:
        """The unpacked values as floats, scaled where they are codes."""
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

"""Storage of sparse weights, byte for byte: a bitmap with packed values, CSR, BSR, and what each of them costs.

Unstructured zeros save bytes only when the index is cheaper than what was dropped: a bitmap costs 1 bit a weight
whatever the density, CSR 32 bits a kept weight, BSR 32 bits a kept block but stores the zeros inside it.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashstudy.compress.prune import as_blocks

FORMATS = ("dense", "masked", "bitmap", "csr", "bsr", "n_m", "structured")


@dataclass(frozen=True, eq=False)
class Bitmap:
    """One bit a weight and the kept values, both row by row; the least significant bit first, padded to whole bytes."""

    bits: Tensor  # uint8 [ceil(out · in / 8)]
    values: Tensor  # [n_kept], dtype of the weight
    shape: tuple[int, int]


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of one stored weight by what they hold."""

    value_bytes: int
    index_bytes: int
    scale_bytes: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.value_bytes + self.index_bytes + self.scale_bytes


def to_bitmap(weight: Tensor) -> Bitmap:
    """The weight's non-zero values packed, and a bit for each place that says whether one stands there."""
    kept = (weight != 0).flatten()
    bits = torch.from_numpy(np.packbits(kept.cpu().numpy(), bitorder="little")).to(weight.device)
    return Bitmap(bits, weight.flatten()[kept], tuple(weight.shape))


def unpack_bits(bits: Tensor, n: int) -> Tensor:
    """The first n bits (least significant first) as booleans [n]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).flatten()[:n].to(torch.bool)


def to_csr(weight: Tensor) -> Tensor:
    """Compressed sparse rows with int32 indices, the fastest that torch's CPU product takes."""
    with _quiet_beta():
        csr = weight.to_sparse_csr()
        return torch.sparse_csr_tensor(csr.crow_indices().int(), csr.col_indices().int(), csr.values(), csr.shape)


def to_bsr(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """Block sparse rows (rows, cols) with int32 indices; a block is stored when one of its weights is not zero."""
    as_blocks(weight, block)
    with _quiet_beta():
        bsr = weight.to_sparse_bsr(block)
        return torch.sparse_bsr_tensor(bsr.crow_indices().int(), bsr.col_indices().int(), bsr.values(), bsr.shape)


@contextlib.contextmanager
def _quiet_beta() -> Iterator[None]:
    # torch says once per process that CSR is in beta and that the invariants are not checked
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR|BSR) tensor support is in beta|Sparse invariant checks")
        yield


def block_occupancy(mask: Tensor, block: tuple[int, int]) -> float:
    """Share of the blocks of mask [out, in] that keep at least one weight.

    Law for random masks of density d: 1 - (1 - d)^(rows · cols).
    """
    return as_blocks(mask, block).any(dim=3).any(dim=1).float().mean().item()


def stored_bytes(
    sparse_format: str,
    mask: Tensor,
    *,
    value_bytes: float,
    block: tuple[int, int] | None = None,
    index_bytes: int = 4,
    scale_bytes: int = 0,
) -> StoredBytes:
    """Bytes of a weight with this mask (or of a weight whose non-zeros are kept) in one format.

    value_bytes: bytes of one value, 0.5 for int4. index_bytes: width of CSR and BSR indices. scale_bytes: all scales
    together. "n_m" is 2:4: half of the values and 2 bits for each; "masked" keeps all of them and a byte for each;
    "structured" leaves whole rows and columns out. Nothing else (headers, alignment) is counted.
    """
    n_stored, n_index_bytes = _stored_and_index(sparse_format, mask, block, index_bytes)
    return StoredBytes(math.ceil(n_stored * value_bytes), n_index_bytes, scale_bytes)


def _stored_and_index(sparse_format: str, mask: Tensor, block: tuple[int, int] | None, width: int) -> tuple[int, int]:
    if sparse_format == "dense":  # whatever is kept: no need to look
        return mask.numel(), 0
    rows, kept = mask.shape[0], mask if mask.dtype == torch.bool else mask != 0
    n_kept = int(kept.sum())
    match sparse_format:
        case "bitmap":
            return n_kept, -(-kept.numel() // 8)
        case "csr":
            return n_kept, width * (n_kept + rows + 1)
        case "bsr":
            if block is None:
                raise ValueError("sparse_format 'bsr' needs a block (rows, cols)")
            n_blocks = int(as_blocks(kept, block).any(dim=3).any(dim=1).sum())
            return n_blocks * block[0] * block[1], width * (n_blocks + rows // block[0] + 1)
        case "masked":
            return kept.numel(), kept.numel()
        case "structured":
            n_rows, n_columns = int(kept.any(dim=1).sum()), int(kept.any(dim=0).sum())
            return n_rows * n_columns, width * (n_rows + n_columns)
        case "n_m":
            n_half = kept.numel() // 2
            return n_half, -(-n_half * 2 // 8)
    raise ValueError(f"sparse_format {sparse_format!r} is not one of {', '.join(FORMATS)}")

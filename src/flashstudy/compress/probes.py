"""Inputs on which kernels are tried, and how far a kernel's product is from the exact one.

Weights are normal with the spread of trained projections. Activations are unkind in the two ways that real ones are:
one channel is much larger than the others in every row, and the first row is larger as a whole and has a spike, as the
first token of a text has. A kernel that shares one scale among all rows fails on exactly these.
"""

import torch
from torch import Tensor, nn

from flashstudy.compress.kernel_table import FLOAT_DTYPES, WeightLayout
from flashstudy.compress.linear import CompressedLinear, encode
from flashstudy.compress.prune import block_mask, channel_mask, magnitude_mask, n_m_mask

WEIGHT_STD = 0.02  # of a trained projection
OUTLIER, SPIKE = 30.0, 500.0  # times a normal activation: the outlier channel; the first token's massive activation
PROBE_ROWS = (1, 32)  # decode and a small prefill: kernels that switch by rows are asked on both sides

# Largest relative error of the worst row that a kernel may add. int8 and int4 (groups of 64): what rounding a normal
# row of weights costs, step / sqrt(12) with 4.2 and 2.5 standard deviations at the top code; fp8: 3 bits of mantissa,
# 2^-4 / sqrt(6); nf4 in groups of 64: 0.09. Float: a few roundings.
ERROR_BOUNDS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2, "int8": 1e-2, "fp8": 2.5e-2, "int4": 1e-1, "nf4": 9e-2}
INT8_ACTIVATION_BOUND = 0.15  # where a recipe asks for int8 activations: 7 bits beside the outlier channel cost 0.09


def random_weight(out_features: int, in_features: int, layout: WeightLayout, sparsity: float, seed: int) -> Tensor:
    """A float weight [out, in] pruned by magnitude to a share of zeros, in the pattern that the layout stores."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator) * WEIGHT_STD
    if not sparsity:
        return weight
    match layout.sparse_format:
        case "bsr":
            return weight * block_mask(weight, sparsity, layout.block)
        case "structured":
            return weight * channel_mask(weight, sparsity)
        case "n_m":
            return weight * n_m_mask(weight, 2, 4)
    return weight * magnitude_mask(weight, sparsity)


def activations(rows: int, in_features: int, seed: int) -> Tensor:
    """fp32 activations [rows, in] with an outlier channel; with more than one row the first is a first token's."""
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(rows, in_features, generator=generator)
    x[:, in_features // 3] *= OUTLIER
    if rows > 1:
        x[0] *= OUTLIER
        x[0, in_features // 2] = SPIKE * OUTLIER
    return x


def exact_weight(layer: CompressedLinear, weight: Tensor, layout: WeightLayout) -> Tensor:
    """The float64 weight that the layer's stored form stands for: the kernel's error is measured against this one."""
    library_weight = getattr(getattr(layer.product, "linear", None), "weight", None)
    if library_weight is not None:  # torchao rounds by its own rule
        return library_weight.dequantize().double()
    if layout.weight_format in FLOAT_DTYPES:
        return weight.to(FLOAT_DTYPES[layout.weight_format]).double()
    return encode(weight, layout).dequantize().double()


def relative_error(layer: nn.Module, exact: Tensor, dtype: torch.dtype, seed: int = 0) -> float:
    """Largest over the rows of |y - x Wᵀ| / |x Wᵀ| for x in `dtype`, against the product in float64."""
    errors = []
    for rows in PROBE_ROWS:
        x = activations(rows, exact.shape[1], seed).to(dtype)
        reference = x.double() @ exact.T
        difference = layer(x).double() - reference
        errors.append((difference.norm(dim=1) / reference.norm(dim=1).clamp(min=1e-300)).max().item())
    return max(errors)


def error_bound(weight_format: str, activation_format: str = "", dtype: torch.dtype = torch.float32) -> float:
    """The largest acceptable `relative_error` for a format multiplied with activations of `dtype`, rounded or not."""
    if activation_format == "int8":
        return INT8_ACTIVATION_BOUND
    by_dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return max(ERROR_BOUNDS[weight_format], ERROR_BOUNDS[by_dtype])

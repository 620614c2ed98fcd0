"""Weights rounded to a short list of floats instead of integers: NF4 and FP8.

NF4 has 16 levels where a normal distribution has its quantiles, FP8 (E4M3) 253 finite ones that lie closer together
near zero. Both are scaled so that the largest weight of a group meets the largest level, and are symmetric.
"""

import torch
from torch import Tensor

from flashstudy.compress.quantize import QuantizedWeight, check_groups, check_matrix, in_groups, safe_scale

FORMATS = ("nf4", "fp8")
FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
# Source: Dettmers et al., QLoRA (2023), appendix E.
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def encode(weight: Tensor, weight_format: str, *, granularity: str = "channel", group_size: int = 0) -> QuantizedWeight:
    """Codes of a weight [out, in] in "nf4" or "fp8", rounded to the nearest level; an all-zero group stays zero.

    Raises ValueError for another format, a group that does not divide the row, a weight that is not a finite matrix.
    """
    check_matrix(weight)
    check_groups(granularity, group_size, weight.shape[1])
    groups = in_groups(weight.detach().float(), granularity, group_size)
    largest = groups.abs().amax(dim=-1) if groups.numel() else groups.new_zeros(groups.shape[:2])
    match weight_format:
        case "fp8":
            scale = safe_scale(largest / FP8_LARGEST)
            values, levels, bits = (groups / scale[..., None]).to(torch.float8_e4m3fn), None, 8
        case "nf4":
            scale = safe_scale(largest)
            levels, bits = torch.tensor(NF4_LEVELS, device=weight.device), 4
            halfway = (levels[1:] + levels[:-1]) / 2
            values = torch.bucketize(groups / scale[..., None], halfway, out_int32=True).to(torch.int8)
        case _:
            raise ValueError(f"weight_format {weight_format!r} is not one of {', '.join(FORMATS)}")
    return QuantizedWeight(values.reshape(weight.shape), scale, None, bits, granularity, group_size, levels)

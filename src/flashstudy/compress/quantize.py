"""Round-to-nearest integer quantization of weights: the textbook form that packed kernels and weight files use.

Symmetric: levels -q_max … q_max with q_max = 2^(bits-1) - 1 and scale = absmax / q_max; the lowest code (-128 at
8 bits) is never used, so that negation is exact and products cannot saturate. Asymmetric: all 2^bits levels between
the group's minimum and maximum, both widened to include zero, with an integer zero point, so that zero stays exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MIN_BITS, MAX_BITS = 2, 8
SCALE_BYTES = 2  # a scale or zero point kept in 16 bits, as in facts.recipes; the arithmetic here uses fp32 scales
GRANULARITIES = ("tensor", "channel", "group")


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """Codes of a weight [out, in] and how to read them: weight ≈ (values - zero_point) · scale.

    scale and zero_point: [out, n_groups] with n_groups = 1 for per-channel, [1, 1] for per-tensor. zero_point None =
    symmetric. Asymmetric codes are shifted to be centered on zero, so that 8 bits fit int8. With `levels` a code is
    a place in that table: weight ≈ levels[values] · scale.
    """

    values: Tensor  # int8 [out, in]; float8_e4m3fn for fp8
    scale: Tensor  # fp32 [out, n_groups]
    zero_point: Tensor | None  # int8 [out, n_groups]
    bits: int
    granularity: str
    group_size: int
    levels: Tensor | None = None  # fp32 [2^bits]

    @property
    def stored_bytes(self) -> int:
        """Bytes on disk: codes packed to `bits` each, plus 2 bytes for every scale and every zero point."""
        n_parameters = self.scale.numel() + (0 if self.zero_point is None else self.zero_point.numel())
        return -(-self.values.numel() * self.bits // 8) + n_parameters * SCALE_BYTES

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over weights, scales and zero points included."""
        return self.stored_bytes * 8 / max(self.values.numel(), 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] these codes stand for, computed in fp32 and rounded once to `dtype`."""
        codes = self.values if self.levels is None else self.levels[self.values.int()]
        return _reconstruct(codes, self.scale, self.zero_point).to(dtype)


def quantize(
    weight: Tensor, *, bits: int, granularity: str = "channel", group_size: int = 0, symmetric: bool = True
) -> QuantizedWeight:
    """Codes and scales of a weight [out, in], rounded to nearest (ties to even); the weight is left as it is.

    An all-zero group keeps scale 1 and comes back as exact zeros. Raises ValueError for bits outside 2…8, a group that
    does not divide the row, a weight that is not a finite matrix.
    """
    check_matrix(weight)
    _check_bits(bits)
    check_groups(granularity, group_size, weight.shape[1])
    groups = in_groups(weight.detach().float(), granularity, group_size)  # [rows, n_groups, size]
    low, high = (torch.clamp(x, max=0) if i == 0 else torch.clamp(x, min=0) for i, x in enumerate(_aminmax(groups)))
    if symmetric:
        q_max = 2 ** (bits - 1) - 1
        scale, zero_point = safe_scale(torch.maximum(high, -low) / q_max), None
        codes = (groups / scale[..., None]).round().clamp(-q_max, q_max)
    else:
        code_min, code_max = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        scale = safe_scale((high - low) / (code_max - code_min))
        zero_point = (code_min - low / scale).round().clamp(code_min, code_max)
        codes = ((groups / scale[..., None]).round() + zero_point[..., None]).clamp(code_min, code_max)
    zero_codes = None if zero_point is None else zero_point.to(torch.int8)
    return QuantizedWeight(codes.to(torch.int8).reshape(weight.shape), scale, zero_codes, bits, granularity, group_size)


def fake_quantize(
    weight: Tensor, *, bits: int, granularity: str = "channel", group_size: int = 0, symmetric: bool = True
) -> Tensor:
    """The weight after rounding to integers and back, in its own dtype. Same errors as `quantize`."""
    rounded = quantize(weight, bits=bits, granularity=granularity, group_size=group_size, symmetric=symmetric)
    return rounded.dequantize(weight.dtype)


def sqnr_db(reference: Tensor, approx: Tensor) -> float:
    """Signal-to-quantization-noise ratio, 20 log10(|x| / |x - x̂|), in dB.

    Equal shapes, any rank; computed in float64. Exact equality gives inf.
    Raises ValueError if `reference` is all zero or the shapes differ. Source: torchao `compute_error`, same form.
    """
    if reference.shape != approx.shape:
        raise ValueError(f"SQNR needs equal shapes, got {tuple(reference.shape)} and {tuple(approx.shape)}")
    signal = torch.linalg.vector_norm(reference.double())
    if signal == 0:
        raise ValueError("SQNR is undefined for an all-zero reference")
    noise = torch.linalg.vector_norm(reference.double() - approx.double())
    return (20 * torch.log10(signal / noise)).item()


def group_sizes(in_features: int, at_most: int = 256) -> list[int]:
    """The powers of two from `at_most` down to 32 that divide a row, else those down to 2."""
    fitting = [size for size in (256, 128, 64, 32, 16, 8, 4, 2) if size <= at_most and in_features % size == 0]
    return [size for size in fitting if size >= 32] or fitting


def check_matrix(weight: Tensor) -> None:
    """Raise ValueError unless `weight` is a finite floating-point matrix."""
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"a weight is a float matrix [out, in], got {weight.dtype} {list(weight.shape)}")
    if weight.numel() and not all(value.isfinite() for value in weight.detach().aminmax()):
        raise ValueError(f"weight {list(weight.shape)} holds NaN or infinity and has no scale")


def _check_bits(bits: int) -> None:
    if not isinstance(bits, int) or not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"bits {bits!r} is not an integer from {MIN_BITS} to {MAX_BITS}")


def check_groups(granularity: str, group_size: int, in_features: int) -> None:
    """Raise ValueError for an unknown granularity, or a group size that does not go with it or with the row."""
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity {granularity!r} is not one of {', '.join(GRANULARITIES)}")
    if granularity != "group":
        if group_size:
            raise ValueError(f"group_size {group_size} needs granularity 'group', not {granularity!r}")
        return
    if group_size < 1 or in_features % group_size:
        fitting = " or ".join(map(str, group_sizes(in_features))) or "no usual size"
        raise ValueError(
            f"group_size {group_size} does not divide {in_features} in_features; {in_features} takes {fitting}"
        )


def in_groups(weight: Tensor, granularity: str, group_size: int) -> Tensor:
    """The weight [out, in] seen as [rows, n_groups, size], one scale a group; [1, 1, out · in] for a whole tensor."""
    if granularity == "tensor":
        return weight.reshape(1, 1, -1)
    rows, columns = weight.shape
    size = group_size if granularity == "group" else columns
    return weight.reshape(rows, columns // size if size else 1, size)


def _aminmax(groups: Tensor) -> tuple[Tensor, Tensor]:
    if not groups.numel():
        return groups.new_zeros(groups.shape[:2]), groups.new_zeros(groups.shape[:2])
    return groups.amin(dim=-1), groups.amax(dim=-1)


def safe_scale(scale: Tensor) -> Tensor:
    """The scale, 1 where it is too small to divide by."""
    # below the smallest normal number division loses all precision; such a group is zero for every purpose
    return torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)


def _reconstruct(values: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    if not values.numel():
        return values.float()
    rows, n_groups = scale.shape
    codes = values.reshape(rows, n_groups, -1).to(torch.float32, copy=True)
    if zero_point is not None:
        codes.sub_(zero_point[..., None].float())
    return codes.mul_(scale[..., None]).reshape(values.shape)

"""The low-bit kernels that torch and torchao bring along, one class each, with what they need and where they err.

Weight-only kernels (`Int8Pack`, `Int4Pack`) read codes and convert them in registers; activations are bf16, the one
type whose code is vectorized on every CPU (fp32 activations run a scalar loop, 20 times slower). Kernels with int8
activations (`DynamicInt8`, `IntMm`) round the activations too, so they belong to recipes that say so.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from flashstudy.compress.quantize import QuantizedWeight
from flashstudy.compress.quiet import quiet_import
from flashstudy.compress.stores import ByteStore

INT4_GROUPS = (32, 64, 128, 256)  # what _weight_int4pack_mm_for_cpu takes
INT4_ROWS = 16  # rows of the weight that _convert_weight_to_int4pack_for_cpu packs together
ENGINES = {"dynamic_int8": ("fbgemm", "qnnpack"), "dynamic_int8_onednn": ("onednn",)}  # the first that torch has
INT8_COLUMNS = 16  # _weight_int8pack_mm reads whole vectors: other widths read past the end of the row and crash


class Int8Pack(nn.Module):
    """`torch._weight_int8pack_mm` over a plain int8 store, one scale a row."""

    def __init__(self, store: ByteStore):
        super().__init__()
        if store.in_features % INT8_COLUMNS:
            raise ValueError(f"int8pack needs in_features divisible by {INT8_COLUMNS}, got {store.in_features}")
        self.store = store
        self.register_buffer("row_scale", row_scales(store.scale, store.out_features).to(torch.bfloat16))

    @property
    def read_bytes(self) -> int:
        """Bytes of codes and bf16 scales."""
        return self.store.values.numel() + 2 * self.row_scale.numel()

    def forward(self, x: Tensor) -> Tensor:
        """Activations and scales rounded to bf16, sums in fp32."""
        return torch._weight_int8pack_mm(x.to(torch.bfloat16), self.store.values, self.row_scale).to(x.dtype)


class Int4Pack(nn.Module):
    """`torch._weight_int4pack_mm_for_cpu`: packed 4-bit codes, a bf16 scale and float zero a group."""

    def __init__(self, quantized: QuantizedWeight):
        super().__init__()
        self.group_size = quantized.group_size
        shifted = quantized.values.to(torch.int32) + 8
        self.register_buffer("packed", torch._convert_weight_to_int4pack_for_cpu(shifted, 1))
        # the kernel computes (code - 8) · scale + zero
        zero_point = 0 if quantized.zero_point is None else quantized.zero_point.float()
        scale_and_zero = torch.stack((quantized.scale, -quantized.scale * zero_point), dim=-1).to(torch.bfloat16)
        self.register_buffer("scale_and_zero", scale_and_zero.transpose(0, 1).contiguous())  # [n_groups, out, 2]

    @property
    def read_bytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return self.packed.numel() + 2 * self.scale_and_zero.numel()

    def forward(self, x: Tensor) -> Tensor:
        """Activations, scales and zeros rounded to bf16, sums in fp32."""
        x_bf16 = x.to(torch.bfloat16)
        return torch._weight_int4pack_mm_for_cpu(x_bf16, self.packed, self.group_size, self.scale_and_zero).to(x.dtype)


class DynamicInt8(nn.Module):
    """torch's dynamic int8 linear (FBGEMM, or whichever engine `quantized.engine` names), one activation scale a row.

    The kernel takes one activation scale a call, and the first token's spike would leave all other rows a handful of
    levels; dividing each row by its largest magnitude first and multiplying the result back gives every row its own.
    Without VNNI the products of two neighbors are added in 16 bits and saturate, so there activations get 7 bits.
    """

    def __init__(self, quantized: QuantizedWeight, engine: str = "fbgemm"):
        super().__init__()
        self.engine = engine
        self.reduce_range = saturates(engine)
        self.packed = prepacked(quantized, engine)
        self.n_bytes = quantized.values.numel() + 4 * quantized.values.shape[0]  # the engine keeps fp32 row scales

    @property
    def read_bytes(self) -> int:
        """Bytes of codes and fp32 scales; the engine's own padding is not counted."""
        return self.n_bytes

    def forward(self, x: Tensor) -> Tensor:
        """Activations rounded to 8 bits (7 where 8 would saturate), sums in int32."""
        largest = x.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny)
        result = torch.ops.quantized.linear_dynamic((x / largest).float(), self.packed, self.reduce_range)
        return result.to(x.dtype).mul_(largest)


class IntMm(nn.Module):
    """`torch._int_mm` with symmetric int8 activations, one scale a row; exact sums in int32."""

    def __init__(self, store: ByteStore):
        super().__init__()
        self.store = store
        self.register_buffer("row_scale", row_scales(store.scale, store.out_features))

    @property
    def read_bytes(self) -> int:
        """Bytes of codes and fp32 scales."""
        return self.store.values.numel() + 4 * self.row_scale.numel()

    def forward(self, x: Tensor) -> Tensor:
        """Activations rounded to -127 … 127 by row."""
        scale = x.float().abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny) / 127
        codes = (x / scale).round().to(torch.int8)
        return (torch._int_mm(codes, self.store.values.T) * scale * self.row_scale).to(x.dtype)


class TorchAo(nn.Module):
    """torchao's linear as `quantize_` makes it with its configuration's defaults; it chooses its own codes.

    name: format and configuration, such as "int8 torchao_dynamic". With the suffix "_compiled" its product goes through
    torch.compile, which then sees conversion and product together.
    """

    def __init__(self, weight: Tensor, name: str, group_size: int = 0):
        super().__init__()
        self.multiply = _compiled_linear() if name.endswith("_compiled") else nn.functional.linear
        with quiet_import(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            holder = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"))
            holder[0].weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
            _quantize_by_torchao(holder, name.removesuffix("_compiled"), group_size)
        self.linear = holder[0]

    @property
    def read_bytes(self) -> int:
        """Bytes of codes and scales."""
        weight = self.linear.weight
        return weight.qdata.numel() + weight.scale.numel() * weight.scale.element_size()

    def forward(self, x: Tensor) -> Tensor:
        """Whatever torchao dispatches to."""
        return self.multiply(x.to(self.linear.weight.dtype), self.linear.weight).to(x.dtype)


@functools.cache
def _compiled_linear() -> Callable[[Tensor, Tensor], Tensor]:
    """One compiled product for all layers: weights of the same shape share its code."""
    return torch.compile(nn.functional.linear, dynamic=False)


@functools.cache
def compiler_missing() -> str:
    """Why torch.compile cannot make CPU code here; "" where a C++ compiler is found."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    if " " in torch.__file__:  # torch 2.13 hands its library folder to the linker unquoted
        return "torch.compile cannot link against a torch whose path has a space"
    try:
        get_cpp_compiler()
    except Exception as error:  # its own error class is private
        return f"torch.compile needs a C++ compiler: {str(error).splitlines()[0]}"
    return ""


def _quantize_by_torchao(holder: nn.Module, name: str, group_size: int) -> None:
    import torchao.quantization as torchao

    configs = {
        "int8 torchao": lambda: torchao.Int8WeightOnlyConfig(),
        "int8 torchao_dynamic": lambda: torchao.Int8DynamicActivationInt8WeightConfig(),
        "int4 torchao": lambda: torchao.Int4WeightOnlyConfig(group_size=group_size),
        "fp8 torchao": lambda: torchao.Float8WeightOnlyConfig(),
    }
    if name.startswith("int4"):
        holder.to(torch.bfloat16)  # the only dtype its int4 layouts take
    torchao.quantize_(holder, configs[name]())


def row_scales(scale: Tensor, out_features: int) -> Tensor:
    """One scale a row [out] from per-channel or per-tensor scales."""
    return scale.expand(out_features, 1).flatten().contiguous()


def engine_of(kernel: str) -> str:
    """The quantized engine behind a dynamic int8 kernel in this build of torch."""
    supported = torch.backends.quantized.supported_engines
    return next(engine for engine in ENGINES[kernel] if engine in supported)


def prepacked(quantized: QuantizedWeight, engine: str):
    """The engine's packed weight object."""
    scales = row_scales(quantized.scale, quantized.values.shape[0]).double()
    zero_points = torch.zeros(len(scales), dtype=torch.long)
    with warnings.catch_warnings(), using_engine(engine):
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
        weight = torch._make_per_channel_quantized_tensor(quantized.values, scales, zero_points, 0)
        return torch.ops.quantized.linear_prepack(weight, None)


@contextlib.contextmanager
def using_engine(engine: str) -> Iterator[None]:
    """torch's quantized engine set inside the block."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


@functools.cache
def saturates(engine: str) -> bool:
    """Does the engine lose sums on this CPU when activations use all 8 bits? Asked with the largest codes there are.

    True on AVX2 (vpmaddubsw adds two u8·s8 products in 16 bits: 2 · 255 · 127 > 32767), false with VNNI.
    """
    codes = torch.full((32, 64), 127, dtype=torch.int8)
    weight = QuantizedWeight(codes, torch.ones(32, 1), None, 8, "channel", 0)
    result = torch.ops.quantized.linear_dynamic(torch.ones(1, 64), prepacked(weight, engine), False)
    return not torch.allclose(result, torch.full_like(result, 64 * 127.0), rtol=1e-3)

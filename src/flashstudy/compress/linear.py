"""A weight format and a kernel path give a linear layer, whatever lies underneath.

Underneath are three parts: how the weight lies in memory (`stores`), how it is multiplied (`products`, `packed`), and
the table that says which of them exist and can run (`kernel_table`).
"""

import copy

import torch
from torch import Tensor, nn

from flashstudy.compress import codebooks, packed, products
from flashstudy.compress.kernel_table import (
    BITS,
    FLOAT_DTYPES,
    VALUE_BYTES,
    KernelInfo,
    WeightLayout,
    available_kernels,
    choose_kernel,
)
from flashstudy.compress.quantize import SCALE_BYTES, QuantizedWeight, check_matrix, quantize
from flashstudy.compress.sparse import stored_bytes, to_bsr, to_csr
from flashstudy.compress.stores import ByteStore, MaskedStore, NibbleStore, bitmap_store

__all__ = ["CompressedLinear", "KernelInfo", "WeightLayout", "available_kernels", "make_linear"]


class CompressedLinear(nn.Module):
    """A linear layer over one product; drop-in for nn.Linear in evaluation.

    stored_bytes: bytes of the weight in its format, scales and indices included, bias not. read_bytes: bytes of it
    that one call reads at least. Takes any leading shape, no rows at all included.
    """

    def __init__(self, product: nn.Module, bias: Tensor | None, info: KernelInfo, shape: tuple[int, int], stored: int):
        super().__init__()
        self.product = product
        self.register_buffer("bias", bias)
        self.info = info
        self.out_features, self.in_features = shape
        self.stored_bytes = stored

    @property
    def read_bytes(self) -> int:
        """Bytes of the stored weight that one call reads at least."""
        return self.product.read_bytes

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out] in x's dtype."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"this layer takes {self.in_features} in_features, got an input {list(x.shape)}")
        shape = (*x.shape[:-1], self.out_features)
        rows = x.reshape(-1, self.in_features) if x.numel() else x.new_empty(0, self.in_features)
        result = self.product(rows) if rows.shape[0] else x.new_zeros(shape)
        if self.bias is not None:
            result = result + self.bias.to(result.dtype)
        return result.reshape(shape)

    def __deepcopy__(self, memo: dict) -> "CompressedLinear":
        return _twin(self, memo)

    def extra_repr(self) -> str:
        """Sizes and kernel."""
        return f"in_features={self.in_features}, out_features={self.out_features}, kernel={self.info.kernel}"


def make_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_format: str,
    kernel_path: str = "",
    kernel: str = "",
    granularity: str = "channel",
    group_size: int = 0,
    symmetric: bool = True,
    sparse_format: str = "dense",
    block: tuple[int, int] = (0, 0),
) -> CompressedLinear:
    """A layer for a float weight [out, in] stored in `weight_format`, multiplied by `kernel` or the path's first one.

    Pruned weights are zeros of `weight`; with sparse_format "dense" they are stored like all others. kernel_path
    "stored_dense" keeps the rounded weight in its float dtype. The float weight is shared, not copied, where nothing
    changes. Raises ValueError with the reason when nothing here can do it.
    """
    check_matrix(weight)
    layout = WeightLayout(weight_format, sparse_format, granularity, group_size, symmetric, tuple(block))
    if kernel_path == "stored_dense":
        info = KernelInfo("dense", "stored_dense", weight_format, "naive")
    else:
        info = choose_kernel(layout, tuple(weight.shape), kernel_path, kernel, weight.device.type)
    code = encode(weight, layout)
    if code is not None:
        product = _quantized_product(info, weight, code)
        stored = _quantized_bytes(code, sparse_format)
    else:
        stored_weight = weight.detach().to(FLOAT_DTYPES[weight_format])
        product = _float_product(info, stored_weight, layout)
        sizes = stored_bytes(sparse_format, stored_weight, value_bytes=VALUE_BYTES[weight_format], block=tuple(block))
        stored = sizes.total
    return CompressedLinear(product, bias, info, tuple(weight.shape), stored)


def encode(weight: Tensor, layout: WeightLayout) -> QuantizedWeight | None:
    """The codes of a weight in the layout's format; None for a float format, which has none.

    Raises ValueError for what the format cannot hold.
    """
    if layout.weight_format in FLOAT_DTYPES:
        return None
    sizes = dict(granularity=layout.granularity, group_size=layout.group_size)
    if layout.weight_format in codebooks.FORMATS:
        if not layout.symmetric:
            raise ValueError(f"{layout.weight_format} is symmetric: it has no zero point")
        return codebooks.encode(weight, layout.weight_format, **sizes)
    return quantize(weight, bits=BITS[layout.weight_format], symmetric=layout.symmetric, **sizes)


def _twin(module: nn.Module, memo: dict) -> nn.Module:
    # nn.Module's own deep copy takes 5 ms a layer, nearly all of it for hooks that no layer here has
    if id(module) not in memo:
        twin = memo[id(module)] = copy.copy(module)
        twin._parameters = {name: copy.deepcopy(tensor, memo) for name, tensor in module._parameters.items()}
        twin._buffers = {name: copy.deepcopy(tensor, memo) for name, tensor in module._buffers.items()}
        twin._modules = {name: _twin(child, memo) for name, child in module._modules.items()}
        for name, value in vars(module).items():
            if isinstance(value, torch.ScriptObject):  # a packed weight
                setattr(twin, name, copy.deepcopy(value, memo))
    return memo[id(module)]


def _quantized_bytes(code: QuantizedWeight, sparse_format: str) -> int:
    scales = code.scale.numel() + (0 if code.zero_point is None else code.zero_point.numel())
    return stored_bytes(sparse_format, code.values, value_bytes=code.bits / 8, scale_bytes=scales * SCALE_BYTES).total


def _float_product(info: KernelInfo, weight: Tensor, layout: WeightLayout) -> nn.Module:
    match info.kernel:
        case "dense":
            return products.Dense(weight)
        case "bitmap" | "bitmap_table":
            return products.Dequantize(bitmap_store(weight, by_table=info.kernel == "bitmap_table"))
        case "csr":
            return products.SparseRows(to_csr(weight.float()))
        case "bsr":
            return products.SparseRows(to_bsr(weight.float(), layout.block))
        case "masked":
            return products.Dequantize(MaskedStore(weight))
        case "structured":
            return products.Structured(weight)
        case "semi_structured":
            return products.SemiStructured(weight)
    raise AssertionError(f"kernel {info.kernel} is in the table but not built")


def _quantized_product(info: KernelInfo, weight: Tensor, code: QuantizedWeight) -> nn.Module:
    match info.kernel:
        case "dense":
            return products.Dense(code.dequantize(weight.dtype))
        case "bitmap" | "bitmap_table":
            return products.Dequantize(bitmap_store(code, by_table=info.kernel == "bitmap_table"))
        case "torchao" | "torchao_dynamic" | "torchao_compiled":
            name = f"{info.weight_format} {info.kernel}"
            return packed.TorchAo(code.dequantize(weight.dtype), name, group_size=code.group_size)
        case "dynamic_int8" | "dynamic_int8_onednn":
            return packed.DynamicInt8(code, packed.engine_of(info.kernel))
        case "int4pack":
            return packed.Int4Pack(code)
    store = ByteStore(code) if code.bits == 8 else NibbleStore(code)
    match info.kernel:
        case "dequantize":
            return products.Dequantize(store)
        case "tiled":
            return products.Tiled(store)
        case "int8pack":
            return packed.Int8Pack(store)
        case "int8pack_tiled":
            return products.ByRows(packed.Int8Pack(store), products.Tiled(store))
        case "int4pack_tiled":
            return products.ByRows(packed.Int4Pack(code), products.Tiled(store))
        case "int_mm":
            return packed.IntMm(store)
    raise AssertionError(f"kernel {info.kernel} is in the table but not built")


def from_codes(code: QuantizedWeight, bias: Tensor | None, *, info: KernelInfo, dtype: torch.dtype) -> CompressedLinear:
    """A layer over codes that exist already, such as those of a file; its float weight is never made.

    `dtype` is the model's. For kernels over plain codes stored dense; the others want the weight (`make_linear`).
    """
    no_weight = code.scale.new_empty(0, dtype=dtype)
    product = _quantized_product(info, no_weight, code)
    return CompressedLinear(product, bias, info, tuple(code.values.shape), code.stored_bytes)

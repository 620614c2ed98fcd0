"""The table of kernels: every way this package can multiply a stored weight, and why one cannot run here.

"naive" is what one writes first, "library" what a library's default does, "best-candidate" what an expert would try;
which of them is best on a machine is measured in `measure.kernels`. A kernel that cannot run is a row with a reason.
"""

import dataclasses
import functools
from dataclasses import dataclass

import torch

from flashstudy.compress import codebooks, packed
from flashstudy.compress.products import SparseRows
from flashstudy.compress.sparse import to_bsr, to_csr

FLOAT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BITS = {"int8": 8, "int4": 4}
VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "int4": 0.5, "nf4": 0.5}
NIBBLES = ("int4", "nf4")


@dataclass(frozen=True)
class KernelInfo:
    """One way to multiply one stored format. activation_dtype "" = the model's own; reason says why not available.

    compiled: its first call at a shape takes torch.compile many seconds, so it runs only where it is asked for.
    """

    kernel: str
    kernel_path: str
    weight_format: str
    role: str
    available: bool = True
    reason: str = ""
    activation_dtype: str = ""
    sparse_format: str = "dense"

    @property
    def compiled(self) -> bool:
        """Goes through torch.compile?"""
        return self.kernel.endswith("_compiled")


@dataclass(frozen=True)
class WeightLayout:
    """What is to be stored and how, without the weight itself."""

    weight_format: str
    sparse_format: str = "dense"
    granularity: str = "channel"
    group_size: int = 0
    symmetric: bool = True
    block: tuple[int, int] = (0, 0)


def _rows(weight_format: str, sparse_format: str, *rows: tuple[str, ...]) -> list[KernelInfo]:
    return [
        KernelInfo(
            kernel, path, weight_format, role, activation_dtype=activation[0] if activation else "",
            sparse_format=sparse_format,
        )
        for kernel, path, role, *activation in rows
    ]  # fmt: skip


_DEQUANTIZE = ("dequantize", "dequantize_then_matmul", "naive")
_TILED = ("tiled", "dequantize_then_matmul", "best-candidate")
# The faster of the two first: a recipe that names no kernel, such as the articles' Flash, gets the first of its path.
_BITMAP = (
    ("bitmap_table", "dequantize_then_matmul", "best-candidate"),
    ("bitmap", "dequantize_then_matmul", "naive"),
)
KERNELS = [
    *(info for name in FLOAT_DTYPES for info in _rows(name, "dense", ("dense", "dense", "library"))),
    *_rows(
        "int8", "dense", _DEQUANTIZE, _TILED,
        ("torchao", "dequantize_then_matmul", "library"),
        ("int8pack", "fused", "best-candidate", "bfloat16"),
        ("int8pack_tiled", "fused", "best-candidate", "bfloat16"),
        ("dynamic_int8", "native_lowbit", "best-candidate", "int8"),
        ("dynamic_int8_onednn", "native_lowbit", "best-candidate", "int8"),
        ("int_mm", "native_lowbit", "library", "int8"),
        ("torchao_dynamic", "native_lowbit", "library", "int8"),
        ("torchao_compiled", "fused", "library"),
    ),
    *_rows(
        "int4", "dense", _DEQUANTIZE, _TILED,
        ("int4pack", "fused", "best-candidate", "bfloat16"),
        ("int4pack_tiled", "fused", "best-candidate", "bfloat16"),
        ("torchao", "dequantize_then_matmul", "library"),
    ),
    *_rows("nf4", "dense", _DEQUANTIZE, _TILED),
    *_rows("fp8", "dense", _DEQUANTIZE, _TILED, ("torchao", "dequantize_then_matmul", "library")),
    *(info for name in (*FLOAT_DTYPES, "int8") for info in _rows(name, "bitmap", *_BITMAP)),
    *(info for name in FLOAT_DTYPES for info in _rows(name, "masked", ("masked", "dequantize_then_matmul", "naive"))),
    *(info for name in FLOAT_DTYPES for info in _rows(name, "structured", ("structured", "fused", "best-candidate"))),
    *(info for name in ("bf16", "fp16") for info in _rows(name, "n_m", ("semi_structured", "fused", "library"))),
    *_rows("fp32", "csr", ("csr", "fused", "library", "float32")),
    *_rows("fp32", "bsr", ("bsr", "fused", "library", "float32")),
]  # fmt: skip


def choose_kernel(
    layout: WeightLayout, shape: tuple[int, int], kernel_path: str, kernel: str, device: str = "cpu"
) -> KernelInfo:
    """The named kernel, or the first available one of the path. ValueError says what is allowed, or why not."""
    infos = available_kernels(layout.weight_format, device, layout=layout, shape=shape)
    matching = [info for info in infos if (info.kernel == kernel if kernel else info.kernel_path == kernel_path)]
    if usable := [info for info in matching if info.available]:
        return usable[0]
    stored = f"{layout.weight_format} weights stored {layout.sparse_format}"
    if matching:
        raise ValueError(f"{stored}: {'; '.join(f'{info.kernel}: {info.reason}' for info in matching)}")
    if kernel_path == "unknown" and not kernel:
        raise ValueError("kernel_path 'unknown' names no kernel: let measure.kernels.fill choose one first")
    allowed = ", ".join(f"{info.kernel} ({info.kernel_path})" for info in infos) or "none"
    raise ValueError(f"{stored} have no kernel {kernel or kernel_path!r}; there are {allowed}")


def available_kernels(
    weight_format: str,
    device: str = "cpu",
    *,
    layout: WeightLayout | None = None,
    shape: tuple[int, int] | None = None,
) -> list[KernelInfo]:
    """Every kernel for the format, with `available` and `reason` for this device, layout and weight shape [out, in].

    Without layout: plain dense storage, symmetric, per channel (int4: groups of 64). Raises ValueError for a format
    that has no kernel at all.
    """
    known = {info.weight_format for info in KERNELS}
    if weight_format not in known:
        raise ValueError(f"weight_format {weight_format!r} has no kernel; there are {', '.join(sorted(known))}")
    if layout is None:
        layout = WeightLayout(
            weight_format, **({"granularity": "group", "group_size": 64} if weight_format == "int4" else {})
        )
    infos = [
        info for info in KERNELS if (info.weight_format, info.sparse_format) == (weight_format, layout.sparse_format)
    ]
    reasons = [_why_not(info, layout, shape, device) for info in infos]
    return [
        dataclasses.replace(info, available=not reason, reason=reason)
        for info, reason in zip(infos, reasons, strict=True)
    ]


def without_compiled(info: KernelInfo) -> KernelInfo:
    """The kernel, not available where it would have to be compiled first."""
    if not info.compiled or not info.available:
        return info
    return dataclasses.replace(info, available=False, reason="left out: torch.compile takes many seconds a shape")


def _why_not(info: KernelInfo, layout: WeightLayout, shape: tuple[int, int] | None, device: str) -> str:
    """Empty when the kernel can run, else what stands against it, the first of: device, layout, shape, installation."""
    if device != "cpu" and info.kernel.startswith(("int8pack", "int4pack", "dynamic_int8", "int_mm")):
        return f"this packed form is for the CPU, not {device!r}"
    if info.kernel == "semi_structured" and not device.startswith("cuda"):
        return f"torch multiplies 2:4 weights on CUDA from compute capability 8.0 on, not on {device!r}"
    return (
        _layout_reason(info, layout)
        or (_shape_reason(info, layout, *shape) if shape else "")
        or _installation_reason(info.weight_format, info.kernel)
    )


def _layout_reason(info: KernelInfo, layout: WeightLayout) -> str:
    kernel = info.kernel
    if info.weight_format in codebooks.FORMATS and not layout.symmetric:
        return "has no zero point"
    if kernel in ("dequantize", "tiled", "dense", "csr", "bsr", "masked", "structured", "semi_structured"):
        return ""
    if kernel.startswith("int4pack") or (kernel == "torchao" and info.weight_format == "int4"):
        fits = layout.granularity == "group" and layout.group_size in packed.INT4_GROUPS
        return "" if fits else f"takes groups of {', '.join(map(str, packed.INT4_GROUPS))} only"
    if not layout.symmetric:
        return "takes symmetric codes only"
    if kernel.startswith("bitmap"):
        return ""
    if kernel.startswith("torchao") and layout.granularity != "channel":
        return "takes one scale a row"
    return "takes one scale a row or one for all" if layout.granularity == "group" else ""


def _shape_reason(info: KernelInfo, layout: WeightLayout, out_features: int, in_features: int) -> str:
    if info.kernel.startswith("int8pack") and in_features % packed.INT8_COLUMNS:
        return f"takes in_features divisible by {packed.INT8_COLUMNS}, not {in_features}"
    if info.kernel.startswith("int4pack") and out_features % packed.INT4_ROWS:
        return f"takes out_features divisible by {packed.INT4_ROWS}, not {out_features}"
    if info.weight_format in NIBBLES and in_features % 2:
        return f"packs two weights a byte: in_features {in_features} is odd"
    return _block_reason(layout.block, out_features, in_features) if info.kernel == "bsr" else ""


def _block_reason(block: tuple[int, int], out_features: int, in_features: int) -> str:
    if min(block) < 1 or out_features % block[0] or in_features % block[1]:
        return f"block {block} does not divide {(out_features, in_features)}"
    if block[0] != block[1]:
        return f"MKL multiplies square blocks only, not {block[0]} x {block[1]}"
    return ""


@functools.cache
def _installation_reason(weight_format: str, kernel: str) -> str:
    """Empty when torch and torchao have the operator here; asked by using it once on a small weight where unsure."""
    operators = {"int8pack": "_weight_int8pack_mm", "int4pack": "_weight_int4pack_mm_for_cpu", "int_mm": "_int_mm"}
    if (operator := operators.get(kernel.removesuffix("_tiled"))) and not hasattr(torch, operator):
        return f"torch {torch.__version__} has no {operator}"
    if kernel.startswith("dynamic_int8"):
        engines = torch.backends.quantized.supported_engines
        wanted = packed.ENGINES[kernel]
        return (
            "" if any(engine in engines for engine in wanted) else f"torch has none of the engines {', '.join(wanted)}"
        )
    if kernel.endswith("_compiled") and (missing := packed.compiler_missing()):
        return missing
    try:
        if kernel.startswith("torchao"):
            name = f"{weight_format} {kernel.removesuffix('_compiled')}"
            packed.TorchAo(torch.ones(128, 128), name, group_size=64)(torch.ones(1, 128))
        elif kernel in ("csr", "bsr"):
            convert = to_csr if kernel == "csr" else functools.partial(to_bsr, block=(8, 8))
            SparseRows(convert(torch.ones(16, 16)))(torch.ones(1, 16))
    except Exception as error:  # whatever is missing here: a library, a build without MKL
        name = "torchao" if kernel.startswith("torchao") else "torch"
        return f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return ""

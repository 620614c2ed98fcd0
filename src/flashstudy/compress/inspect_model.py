"""What a loaded model really multiplies with: each linear layer's number format, kernel and path, and what they cover.

A checkpoint's name says little about this: a 4-bit file may have become float32 at load, and a module called quantized
may unpack its weight at every call. Told from the modules and tensors themselves; what is not known here is called
unknown, with its class name.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flashstudy.compress.linear import CompressedLinear


@dataclass(frozen=True)
class LayerGroup:
    """Layers alike in everything but size. share: of all multiplied weights. read_bytes: weights, once each.

    tied: the weight is the embedding's table.
    """

    kind: str
    weight_format: str
    kernel: str
    kernel_path: str
    tied: bool
    n_layers: int
    n_weights: int
    read_bytes: int
    share: float


@dataclass(frozen=True)
class InEffect:
    """A model after loading. dtype_bytes: bytes of its parameters by dtype, each tensor once."""

    dtype_bytes: dict[str, int]
    groups: tuple[LayerGroup, ...]

    @property
    def read_bytes(self) -> int:
        """Bytes of the multiplied weights, which a decode step reads at least."""
        return sum(group.read_bytes for group in self.groups)

    @property
    def bits_per_weight(self) -> float:
        """Bits read for each multiplied weight, scales included."""
        return 8 * self.read_bytes / max(sum(group.n_weights for group in self.groups), 1)

    def covered(self, *paths: str) -> float:
        """Share of the multiplied weights on these kernel paths."""
        return sum(group.share for group in self.groups if group.kernel_path in paths)


@dataclass(frozen=True)
class _Layer:
    kind: str
    weight_format: str
    kernel: str
    kernel_path: str
    n_weights: int
    read_bytes: int


def inspect(model: nn.Module) -> InEffect:
    """Formats and paths of the model as it lies in memory."""
    table = getattr(_input_embeddings(model), "weight", None)
    groups = defaultdict(list)
    for module in layers(model):
        found = _described(module)
        tied = table is not None and getattr(module, "weight", None) is table
        groups[found.kind, found.weight_format, found.kernel, found.kernel_path, tied].append(found)
    total = sum(layer.n_weights for members in groups.values() for layer in members)
    made = [_group(key, members, total) for key, members in groups.items()]
    return InEffect(_dtype_bytes(model), tuple(sorted(made, key=lambda group: -group.n_weights)))


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that hold a multiplied matrix, outermost first: what lies inside one of them is its own affair."""
    if isinstance(module, nn.Embedding):
        return
    if isinstance(module, CompressedLinear) or _matrices(module):
        yield module
        return
    for child in module.children():
        yield from layers(child)


def _matrices(module: nn.Module) -> list[Tensor]:
    """The module's own matrices; packed ones may be buffers, which count where the module has a linear's sizes."""
    own = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1]
    if hasattr(module, "in_features"):
        own += [buffer for buffer in module.buffers(recurse=False) if buffer.dim() > 1]
    return own


def _described(module: nn.Module) -> _Layer:
    kind = type(module).__name__
    if isinstance(module, CompressedLinear):
        info, n_weights = module.info, module.out_features * module.in_features
        return _Layer(kind, info.weight_format, info.kernel, info.kernel_path, n_weights, module.read_bytes)
    weight = getattr(module, "weight", None)
    if weight is not None and type(weight).__module__.startswith("torchao"):
        # weight-only layouts run as in `kernel_table`: unpacked, then multiplied
        path = "native_lowbit" if getattr(weight, "act_quant_kwargs", None) else "dequantize_then_matmul"
        return _Layer(kind, type(weight).__name__, "torchao", path, weight.numel(), _packed_bytes(weight))
    if isinstance(module, nn.Linear) and type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point():
        return _Layer(kind, _name(weight.dtype), "dense", "dense", weight.numel(), _bytes(weight))
    matrices = _matrices(module)
    sizes = getattr(module, "out_features", 0) * getattr(module, "in_features", 0)
    n_weights = sizes or sum(matrix.numel() for matrix in matrices)
    formats = ", ".join(sorted({_name(matrix.dtype) for matrix in matrices}))
    return _Layer(kind, formats, "", "unknown", n_weights, sum(map(_bytes, matrices)))


def _packed_bytes(weight: Tensor) -> int:
    """Bytes of the tensors that a torchao weight is made of."""
    names = [*getattr(weight, "tensor_data_names", ()), *getattr(weight, "optional_tensor_data_names", ())]
    parts = [getattr(weight, name, None) for name in names]
    return sum(_bytes(part) for part in parts if isinstance(part, Tensor)) or _bytes(weight)


def _group(key: tuple, members: list[_Layer], total: int) -> LayerGroup:
    n_weights = sum(layer.n_weights for layer in members)
    read_bytes = sum(layer.read_bytes for layer in members)
    return LayerGroup(*key, len(members), n_weights, read_bytes, n_weights / total)


def _dtype_bytes(model: nn.Module) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    codes = [t for m in model.modules() if isinstance(m, CompressedLinear) for t in m.buffers()]
    for tensor in {id(tensor): tensor for tensor in [*model.parameters(), *codes]}.values():
        found[_name(tensor.dtype)] += _packed_bytes(tensor)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _input_embeddings(model: nn.Module) -> nn.Module | None:
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # no transformers model, or one without a table
        return None


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

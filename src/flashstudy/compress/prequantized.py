"""A quantized variant kept as a folder, so that no later start has to quantize it again.

Codes, scales and zero points lie in safetensors beside every other tensor of the model, what they mean in JSON; nothing
is pickled. Loading makes an empty model, puts the codes into its projections and the other tensors into their places:
the float weights of the projections never exist. Scales keep their 32 bits, so what comes back is the same to the bit.
"""

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashstudy.compress.cache import new_folder, remembered, sha256_of
from flashstudy.compress.folders import check_complete, read_json
from flashstudy.compress.kernel_table import BITS, KernelInfo, WeightLayout, choose_kernel
from flashstudy.compress.kv_cache import make_cache
from flashstudy.compress.linear import CompressedLinear, from_codes
from flashstudy.compress.quantize import QuantizedWeight
from flashstudy.compress.stores import INT4_SHIFT, ByteStore, NibbleStore, out_of_pairs
from flashstudy.compress.variants import Variant, stored_bytes
from flashstudy.facts.recipes import Recipe

VERSION = 1
WEIGHTS, CONFIG, MANIFEST = "model.safetensors", "config.json", "flashstudy.json"
# Kernels over plain codes. The others pack them into objects or layouts from which no code comes back.
KERNELS = ("dequantize", "tiled", "int8pack", "int8pack_tiled", "int_mm", "int4pack_tiled")


def save(variant: Variant, folder: Path) -> None:
    """Write a variant with dense INT8 or INT4 weights into a new folder, which appears when it is complete.

    One byte a weight at 8 bits, half a byte at 4, four bytes a scale, one a zero point. Raises ValueError, with the
    layer's name, for weights that are stored otherwise and for kernels outside KERNELS; for a folder that exists.
    """
    layers = {name: module for name, module in variant.model.named_modules() if isinstance(module, CompressedLinear)}
    _refuse_unsaveable(layers, variant)
    if folder.exists():
        raise ValueError(f"folder {folder.name} exists already: a variant is saved into a new one")
    plain, aliases = _plain_tensors(variant.model, layers)
    with new_folder(folder) as part:
        _save_tensors(plain | _layer_tensors(layers), part / WEIGHTS)
        variant.model.config.to_json_file(part / CONFIG)
        content = {
            "version": VERSION,
            "sha256": {name: sha256_of(part / name) for name in (WEIGHTS, CONFIG)},
            "model_class": type(variant.model).__name__,
            "dtype": str(variant.model.dtype).removeprefix("torch."),
            "recipe": json.loads(variant.recipe.to_json()),
            "coverage": variant.coverage,
            "notes": variant.notes,
            "layers": {name: _described(layer, variant.recipe) for name, layer in layers.items()},
            "tensors": list(plain),
            "aliases": aliases,
        }
        (part / MANIFEST).write_text(json.dumps(content, indent=1))


def load(folder: Path, *, mapped: bool = False) -> Variant:
    """The variant that `save` wrote, its tensors copied into this process's memory, or left in the mapped file.

    Raises ValueError in one line for a folder of another version, a file that is not the one saved (by its hash, read
    once and remembered), a tensor that is missing or has another shape, and a kernel that cannot run here.
    """
    from safetensors import safe_open

    content = _manifest(folder)
    recipe = Recipe.from_json(json.dumps(content["recipe"]))
    model = _empty_model(folder, content)
    dtype = getattr(torch, content["dtype"])
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        tensors = _Tensors(file, folder, mapped)
        for name, described in content["layers"].items():
            model.set_submodule(name, _layer(name, described, dtype, tensors))
        for name in content["tensors"]:
            _put(model, name, tensors.read(name))
    for name, first in content["aliases"].items():
        _put(model, name, _find(model, first))
    _refuse_empty(model, folder)
    new_cache = functools.partial(make_cache, recipe.kv_format, recipe.kv_path, model.config)
    return Variant(model, recipe, new_cache, stored_bytes(model), content["coverage"], content["notes"])


class _Tensors:
    """The tensors of an open file, each copied out of the mapping unless it is to stay there."""

    def __init__(self, file: Any, folder: Path, mapped: bool):
        self.file, self.folder, self.mapped = file, folder, mapped
        self.names = set(file.keys())

    def read(self, name: str) -> Tensor:
        if name not in self.names:
            raise ValueError(f"{self.folder.name}/{WEIGHTS} has no tensor {name}")
        tensor = self.file.get_tensor(name)
        return tensor if self.mapped else tensor.clone()

    def read_if_there(self, name: str) -> Tensor | None:
        return self.read(name) if name in self.names else None


def files(folder: Path) -> list[Path]:
    """The files that hold the tensors of a saved variant."""
    return [folder / WEIGHTS]


def _refuse_unsaveable(layers: dict[str, CompressedLinear], variant: Variant) -> None:
    if not layers:
        raise ValueError(f"{variant.recipe.name} keeps {variant.recipe.weight_format} weights: it has no codes to save")
    for name, layer in layers.items():
        info = layer.info
        if info.weight_format not in BITS or info.sparse_format != "dense":
            raise ValueError(
                f"{name}: {info.weight_format} weights stored {info.sparse_format} cannot be saved; "
                f"{' and '.join(BITS)} stored dense can"
            )
        if info.kernel not in KERNELS:
            raise ValueError(f"{name}: kernel {info.kernel} keeps no plain codes; {', '.join(KERNELS)} do")


def _plain_tensors(model: nn.Module, layers: dict[str, CompressedLinear]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor outside the compressed layers under its first name, and other names of the same one.

    Buffers that the model computes when it is made (rotary frequencies) are kept too: an empty model has none.
    """
    inside = tuple(f"{name}." for name in layers)
    named = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    tensors, aliases, first_names = {}, {}, {}
    for name, tensor in named:
        if name.startswith(inside):
            continue
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            tensors[name] = tensor.detach()
        else:
            aliases[name] = first
    return tensors, aliases


def _layer_tensors(layers: dict[str, CompressedLinear]) -> dict[str, Tensor]:
    tensors = {}
    for name, layer in layers.items():
        store = _store(layer)
        tensors[f"{name}.codes"] = store.values if isinstance(store, ByteStore) else store.packed
        parts = {"scale": store.scale, "zero_point": store.zero_point, "bias": layer.bias}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
    return tensors


def _store(layer: CompressedLinear) -> ByteStore | NibbleStore:
    return next(module for module in layer.modules() if isinstance(module, ByteStore | NibbleStore))


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _described(layer: CompressedLinear, recipe: Recipe) -> dict[str, Any]:
    """What one layer's codes mean. A copied head has one INT8 scale a row, whatever the other layers have.

    The number of scales tells which of the two it is.
    """
    scale = _store(layer).scale
    n_groups = layer.in_features // recipe.group_size if recipe.granularity == "group" else 1
    like_recipe = scale.shape[1] == n_groups and (recipe.granularity != "tensor" or scale.shape[0] == 1)
    return {
        "kernel": layer.info.kernel,
        "shape": [layer.out_features, layer.in_features],
        "weight_format": layer.info.weight_format,
        "granularity": recipe.granularity if like_recipe else "channel",
        "group_size": recipe.group_size if like_recipe else 0,
    }


def _manifest(folder: Path) -> dict[str, Any]:
    """The folder's description, after the files were held against it."""
    content = read_json(folder / MANIFEST)
    if content.get("version") != VERSION:
        raise ValueError(f"{folder.name} is a prequantized folder of version {content.get('version')}, not {VERSION}")
    needed = ("sha256", "model_class", "dtype", "recipe", "coverage", "notes", "layers", "tensors", "aliases")
    if missing := [key for key in needed if key not in content]:
        raise ValueError(f"{folder.name}/{MANIFEST} lacks {', '.join(missing)}")
    for name, expected in content["sha256"].items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{folder.name} has no {name}")
        found = remembered("sha256", [path], functools.partial(sha256_of, path))
        if found != expected:
            hashes = f"its hash is {found[:12]}…, not {expected[:12]}…"
            raise ValueError(f"{folder.name}/{name} is not the file that was saved: {hashes}")
    check_complete(folder / WEIGHTS)
    return content


def _empty_model(folder: Path, content: dict[str, Any]) -> nn.Module:
    """The model of the folder's configuration without any memory for its tensors."""
    import transformers

    model_class = getattr(transformers, content["model_class"], None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise ValueError(f"{folder.name}: {content['model_class']!r} is no model class of transformers")
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(read_json(folder / CONFIG)))
    return model.eval().requires_grad_(False)


def _layer(name: str, described: dict[str, Any], dtype: torch.dtype, tensors: _Tensors) -> CompressedLinear:
    """One compressed layer from its tensors in the file; codes are made of nothing but themselves."""
    shape, bits = tuple(described["shape"]), BITS[described["weight_format"]]
    sharing = {"granularity": described["granularity"], "group_size": described["group_size"]}
    codes = tensors.read(f"{name}.codes")
    values = codes if bits == 8 else out_of_pairs(codes).to(torch.int8) - INT4_SHIFT
    if tuple(values.shape) != shape:
        raise ValueError(f"{name} has codes of {tuple(values.shape)} weights, not {shape}")
    scale, zero_point = tensors.read(f"{name}.scale"), tensors.read_if_there(f"{name}.zero_point")
    layout = WeightLayout(described["weight_format"], **sharing, symmetric=zero_point is None)
    info = _kernel(layout, shape, described["kernel"])
    code = QuantizedWeight(values, scale, zero_point, bits, **sharing)
    return from_codes(code, tensors.read_if_there(f"{name}.bias"), info=info, dtype=dtype)


@functools.cache
def _kernel(layout: WeightLayout, shape: tuple[int, int], name: str) -> KernelInfo:
    """The kernel's place in the table, looked up once: a model has few shapes, and a look takes as long as a read."""
    return choose_kernel(layout, shape, "", name)


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Sets a parameter or buffer of the empty model. Raises ValueError where it has none of that name and shape."""
    places, leaf = _place(model, name)
    if places.get(leaf) is None or places[leaf].shape != tensor.shape:
        raise ValueError(f"{type(model).__name__} has no tensor {name} of shape {tuple(tensor.shape)}")
    needs_parameter = isinstance(places[leaf], nn.Parameter) and not isinstance(tensor, nn.Parameter)
    places[leaf] = nn.Parameter(tensor, requires_grad=False) if needs_parameter else tensor


def _find(model: nn.Module, name: str) -> Tensor:
    places, leaf = _place(model, name)
    if leaf not in places:
        raise ValueError(f"{type(model).__name__} has no tensor {name}")
    return places[leaf]


def _place(model: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    """The module's own parameters or buffers that a name points into, and the name there."""
    owner, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        raise ValueError(f"{type(model).__name__} has no module {owner}") from None
    return (module._parameters if leaf in module._parameters else module._buffers), leaf


def _refuse_empty(model: nn.Module, folder: Path) -> None:
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        raise ValueError(f"{folder.name} lacks {len(empty)} tensors of its model: {', '.join(empty[:3])}")

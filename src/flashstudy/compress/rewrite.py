"""The weight matrices of a model by kind and depth, and copies of the model with other weights in their place.

A copy shares every tensor that is not replaced with the original, so a rounded or pruned copy costs the memory of its
projections only. The embedding, a head tied to it, and the norms are never touched.
"""

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from flashstudy.compress.kv_cache import make_cache
from flashstudy.compress.variants import Variant, share

# The suffixes under which transformers' Llama-like decoders and BERT-like encoders keep their projections.
KINDS = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
    "self.query": "q", "self.key": "k", "self.value": "v", "attention.output.dense": "o", "intermediate.dense": "up",
    "output.dense": "down",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Matrix:
    """One projection: weight [out, in], where it stands and what it is for."""

    name: str
    layer: int
    kind: str
    weight: Tensor


def matrices(model: nn.Module) -> Iterator[Matrix]:
    """The model's projections in order. Raises ValueError when it has none of a known kind."""
    found = False
    for name, module in model.named_modules():
        kind = next((kind for suffix, kind in KINDS.items() if name.endswith(suffix)), None)
        layer = re.search(r"\.(\d+)\.", name)
        if kind and layer and isinstance(module, nn.Linear):
            found = True
            yield Matrix(name, int(layer[1]), kind, module.weight.detach())
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear projection of a known kind ({', '.join(KINDS)})")


def rewrite(model: nn.Module, new_weight: Callable[[Matrix], Tensor]) -> nn.Module:
    """A copy in which every projection's weight is new_weight(matrix), of equal shape; the original is untouched."""
    shared = share(model, model.dtype)
    for matrix in matrices(model):
        weight = new_weight(matrix)
        if weight.shape != matrix.weight.shape:
            raise ValueError(f"{matrix.name}: new weight {tuple(weight.shape)} is not {tuple(matrix.weight.shape)}")
        shared.get_submodule(matrix.name).weight = nn.Parameter(weight.to(matrix.weight.dtype), requires_grad=False)
    return shared


def first_layers(model: nn.Module, n_layers: int) -> nn.Module:
    """A copy that stops after `n_layers` decoder layers, tensors shared; raises ValueError when there are fewer."""
    layers = _stack(model).layers
    if not 1 <= n_layers <= len(layers):
        raise ValueError(f"n_layers {n_layers} is not between 1 and the model's {len(layers)}")
    shared = share(model, model.dtype)
    _keep_layers(shared, list(_stack(shared).layers)[:n_layers], 0)
    return shared


def _stack(model: nn.Module) -> nn.Module:
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def _keep_layers(model: nn.Module, layers: list[nn.Module], start: int) -> None:
    """Leaves these layers, the first being number `start`, in a model that is nobody else's and in its config."""
    stack = _stack(model)
    stack.layers = nn.ModuleList(layers)
    stack.config = copy.deepcopy(stack.config)
    stack.config.num_hidden_layers = len(layers)
    if types := getattr(stack.config, "layer_types", None):  # by which transformers makes the cache
        stack.config.layer_types = types[start : start + len(layers)]
    model.config = stack.config


def layer_slices(variant: Variant, n_layers: int) -> list[Variant]:
    """The variant cut into pieces of `n_layers` consecutive decoder layers, tensors shared; a shorter rest is left out.

    Called in turns they stream the whole model's weights, where one of them alone may sit in the cache. stored_bytes
    and coverage stay those of the whole. Raises ValueError when the model has fewer layers.
    """
    n_sliced = max(len(_stack(variant.model).layers) // n_layers, 1) * n_layers
    shared = first_layers(variant.model, n_sliced)
    layers = list(_stack(shared).layers)
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):  # the place in a cache, which has n_layers places now
                module.layer_idx = index % n_layers
    kept = [*shared.parameters(), *shared.buffers(), *layers]
    slices = []
    for start in range(0, len(layers), n_layers):
        part = copy.deepcopy(shared, {id(one): one for one in kept})
        _keep_layers(part, layers[start : start + n_layers], start)
        new_cache = functools.partial(make_cache, variant.recipe.kv_format, variant.recipe.kv_path, part.config)
        slices.append(dataclasses.replace(variant, model=part, make_cache=new_cache))
    return slices


def check_groups(model: nn.Module, group_sizes: list[int]) -> None:
    """Raise ValueError before any work when a group size does not divide a projection's rows, with sizes that do."""
    for group_size in {size for size in group_sizes if size}:
        odd = sorted({matrix.weight.shape[1] for matrix in matrices(model) if matrix.weight.shape[1] % group_size})
        if odd:
            fitting = [size for size in (128, 64, 32, 16) if all(width % size == 0 for width in odd)]
            raise ValueError(f"group_size {group_size} does not divide in_features {odd}; these take {fitting}")

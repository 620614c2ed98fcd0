"""The weight matrices of a model by kind and depth, and copies of the model with other weights in their place.

A copy shares every tensor that is not replaced with the original, so a rounded or pruned copy costs the memory of its
projections only. The embedding, a head tied to it, and the norms are never touched.
"""

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from flashstudy.compress.variants import share

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
    stack = model.get_decoder() if hasattr(model, "get_decoder") else model
    if not 1 <= n_layers <= len(stack.layers):
        raise ValueError(f"n_layers {n_layers} is not between 1 and the model's {len(stack.layers)}")
    shared = share(model, model.dtype)
    stack = shared.get_decoder()
    stack.layers = stack.layers[:n_layers]
    stack.config = copy.deepcopy(stack.config)
    stack.config.num_hidden_layers = n_layers
    shared.config = stack.config
    return shared


def check_groups(model: nn.Module, group_sizes: list[int]) -> None:
    """Raise ValueError before any work when a group size does not divide a projection's rows, with sizes that do."""
    for group_size in {size for size in group_sizes if size}:
        odd = sorted({matrix.weight.shape[1] for matrix in matrices(model) if matrix.weight.shape[1] % group_size})
        if odd:
            fitting = [size for size in (128, 64, 32, 16) if all(width % size == 0 for width in odd)]
            raise ValueError(f"group_size {group_size} does not divide in_features {odd}; these take {fitting}")

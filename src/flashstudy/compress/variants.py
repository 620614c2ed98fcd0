"""A recipe applied to a loaded model: the Flash variant, with the standard's interface.

The variant shares every tensor it does not change with the original, which stays as it is. Replaced are the model's
linear layers; embeddings, norms and a head tied to the embedding keep the standard's dtype, and `coverage` says what
share of the multiplied weights the recipe reached.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flashstudy.compress import prune
from flashstudy.compress.checkpoints import LoadedModel
from flashstudy.compress.kernel_table import FLOAT_DTYPES, WeightLayout, available_kernels
from flashstudy.compress.kv_cache import make_cache
from flashstudy.compress.linear import CompressedLinear, make_linear
from flashstudy.facts.recipes import Recipe


@dataclass(frozen=True, eq=False)
class Variant:
    """A model ready to run. stored_bytes: all its weights as the recipe stores them, biases and embeddings included.

    coverage: weights in the recipe's format over all weights that take part in products, head included. `make_cache`
    gives a new cache for one conversation: pass it as cache=.
    """

    model: Any
    recipe: Recipe
    make_cache: Callable[[], Any]
    stored_bytes: int
    coverage: float
    notes: list[str] = field(default_factory=list)


def build(loaded: LoadedModel, recipe: Recipe) -> Variant:
    """`of_model` for what `checkpoints.load_model` gives."""
    return of_model(loaded.model, recipe)


def of_model(original: nn.Module, recipe: Recipe) -> Variant:
    """The variant that `recipe` makes of a model. Raises ValueError for what cannot be built, by name.

    A float weight_format is the dtype of the whole model; with quantized weights everything else keeps the
    model's dtype. Pruning comes before quantization, by magnitude within each matrix.
    """
    if recipe.engine != "eager":
        raise ValueError(f"engine {recipe.engine!r} is not built; allowed is 'eager'")
    model = share(original, FLOAT_DTYPES.get(recipe.weight_format, original.dtype))
    new_cache = functools.partial(make_cache, recipe.kv_format, recipe.kv_path, model.config)
    new_cache()  # refuses here what it would refuse in the middle of a measurement
    notes: list[str] = []
    covered = 0
    total = sum(weight.numel() for weight in matmul_weights(model).values())
    if recipe.is_quantized or recipe.sparsity:
        covered = _replace_linears(model, recipe, notes)
    elif recipe.kernel_path == "dense":
        covered = total
    return Variant(model, recipe, new_cache, stored_bytes(model), covered / total, notes)


def share(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the module tree over the same tensors; parameters of another dtype are converted, once each."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        same = parameter.dtype == dtype or not parameter.is_floating_point()
        memo[id(parameter)] = parameter if same else nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
    shared = copy.deepcopy(model, memo=memo)
    shared.config.dtype = dtype
    return shared


def matmul_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights that take part in products, by the name of their module; a tied head is the embedding's table.

    Raises ValueError, with names and counts, when a matrix hides in a module that is no nn.Linear (GPT-2's Conv1D,
    experts kept as one 3-D tensor): a variant would silently leave it out.
    """
    weights, odd = {}, Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | CompressedLinear):
            weights[name] = module.weight if isinstance(module, nn.Linear) else None
        elif not isinstance(module, nn.Embedding):
            matrices = [p for p in module.parameters(recurse=False) if p.dim() > 1]
            if matrices:
                odd[type(module).__name__] += sum(matrix.numel() for matrix in matrices)
    if odd or not weights:
        listed = ", ".join(f"{kind} ({count:,} weights)" for kind, count in odd.items()) or "no linear layer at all"
        n_linear = sum(weight.numel() for weight in weights.values())
        raise ValueError(
            f"{type(model).__name__} is not covered: {n_linear:,} of {n_linear + odd.total():,} weights lie in "
            f"nn.Linear, the rest in {listed}"
        )
    return weights


def prune_weight(weight: Tensor, recipe: Recipe) -> Tensor:
    """The weight with the recipe's share of it set to zero; itself when the recipe prunes nothing."""
    match recipe.pattern:
        case "none":
            return weight
        case "unstructured":
            return weight * prune.magnitude_mask(weight, recipe.sparsity)
        case "block":
            return weight * prune.block_mask(weight, recipe.sparsity, recipe.block)
        case "channel":
            return weight * prune.channel_mask(weight, recipe.sparsity)
    return weight * prune.n_m_mask(weight, 2, 4)


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all weights in their formats: compressed layers as stored, every other parameter once in its dtype."""
    compressed = [module for module in model.modules() if isinstance(module, CompressedLinear)]
    biases = [module.bias for module in compressed if module.bias is not None]
    inner = {id(parameter) for module in compressed for parameter in module.parameters()}
    plain = [*(p for p in model.parameters() if id(p) not in inner), *biases]
    return sum(module.stored_bytes for module in compressed) + sum(t.numel() * t.element_size() for t in plain)


def _replace_linears(model: nn.Module, recipe: Recipe, notes: list[str]) -> int:
    """Replaces the linear layers in place of the copy; the number of weights reached."""
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    covered = 0
    for name in matmul_weights(model):
        linear = model.get_submodule(name)
        if linear is head and is_tied and recipe.head_format:
            copied = make_linear(linear.weight.detach(), weight_format=recipe.head_format, kernel_path="fused")
            model.set_submodule(name, copied)
            covered += linear.weight.numel()
            continue
        if linear is head and is_tied:
            notes.append(f"{name} is tied to the embedding and keeps {str(linear.weight.dtype).removeprefix('torch.')}")
            continue
        model.set_submodule(name, _compressed(name, linear, recipe, notes))
        covered += linear.weight.numel()
    if recipe.sparsity and recipe.sparse_format == "dense":
        notes.append("stored_dense: pruned weights are kept as zeros and save neither bytes nor products")
    return covered


def _compressed(name: str, linear: nn.Linear, recipe: Recipe, notes: list[str]) -> CompressedLinear:
    kernel, path = _kernel_for(name, linear, recipe, notes)
    try:
        return make_linear(
            prune_weight(linear.weight.detach(), recipe),
            None if linear.bias is None else linear.bias.detach(),
            weight_format=recipe.weight_format,
            kernel_path=path,
            kernel=kernel,
            granularity=recipe.granularity,
            group_size=recipe.group_size,
            symmetric=recipe.symmetric,
            sparse_format=recipe.sparse_format,
            block=recipe.block,
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _kernel_for(name: str, linear: nn.Linear, recipe: Recipe, notes: list[str]) -> tuple[str, str]:
    """The recipe's kernel and path, or "tiled" for a layer whose shape its kernel does not take, with a note."""
    if not recipe.kernel or recipe.kernel_path == "stored_dense":
        return recipe.kernel, recipe.kernel_path
    fields = ("weight_format", "sparse_format", "granularity", "group_size", "symmetric", "block")
    layout = WeightLayout(**{name: getattr(recipe, name) for name in fields})
    shape = tuple(linear.weight.shape)
    infos = {info.kernel: info for info in available_kernels(recipe.weight_format, layout=layout, shape=shape)}
    wanted, instead = infos.get(recipe.kernel), infos.get("tiled")
    if wanted and not wanted.available and instead and instead.available:
        notes.append(f"{name}: {wanted.kernel} {wanted.reason}; tiled instead")
        return instead.kernel, instead.kernel_path
    return recipe.kernel, recipe.kernel_path

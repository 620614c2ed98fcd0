"""The two steps that a language model's time consists of, as functions without arguments, ready to be timed.

A prefill reads a whole prompt into an empty cache. A decode step reads one token against a cache of fixed length: the
cache is cut back afterward, so every call does the same work. `prefill` and `decode` go through the model's own
forward, so what Python and the library cost is part of the time, for the standard and the variant alike; `loop` runs
the same layers in `compress.decoder`, `kernels` only their products.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashstudy.compress.decoder import Decoder
from flashstudy.compress.kv_cache import head_dim
from flashstudy.compress.variants import Variant
from flashstudy.facts.models import ModelShape


def prefill(variant: Variant, ids: Tensor, *, head: bool = True) -> Callable[[], Tensor]:
    """A call that reads ids [batch, tokens] into a new cache and returns the last position's logits.

    Without `head` it ends at the last decoder layer and returns the hidden states.
    """

    @torch.inference_mode()
    def step() -> Tensor:
        cache = variant.make_cache()
        if not head:
            return variant.model.get_decoder()(input_ids=ids, cache=cache, use_cache=True).last_hidden_state
        return variant.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits

    return step


def decode(variant: Variant, *, context: int, batch: int = 1, seed: int = 0, head: bool = True) -> Callable[[], Tensor]:
    """A call that reads one token a sequence behind `context` cached tokens and returns its logits, or hidden states.

    The cache holds seeded normal keys and values instead of a prompt's: time does not depend on them, and filling it
    this way takes no forward pass.
    """
    cache = filled_cache(variant, context=context, batch=batch, seed=seed)
    device = variant.model.device
    token = torch.zeros(batch, 1, dtype=torch.long, device=device)
    forward = variant.model if head else variant.model.get_decoder()

    @torch.inference_mode()
    def step() -> Tensor:
        output = forward(input_ids=token, cache=cache, use_cache=True)
        cache.crop(-1)
        return output[0]

    return step


def loop(
    variant: Variant, *, context: int, batch: int = 1, seed: int = 0, compiled: bool = False
) -> Callable[[], Tensor]:
    """The step of `decode` in the measuring loop: static cache, no library code between the kernels."""
    decoder = Decoder(variant, capacity=context + 1, batch=batch, compiled=compiled)
    decoder.fill(context, seed)
    token = torch.zeros(batch, dtype=torch.long)

    def step() -> Tensor:
        decoder.length = context
        return decoder.step(token)

    return step


def kernels(variant: Variant, *, context: int, batch: int = 1, seed: int = 0) -> Callable[[], None]:
    """A call of all products of one step (linear layers, head, attention behind `context` tokens) and nothing else."""
    decoder = Decoder(variant, capacity=context + 1, batch=batch)
    decoder.fill(context, seed)
    decoder.length = context + 1
    calls = [call for _, call in decoder.kernels()]

    @torch.inference_mode()
    def run() -> None:
        for call in calls:
            call()

    return run


def head(variant: Variant) -> Callable[[], Tensor]:
    """A call of the output head alone on one row, as a prefill ends; ValueError for a model without one."""
    layer = variant.model.get_output_embeddings()
    if layer is None:
        raise ValueError(f"{type(variant.model).__name__} has no output head")
    states = torch.ones(1, layer.in_features, dtype=variant.model.dtype, device=variant.model.device)
    return torch.inference_mode()(lambda: layer(states))


def in_turns(calls: Sequence[Callable[[], Tensor]]) -> Callable[[], Tensor]:
    """A call of the next one of `calls` each time: slices of a model in turns stream all its weights.

    They run the same code on tensors of the same sizes, so a first call of one of them warms up all.
    """
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def layers_beyond(model_shape: ModelShape, weight_bytes: float, llc_bytes: int) -> int:
    """Decoder layers whose weights of `weight_bytes` each exceed the last-level cache twice, at most all of them.

    Read in turns, twice the cache already means that a weight is gone before it is read again.
    """
    n_weights = sum(rows * columns for rows, columns in model_shape.layer_matrices.values())
    return min(model_shape.n_layers, math.ceil(2 * llc_bytes / (n_weights * weight_bytes)))


def dequantize_cache(variant: Variant, *, context: int, batch: int = 1, seed: int = 0) -> Callable[[], None]:
    """A call that only dequantizes a quantized cache of `context` tokens, every layer, as one decode step does.

    Raises ValueError for a variant whose cache is not quantized.
    """
    cache = filled_cache(variant, context=context, batch=batch, seed=seed)
    if not all(hasattr(layer, "dequantize") for layer in cache.layers):
        raise ValueError(
            f"{variant.recipe.name} keeps its cache in {variant.recipe.kv_format!r} and dequantizes nothing"
        )

    @torch.inference_mode()
    def dequantize() -> None:
        for layer in cache.layers:
            layer.dequantize()

    return dequantize


@torch.inference_mode()
def filled_cache(variant: Variant, *, context: int, batch: int, seed: int):
    """The variant's cache holding `context` random tokens in every layer."""
    config = variant.model.config.get_text_config()
    n_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    generator = torch.Generator().manual_seed(seed)
    cache = variant.make_cache()
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, batch, n_heads, context, head_dim(config), generator=generator).to(
            device=variant.model.device, dtype=variant.model.dtype
        )
        cache.update(keys, values, layer)
    return cache

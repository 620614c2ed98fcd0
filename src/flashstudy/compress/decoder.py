"""A decode loop that does not hide the kernels: a Llama-like model's own modules over a static cache.

transformers' forward spends a third and more of a small model's step in Python: mask building, cache classes, hooks.
Here a layer is its linear layers, two batched products for attention, and a few elementwise operations, for the
standard and for every variant alike. Attention multiplies each KV head with its group of query heads as rows.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, silu, softmax

from flashstudy.compress import inspect_model
from flashstudy.compress.kv_cache import head_dim
from flashstudy.compress.static_cache import StaticCache
from flashstudy.compress.variants import Variant

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")  # alike but for biases


class Decoder:
    """A variant's model, one cache for `batch` sequences of equal length, and how many tokens it holds (`length`).

    Setting `length` back forgets the tokens after it. compiled: elementwise operations go through torch.compile, once
    for all layers. Raises ValueError for a model whose layers are not Llama's, by name, and for a sliding window that
    is shorter than the capacity.
    """

    def __init__(self, variant: Variant, *, capacity: int, batch: int = 1, compiled: bool = False):
        model = variant.model
        check_architecture(model, capacity)
        config = model.config
        self.variant, self.batch, self.capacity, self.length = variant, batch, capacity, 0
        self.head_dim, self.n_kv_heads = head_dim(config), config.num_key_value_heads
        self.group = config.num_attention_heads // self.n_kv_heads
        self.cosine, self.sine = _angles(model, capacity)
        self.cache = StaticCache(
            config.num_hidden_layers, batch, self.n_kv_heads, capacity, self.head_dim, model.dtype,
            variant.recipe.kv_format,
        )  # fmt: skip
        self.rotate, self.gated = (torch.compile(_rotate), torch.compile(_gated)) if compiled else (_rotate, _gated)

    @torch.inference_mode()
    def fill(self, tokens: int, seed: int = 0) -> None:
        """Lets the cache hold `tokens` random tokens: time does not depend on what they are."""
        self._check_room(0, tokens)
        generator = torch.Generator().manual_seed(seed)
        shape = (2, self.batch, self.n_kv_heads, tokens, self.head_dim)
        for layer in range(len(self.cache.layers)):
            keys, values = torch.randn(shape, generator=generator).to(self.variant.model.dtype)
            self.cache.put(layer, keys, values, 0)
        self.length = tokens

    def step(self, token: Tensor) -> Tensor:
        """Logits [batch, vocabulary] after one more token [batch] a sequence."""
        return self.read(token[:, None])

    @torch.inference_mode()
    def read(self, ids: Tensor) -> Tensor:
        """Logits [batch, vocabulary] of the last position after the new tokens ids [batch, n]; they stay in the cache.

        Raises ValueError when they do not fit.
        """
        start, n_new = self.length, ids.shape[1]
        self._check_room(start, n_new)
        decoder = self.variant.model.get_decoder()
        x = embedding(ids, decoder.embed_tokens.weight)
        for number, layer in enumerate(decoder.layers):
            x = self._layer(number, layer, x, start)
        self.length = start + n_new
        last = _normed(x[:, -1], decoder.norm)
        return self.variant.model.get_output_embeddings()(last)

    @torch.inference_mode()
    def generate(self, ids: Tensor, n_new: int) -> Tensor:
        """The n_new most likely tokens, one after the other, behind ids [batch, n]: [batch, n_new]."""
        token = self.read(ids).argmax(dim=-1)
        chosen = [token]
        while len(chosen) < n_new:
            token = self.step(token).argmax(dim=-1)
            chosen.append(token)
        return torch.stack(chosen, dim=1)

    def kernels(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """The products of one step at the present length, each with inputs of its own: (name, call).

        Linear layers and head by module name, and each layer's attention. What a step spends beyond their sum is
        Python, norms, rotation, activation and cache writes.
        """
        model, like = self.variant.model, dict(dtype=self.variant.model.dtype)
        multiplied = {id(module) for module in inspect_model.layers(model)}
        for name, module in model.named_modules():
            if id(module) in multiplied:
                x = torch.ones(self.batch, module.in_features, **like)
                yield name, (lambda module=module, x=x: module(x))
        query = torch.ones(self.batch, self.n_kv_heads, self.group, self.head_dim, **like)
        for number in range(len(self.cache.layers)):
            yield f"attention {number}", (lambda number=number: self._few_queries(query, number, self.length))

    def _layer(self, number: int, layer: nn.Module, x: Tensor, start: int) -> Tensor:
        """One decoder layer; x [batch, n, hidden] is the residual stream."""
        attention, mlp = layer.self_attn, layer.mlp
        normed = _normed(x, layer.input_layernorm)
        mixed = self._attend(number, attention, normed, start)
        x = x + attention.o_proj(mixed)
        normed = _normed(x, layer.post_attention_layernorm)
        return x + mlp.down_proj(self.gated(mlp.gate_proj(normed), mlp.up_proj(normed)))

    def _attend(self, number: int, attention: nn.Module, x: Tensor, start: int) -> Tensor:
        batch, n_new = x.shape[:2]
        stop = start + n_new
        queries, keys, values = (
            layer(x).view(batch, n_new, -1, self.head_dim).transpose(1, 2)  # [batch, heads, n, head_dim]
            for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cosine, sine = self.cosine[start:stop], self.sine[start:stop]
        self.cache.put(number, self.rotate(keys, cosine, sine), values, start)
        queries = self.rotate(queries, cosine, sine)
        if n_new == 1:
            grouped = queries.view(batch, self.n_kv_heads, self.group, self.head_dim)
            return self._few_queries(grouped, number, stop).view(batch, 1, -1)
        return self._many_queries(queries, number, start, stop)

    def _few_queries(self, queries: Tensor, number: int, stop: int) -> Tensor:
        """One query a head: queries [batch, kv heads, group, head_dim], the group as the rows of one product."""
        keys, values = self.cache.get(number, stop)
        scores = queries @ keys.transpose(-1, -2)
        return softmax(scores.mul_(1 / math.sqrt(self.head_dim)), dim=-1) @ values

    def _many_queries(self, queries: Tensor, number: int, start: int, stop: int) -> Tensor:
        """A prompt's queries [batch, heads, n, head_dim] see all cached tokens and the new ones up to themselves."""
        keys, values = (part.repeat_interleave(self.group, dim=1) for part in self.cache.get(number, stop))
        seen = None
        if start:
            seen = torch.ones(stop - start, stop, dtype=torch.bool).tril_(diagonal=start)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, seen, is_causal=seen is None)
        return mixed.transpose(1, 2).flatten(2)

    def _check_room(self, start: int, n_new: int) -> None:
        if n_new < 1 or start + n_new > self.capacity:
            raise ValueError(f"{n_new} tokens behind {start} do not fit a cache of {self.capacity}")


def runs(model: nn.Module) -> bool:
    """Does the loop run this model?"""
    try:
        check_architecture(model)
    except ValueError:
        return False
    return True


def check_architecture(model: nn.Module, capacity: int = 0) -> None:
    """Raise ValueError, with the reason, for a model that the loop does not run."""
    name = type(model).__name__
    if name not in ARCHITECTURES:
        raise ValueError(f"{name} is not run by the measuring loop, which takes {', '.join(ARCHITECTURES)}")
    config = model.config
    if config.hidden_act != "silu":
        raise ValueError(f"{name} with hidden_act {config.hidden_act!r} is not run by the measuring loop, only 'silu'")
    uses_window = getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None)
    if window and uses_window and window < capacity:
        raise ValueError(f"{name} attends to {window} tokens only, less than the loop's capacity of {capacity}")


def _angles(model: nn.Module, capacity: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [capacity, head_dim] of every position, from the model's own rotary embedding."""
    positions = torch.arange(capacity)[None]
    cosine, sine = model.get_decoder().rotary_emb(torch.ones(1, dtype=model.dtype), positions)
    return cosine[0], sine[0]


def _normed(x: Tensor, norm: nn.Module) -> Tensor:
    """RMSNorm in fp32. torch's own function takes three times as long for one row: a dozen operations in ATen."""
    wide = x.float()
    norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norms.square_().div_(x.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(norm.weight)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding of x [batch, heads, n, head_dim]: first and second half are the pairs."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cosine, torch.cat((-second, first), dim=-1), sine)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate).mul_(up)

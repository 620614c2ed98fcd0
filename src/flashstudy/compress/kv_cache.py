"""KV caches that store integers: smaller by the ratio of the widths, at the price of a conversion in every step.

`Int8Cache` keeps one scale per (batch, head, token) and dequantizes all cached tokens at each update, which is what a
cache without its own attention kernel has to do: the attention after it sees ordinary floats.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

Q_MAX = 127


class Int8Layer(DynamicLayer):
    """One layer's keys and values as int8 [batch, heads, tokens, head_dim] with a scale [batch, heads, tokens, 1] each.

    `update` quantizes the new tokens (symmetric, by head and token), appends them and returns all tokens dequantized,
    the new ones too, so that attention sees the same values in a prefill as in the decode steps after it.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty codes and scales of the states' batch, heads and width."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.keys, self.key_scale = quantize_tokens(key_states[..., :0, :])
        self.values, self.value_scale = quantize_tokens(value_states[..., :0, :])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Appends the new tokens; all keys and values, dequantized to the model's dtype."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new_keys, new_key_scale = quantize_tokens(key_states)
        new_values, new_value_scale = quantize_tokens(value_states)
        self.keys = torch.cat([self.keys, new_keys], dim=-2)
        self.key_scale = torch.cat([self.key_scale, new_key_scale], dim=-2)
        self.values = torch.cat([self.values, new_values], dim=-2)
        self.value_scale = torch.cat([self.value_scale, new_value_scale], dim=-2)
        return self.dequantize()

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """All cached keys and values as floats of the model's dtype."""
        return self.keys.to(self.dtype).mul_(self.key_scale), self.values.to(self.dtype).mul_(self.value_scale)

    @property
    def stored_bytes(self) -> int:
        """Bytes of codes and scales."""
        tensors = (self.keys, self.key_scale, self.values, self.value_scale) if self.is_initialized else ()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens; as in transformers 5 the number is negative or 0."""
        super().crop(tokens_to_remove)
        if tokens_to_remove and self.is_initialized:
            self._map_scales(lambda scale: scale[..., :tokens_to_remove, :])

    def reset(self) -> None:
        """Drops all tokens."""
        super().reset()
        self.key_scale = self.value_scale = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Puts the batch into the order of `beam_idx`."""
        super().reorder_cache(beam_idx)
        self._map_scales(lambda scale: scale.index_select(0, beam_idx.to(scale.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence of the batch."""
        super().batch_repeat_interleave(repeats)
        self._map_scales(lambda scale: scale.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the given sequences of the batch."""
        super().batch_select_indices(indices)
        self._map_scales(lambda scale: scale[indices, ...])

    def offload(self) -> None:
        """Refused: the scales would stay behind."""
        raise NotImplementedError("Int8Layer cannot be offloaded")

    def _map_scales(self, change) -> None:
        if self.get_seq_length():
            self.key_scale, self.value_scale = change(self.key_scale), change(self.value_scale)


class Int8Cache(Cache):
    """A transformers cache of Int8Layers, one for each layer of the model that `config` describes.

    Raises ValueError for models whose layers do not all attend to every earlier token (sliding windows, linear
    attention): their caches drop tokens by rules that are not built here.
    """

    def __init__(self, config):
        n_layers = len(full_attention_layers(config))
        super().__init__(layers=[Int8Layer() for _ in range(n_layers)])

    @property
    def stored_bytes(self) -> int:
        """Bytes of all layers' codes and scales."""
        return sum(layer.stored_bytes for layer in self.layers)


def make_cache(kv_format: str, kv_path: str, config) -> Cache:
    """An empty cache for the model of `config`: kv_format "none" in the model's dtype, "int8" dequantized at each step.

    Raises ValueError for combinations that are not built.
    """
    if kv_format == "none":
        return DynamicCache(config=config)
    if (kv_format, kv_path) == ("int8", "dequantize_then_matmul"):
        return Int8Cache(config)
    if kv_path == "unknown":
        raise ValueError("kv_path 'unknown' names no path: let measure.kernels.fill choose one first")
    raise ValueError(
        f"no cache for kv_format {kv_format!r} by kv_path {kv_path!r}; there are 'none' (dense) and 'int8' "
        "(dequantize_then_matmul)"
    )


def quantize_tokens(states: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 of states [..., tokens, head_dim] and their scales [..., tokens, 1], symmetric, -128 never used."""
    if not states.shape[-2]:
        return states.to(torch.int8), states[..., :1]
    scale = states.abs().amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(states.dtype).tiny) / Q_MAX
    return (states / scale).round_().clamp_(-Q_MAX, Q_MAX).to(torch.int8), scale


def full_attention_layers(config) -> list:
    """The layers of the model's ordinary cache; ValueError when one of them is not plain full attention."""
    layers = DynamicCache(config=config).layers
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if odd or not layers:
        raise ValueError(f"an int8 cache covers full attention only; this model caches {', '.join(odd) or 'nothing'}")
    return layers

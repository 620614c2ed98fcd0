"""KV caches that store integers: smaller by the ratio of the widths, at the price of a conversion in every step.

`IntegerCache` keeps one scale per (batch, head, token) at 8 bits and one per 32 values of it at 4, and dequantizes all
cached tokens at each update, which is what a cache without its own attention kernel has to do: the attention after it
sees ordinary floats.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from flashstudy.compress.stores import INT4_LEVELS, INT4_SHIFT, in_pairs, pairs_by_table

BITS = {"int8": 8, "int4": 4}
Q_MAX = {8: 127, 4: 7}
INT4_GROUP = 32  # values that share a scale at 4 bits


class IntegerLayer(DynamicLayer):
    """One layer's keys and values as codes [batch, heads, tokens, …] with scales [batch, heads, tokens, n_groups] each.

    `update` quantizes the new tokens (symmetric, by head and token), appends them and returns all tokens dequantized,
    the new ones too, so that attention sees the same values in a prefill as in the decode steps after it.
    """

    def __init__(self, bits: int):
        super().__init__()
        self.bits = bits

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty codes and scales of the states' batch, heads and width."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.keys, self.key_scale = quantize_tokens(key_states[..., :0, :], self.bits)
        self.values, self.value_scale = quantize_tokens(value_states[..., :0, :], self.bits)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Appends the new tokens; all keys and values, dequantized to the model's dtype."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new_keys, new_key_scale = quantize_tokens(key_states, self.bits)
        new_values, new_value_scale = quantize_tokens(value_states, self.bits)
        self.keys = torch.cat([self.keys, new_keys], dim=-2)
        self.key_scale = torch.cat([self.key_scale, new_key_scale], dim=-2)
        self.values = torch.cat([self.values, new_values], dim=-2)
        self.value_scale = torch.cat([self.value_scale, new_value_scale], dim=-2)
        return self.dequantize()

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """All cached keys and values as floats of the model's dtype."""
        return (
            dequantize_tokens(self.keys, self.key_scale, self.bits),
            dequantize_tokens(self.values, self.value_scale, self.bits),
        )

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
        raise NotImplementedError("an integer cache cannot be offloaded")

    def _map_scales(self, change) -> None:
        if self.get_seq_length():
            self.key_scale, self.value_scale = change(self.key_scale), change(self.value_scale)


class IntegerCache(Cache):
    """A transformers cache of IntegerLayers, one for each layer of the model that `config` describes.

    Raises ValueError for models whose layers do not all attend to every earlier token (sliding windows, linear
    attention): their caches drop tokens by rules that are not built here; and for a head that 4-bit groups do not fit.
    """

    def __init__(self, config, bits: int = 8):
        n_layers = len(full_attention_layers(config))
        if bits == 4 and head_dim(config) % INT4_GROUP:
            raise ValueError(f"an int4 cache takes heads divisible by {INT4_GROUP}, not head_dim {head_dim(config)}")
        super().__init__(layers=[IntegerLayer(bits) for _ in range(n_layers)])

    @property
    def stored_bytes(self) -> int:
        """Bytes of all layers' codes and scales."""
        return sum(layer.stored_bytes for layer in self.layers)


def make_cache(kv_format: str, kv_path: str, config) -> Cache:
    """An empty cache for the model of `config`: kv_format "none" in the model's dtype, integers dequantized every step.

    Raises ValueError for combinations that are not built.
    """
    if kv_format == "none":
        return DynamicCache(config=config)
    if kv_format in BITS and kv_path == "dequantize_then_matmul":
        return IntegerCache(config, BITS[kv_format])
    if kv_path == "unknown":
        raise ValueError("kv_path 'unknown' names no path: let measure.kernels.fill choose one first")
    raise ValueError(
        f"no cache for kv_format {kv_format!r} by kv_path {kv_path!r}; there are 'none' (dense) and "
        f"{' and '.join(map(repr, BITS))} (dequantize_then_matmul)"
    )


def quantize_tokens(states: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Codes of states [..., tokens, head_dim] and their scales [..., tokens, n_groups], symmetric.

    8 bits: int8 codes, one group, -128 never used. 4 bits: groups of 32, two codes of -7 … 7 a byte, [..., head_dim/2].
    """
    q_max = Q_MAX[bits]
    if not states.shape[-2]:
        return _empty_codes(states, bits)
    groups = states.unflatten(-1, (-1, INT4_GROUP)) if bits == 4 else states[..., None, :]
    scale = groups.abs().amax(dim=-1).clamp_(min=torch.finfo(states.dtype).tiny) / q_max
    codes = (groups / scale[..., None]).round_().clamp_(-q_max, q_max).to(torch.int8).flatten(-2)
    return (codes if bits == 8 else in_pairs((codes + INT4_SHIFT).to(torch.uint8))), scale


def dequantize_tokens(codes: Tensor, scale: Tensor, bits: int = 8) -> Tensor:
    """The states [..., tokens, head_dim] in the dtype of `scale`."""
    if bits == 8:
        return codes.to(scale.dtype).mul_(scale)
    states = pairs_by_table(codes.flatten(0, -2), INT4_LEVELS, scale.dtype).view(*codes.shape[:-1], -1, INT4_GROUP)
    return states.mul_(scale[..., None]).flatten(-2)


def head_dim(config) -> int:
    """Width of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _empty_codes(states: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    if bits == 8:
        return states.to(torch.int8), states[..., :1]
    return states[..., ::2].to(torch.uint8), states[..., ::INT4_GROUP]


def full_attention_layers(config) -> list:
    """The layers of the model's ordinary cache; ValueError when one of them is not plain full attention."""
    layers = DynamicCache(config=config).layers
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if odd or not layers:
        raise ValueError(f"an integer cache covers full attention only; this model caches {', '.join(odd) or 'none'}")
    return layers

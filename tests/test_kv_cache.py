import pytest
import torch
from conftest import make_tiny_model
from transformers import DynamicCache, LlamaConfig, MistralConfig

from flashstudy.compress.kv_cache import IntegerCache, dequantize_tokens, make_cache, quantize_tokens

IDS = torch.tensor([[1, 5, 9, 33, 70, 8, 4, 100]])


def states(tokens, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, batch, 2, tokens, 16, generator=generator)


@pytest.fixture
def cache(tiny_model):
    return IntegerCache(tiny_model.config)


def test_one_token_rounds_as_by_hand():
    codes, scale = quantize_tokens(torch.tensor([[[[1.27, -0.64, 0.004, 0.0]]]]))
    assert scale.item() == pytest.approx(0.01)
    assert codes.tolist() == [[[[127, -64, 0, 0]]]]


def test_each_token_and_head_has_its_own_scale():
    keys, _ = states(4)
    keys[:, :, 0] *= 1000  # a first token's spike
    codes, scale = quantize_tokens(keys)
    error = (codes * scale - keys).abs()
    assert scale.shape == (2, 2, 4, 1)
    assert (error <= scale / 2 * 1.001).all()
    assert error[:, :, 1:].max() < 0.02
    assert codes.min() >= -127


def test_a_zero_token_stays_zero():
    codes, scale = quantize_tokens(torch.zeros(1, 1, 3, 16))
    assert (codes * scale == 0).all() and scale.isfinite().all()


def test_appending_returns_all_tokens_within_half_a_step(cache):
    keys, values = states(5)
    for part in (slice(0, 3), slice(3, 4), slice(4, 5)):
        found_keys, found_values = cache.update(keys[:, :, part], values[:, :, part], 0)
    assert cache.get_seq_length() == 5
    assert found_keys.shape == keys.shape
    assert (found_keys - keys).abs().max() < keys.abs().max() / 127
    assert (found_values - values).abs().max() < values.abs().max() / 127


def test_tokens_at_once_and_one_by_one_are_the_same(tiny_model):
    keys, values = states(6)
    at_once, stepwise = IntegerCache(tiny_model.config), IntegerCache(tiny_model.config)
    expected = at_once.update(keys, values, 1)
    for token in range(6):
        found = stepwise.update(keys[:, :, token : token + 1], values[:, :, token : token + 1], 1)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_stored_bytes_match_the_hand_count(cache):
    keys, values = states(5)
    cache.update(keys, values, 0)
    # batch 2, 2 heads, 5 tokens: 16 codes and an fp32 scale each, keys and values
    assert cache.stored_bytes == 2 * (2 * 2 * 5) * (16 + 4)


def test_cropping_takes_the_last_tokens_away(cache):
    keys, values = states(5)
    expected = cache.update(keys, values, 0)
    cache.crop(-2)
    assert cache.get_seq_length() == 3
    found = cache.update(keys[:, :, 3:], values[:, :, 3:], 0)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    cache.crop(0)
    assert cache.get_seq_length() == 5
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)


def test_batches_can_be_selected_repeated_reordered_and_reset(cache):
    keys, values = states(4, batch=3)
    cache.update(keys, values, 0)
    layer = cache.layers[0]
    whole = layer.dequantize()[0]
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert torch.equal(layer.dequantize()[0], whole[[2, 0, 1]])
    cache.batch_select_indices(torch.tensor([1]))
    assert torch.equal(layer.dequantize()[0], whole[[0]])
    cache.batch_repeat_interleave(2)
    assert torch.equal(layer.dequantize()[0], whole[[0, 0]])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.update(keys, values, 0)[0].shape == keys.shape


def test_a_model_predicts_nearly_the_same_through_it(tiny_model):
    with torch.inference_mode():
        expected = tiny_model(IDS, use_cache=False).logits
        found = tiny_model(IDS, cache=IntegerCache(tiny_model.config), use_cache=True).logits
    assert 0 < (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_prefill_and_decode_through_it_agree(tiny_model):
    with torch.inference_mode():
        at_once = tiny_model(IDS, cache=IntegerCache(tiny_model.config), use_cache=True).logits[:, -1]
        cache = IntegerCache(tiny_model.config)
        for token in IDS[0]:
            step = tiny_model(token.reshape(1, 1), cache=cache, use_cache=True).logits[:, -1]
    assert torch.allclose(step, at_once, atol=1e-4 * at_once.abs().max())


def test_generation_with_a_batch_matches_the_model_with_dense_keys(tiny_model):
    ids = torch.cat([IDS, IDS.flip(1)])
    options = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=2)
    cache = IntegerCache(tiny_model.config)
    with torch.inference_mode():
        found = tiny_model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **options)
        expected = tiny_model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(found, expected)
    assert cache.get_seq_length() == ids.shape[1] + 4


def test_formats_and_paths_give_their_caches(tiny_model):
    config = tiny_model.config
    assert type(make_cache("none", "dense", config)) is DynamicCache
    assert isinstance(make_cache("int8", "dequantize_then_matmul", config), IntegerCache)
    with pytest.raises(ValueError, match="'unknown' names no path"):
        make_cache("int8", "unknown", config)
    with pytest.raises(ValueError, match="no cache for kv_format 'fp8'"):
        make_cache("fp8", "dequantize_then_matmul", config)


def test_sliding_windows_are_refused_by_name():
    config = MistralConfig(sliding_window=16, num_hidden_layers=2)
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
        make_cache("int8", "dequantize_then_matmul", config)


def test_bf16_models_get_bf16_back():
    model = make_tiny_model().bfloat16()
    keys, values = states(3)
    found, _ = IntegerCache(model.config).update(keys.bfloat16(), values.bfloat16(), 0)
    assert found.dtype == torch.bfloat16


def test_four_bits_round_as_by_hand_and_share_a_byte():
    states = torch.zeros(1, 1, 1, 32)
    states[..., :4] = torch.tensor([7.0, -3.2, 0.4, 0.6])
    codes, scale = quantize_tokens(states, bits=4)
    assert scale.tolist() == [[[[1.0]]]]
    # shifted by 8, earlier code in the low half: 15 | 5 << 4, 8 | 9 << 4
    assert codes[0, 0, 0, :2].tolist() == [15 | 5 << 4, 8 | 9 << 4] and codes.shape[-1] == 16
    assert dequantize_tokens(codes, scale, 4)[0, 0, 0, :4].tolist() == [7.0, -3.0, 0.0, 1.0]


def test_a_four_bit_cache_appends_crops_and_counts_its_bytes():
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
    keys = torch.randn(2, 2, 6, 64)
    cache = make_cache("int4", "dequantize_then_matmul", config)
    expected = cache.update(keys, -keys, 0)
    assert (expected[0] - keys).abs().max() <= keys.abs().max() / 7 / 2 * 1.001
    # 24 tokens and heads: 32 bytes of codes and two fp32 scales each, for keys and for values
    assert cache.stored_bytes == 2 * 24 * (32 + 2 * 4)
    cache.crop(-2)
    found = cache.update(keys[:, :, 4:], -keys[:, :, 4:], 0)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    with pytest.raises(ValueError, match="divisible by 32, not head_dim 16"):
        make_cache("int4", "dequantize_then_matmul", LlamaConfig(hidden_size=64, num_attention_heads=4))

import dataclasses

import pytest

from flashstudy.facts import models
from flashstudy.facts.recipes import ARTICLE_FLASH, Recipe, standard
from flashstudy.predict import cost

MODELS = models.load()
BF16 = standard("bf16")
INT8 = Recipe("int8", weight_format="int8", kernel_path="fused")
NAIVE = dataclasses.replace(INT8, kernel_path="dequantize_then_matmul")
BITMAP = Recipe("bitmap", weight_format="bf16", sparsity=0.5, pattern="unstructured", sparse_format="bitmap",
                kernel_path="dequantize_then_matmul")  # fmt: skip


def read_bytes(model: str, recipe: Recipe, **size) -> float:
    return cost.decode_read_bytes(MODELS[model], recipe, compute_format="bf16", **size)


def step_flop(model: str, recipe: Recipe, **size) -> float:
    return sum(work.flop * times for work, times in cost.step(MODELS[model], recipe, compute_format="bf16", **size))


def test_a_plain_product_by_hand():
    work = cost.linear(8, 4, 3, BF16, "bf16")
    assert work.flop == 2 * 3 * 8 * 4
    assert (work.weight_bytes, work.index_bytes) == (8 * 4 * 2, 0)
    assert work.activation_bytes == 3 * (8 + 4) * 2
    assert (work.n_kernels, work.dequantized_values, work.unpacked_values) == (1, 0, 0)


def test_dequantizing_first_reads_the_same_and_moves_the_full_width_twice():
    fused, naive = (cost.linear(8, 4, 3, recipe, "bf16") for recipe in (INT8, NAIVE))
    assert naive.read_bytes == fused.read_bytes == 8 * 4 + 8 * 2  # values, one 16-bit scale a row
    assert (fused.dequantized_bytes, naive.dequantized_bytes) == (0, 2 * 8 * 4 * 2)
    assert naive.dequantized_values == 8 * 4
    assert naive.n_kernels == fused.n_kernels + 2


def test_a_fused_kernel_converts_again_for_every_tile_of_rows():
    assert cost.linear(8, 4, 128, INT8, "bf16").dequantized_values == 32
    assert cost.linear(8, 4, 1024, INT8, "bf16").dequantized_values == 8 * 32
    assert cost.linear(8, 4, 1024, NAIVE, "bf16").dequantized_values == 32


def test_a_bitmap_saves_bytes_but_no_arithmetic():
    work = cost.linear(64, 64, 1, BITMAP, "bf16")
    assert work.weight_bytes == 64 * 64  # half of the values in 2 bytes each
    assert work.index_bytes == 64 * 64 / 8
    assert work.flop == cost.linear(64, 64, 1, BF16, "bf16").flop
    assert (work.unpacked_values, work.dequantized_values) == (64 * 64, 0)


def test_the_article_flash_unpacks_and_dequantizes():
    work = cost.linear(64, 64, 1, ARTICLE_FLASH, "bf16")
    assert (work.unpacked_values, work.dequantized_values) == (64 * 64, 64 * 64)
    assert work.unpacked_bytes == 2 * 64 * 64 * 1  # int8 values among zeros, written and read
    assert work.dequantized_bytes == 2 * 64 * 64 * 2


def test_csr_skips_the_arithmetic_of_zeros():
    csr = Recipe("csr", sparsity=0.75, pattern="unstructured", sparse_format="csr", kernel_path="fused")
    work = cost.linear(64, 64, 2, csr, "fp32")
    assert work.flop == 2 * 2 * 64 * 64 * 0.25
    assert work.index_bytes == 4 * (64 * 64 * 0.25 + 65)
    assert work.unpacked_values == 0


def test_llama_3_8b_reads_weights_once_and_every_cache():
    weights = 2 * (8_030_261_248 - 128256 * 4096 - 65 * 4096)  # no look-up table, no norms
    assert read_bytes("llama3-8b", BF16, batch=3, context=1000) == weights + 3 * 1000 * 131_072


def test_llama_3_8b_crossover_matches_hand_count():
    assert cost.crossover_tokens(16_060_522_496, 131_072, batch=1) == pytest.approx(122_532, rel=1e-4)


def test_int8_cache_reads_half_of_bf16():
    recipe = dataclasses.replace(BF16, kv_format="int8", kv_path="fused")
    assert read_bytes("llama3-8b", BF16, batch=1, context=4096) - read_bytes(
        "llama3-8b", recipe, batch=1, context=4096
    ) == (4096 * 131_072 / 2)


def test_decode_does_two_flop_a_weight_and_attention_beside():
    llama = MODELS["llama3-8b"]
    attention = 4 * 32 * 32 * 128 * 1000  # scores and weighted values: layers, heads, head_dim, tokens
    assert (
        step_flop("llama3-8b", BF16, phase="decode", batch=1, context=1000) == 2 * llama.matmul_parameters + attention
    )


def test_prefill_attention_is_causal_in_a_decoder_and_full_in_an_encoder():
    decoder = cost.attention(MODELS["smollm2-135m"], BF16, "prefill", 1, 100, "bf16")
    assert decoder.flop == 4 * 30 * 9 * 64 * (100 * 101 / 2)
    encoder = cost.attention(MODELS["minilm-l6"], BF16, "prefill", 1, 100, "bf16")
    assert encoder.flop == 4 * 6 * 12 * 32 * 100**2


def test_prefill_puts_the_head_on_one_token_a_sequence():
    smollm = MODELS["smollm2-135m"]
    per_token = 2 * (smollm.matmul_parameters - smollm.head_parameters)
    attention = cost.attention(smollm, BF16, "prefill", 2, 100, "bf16").flop
    expected = 200 * per_token + 2 * 2 * smollm.head_parameters + attention
    assert step_flop("smollm2-135m", BF16, phase="prefill", batch=2, context=100) == expected


def test_a_batch_reaches_more_experts_than_a_token():
    assert cost.distinct_experts(8, 2, rows=1) == 2
    assert cost.distinct_experts(8, 2, rows=2) == pytest.approx(8 * (1 - 0.75**2))  # 3.5
    one, many = (read_bytes("mixtral-8x7b", BF16, batch=batch, context=1) for batch in (1, 64))
    expert_bytes = 32 * 3 * 4096 * 14336 * 2
    assert many - one == pytest.approx(6 * expert_bytes, rel=1e-3)  # all 8 instead of 2


def test_a_mixture_does_the_arithmetic_of_its_active_experts_only():
    mixtral = MODELS["mixtral-8x7b"]
    router = 32 * 8 * 4096  # left out of the step
    attention = 4 * 32 * 32 * 128
    expected = 2 * (mixtral.matmul_parameters - router) + attention
    assert step_flop("mixtral-8x7b", BF16, phase="decode", batch=1, context=1) == pytest.approx(expected)


def test_the_default_model_takes_its_parameters_and_its_cache():
    stored = cost.stored_bytes(MODELS["smollm2-135m"], standard("fp32"), batch=2, context=100, compute_format="fp32")
    assert stored == 4 * 134_515_008 + 2 * 100 * 30 * 2 * 3 * 64 * 4


def test_zeros_stored_dense_save_nothing():
    pruned = Recipe("pruned", weight_format="bf16", sparsity=0.5, pattern="unstructured", kernel_path="stored_dense")
    size = dict(batch=1, context=1, compute_format="bf16")
    smollm = MODELS["smollm2-135m"]
    assert cost.stored_bytes(smollm, pruned, **size) == cost.stored_bytes(smollm, BF16, **size)


def test_experts_of_their_own_width_are_read_beside_the_dense_layers():
    air = dataclasses.replace(MODELS["glm4.5-air"], intermediate=4096)  # as wide as the residual stream
    experts = 45 * (8 + 1) * 3 * 4096 * 1408  # 8 of 128 active, one shared
    attention = 46 * (2 * 4096 * 12288 + 2 * 4096 * 1024)
    weights = experts + attention + 3 * 4096 * 4096 + 151552 * 4096  # one dense layer, the head
    read = cost.decode_read_bytes(air, BF16, batch=1, context=1, compute_format="bf16")
    assert read == pytest.approx(2 * weights + air.kv_bytes_per_token(2), rel=1e-12)


def test_a_sliding_window_bounds_reading_and_arithmetic():
    mistral = dataclasses.replace(MODELS["mistral-7b"], sliding_window=4096, n_sliding_layers=32)
    at_window, beyond = (cost.attention(mistral, BF16, "decode", 1, n, "bf16") for n in (4096, 16384))
    assert (at_window.flop, at_window.kv_bytes) == (beyond.flop, beyond.kv_bytes)
    assert at_window.flop == 4 * 32 * 32 * 128 * 4096


def test_what_has_no_cost_is_refused():
    with pytest.raises(ValueError, match="kernel_path 'unknown' is not defined"):
        cost.linear(8, 4, 1, dataclasses.replace(INT8, kernel_path="unknown"), "bf16")
    with pytest.raises(ValueError, match="phase 'train'"):
        list(cost.step(MODELS["smollm2-135m"], BF16, phase="train", batch=1, context=1, compute_format="bf16"))

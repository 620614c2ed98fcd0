import dataclasses
import hashlib

import pytest
import torch
from conftest import make_tiny_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from flashstudy.compress import variants
from flashstudy.compress.linear import CompressedLinear
from flashstudy.compress.quantize import fake_quantize
from flashstudy.facts.recipes import ARTICLE_FLASH, BEST_FLASH, Recipe, elements, standard

IDS = torch.tensor([[1, 5, 9, 33, 70, 8, 4, 100]])
# q and o 64 × 64, k and v 32 × 64, gate, up and down 128 × 64: weights of the two layers
LINEAR_WEIGHTS = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
HEAD_WEIGHTS = 128 * 64
INT8 = Recipe(name="int8", weight_format="int8", kernel_path="fused", kernel="int8pack_tiled")
FILLED = dataclasses.replace(
    BEST_FLASH, sparse_format="dense", kernel_path="fused", kernel="int8pack", kv_path="dequantize_then_matmul"
)


def fingerprint(model):
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.float().numpy().tobytes())
    digest.update(str([type(module).__name__ for module in model.modules()]).encode())
    return digest.hexdigest()


def logits(model, cache=None):
    with torch.inference_mode():
        return model(IDS, cache=cache, use_cache=cache is not None).logits


def change(variant, loaded):
    reference = logits(loaded.model)
    cache = variant.make_cache()
    return ((logits(variant.model, cache) - reference).norm() / reference.norm()).item()


ALL = [standard(), standard("bf16"), INT8, ARTICLE_FLASH, FILLED, *elements(ARTICLE_FLASH).values()]


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: f"{recipe.name} {recipe.weight_format}")
def test_the_original_is_untouched(tiny_loaded, recipe):
    before = fingerprint(tiny_loaded.model)
    variant = variants.build(tiny_loaded, recipe)
    logits(variant.model, variant.make_cache())
    assert fingerprint(tiny_loaded.model) == before
    assert variant.model is not tiny_loaded.model


def test_the_standard_computes_exactly_the_same_from_the_same_memory(tiny_loaded):
    variant = variants.build(tiny_loaded, standard())
    assert torch.equal(logits(variant.model), logits(tiny_loaded.model))
    assert [p.data_ptr() for p in variant.model.parameters()] == [p.data_ptr() for p in tiny_loaded.model.parameters()]
    assert (variant.coverage, variant.notes) == (1.0, [])


def test_int8_shares_what_it_does_not_replace(tiny_loaded):
    variant = variants.build(tiny_loaded, INT8)
    mine = dict(tiny_loaded.model.named_parameters())
    for name, parameter in variant.model.named_parameters():
        assert parameter.data_ptr() == mine[name].data_ptr()
    assert sum(isinstance(module, CompressedLinear) for module in variant.model.modules()) == 14
    assert variant.model.lm_head.weight is variant.model.model.embed_tokens.weight


def test_coverage_and_bytes_match_the_hand_count(tiny_loaded):
    variant = variants.build(tiny_loaded, INT8)
    assert variant.coverage == pytest.approx(LINEAR_WEIGHTS / (LINEAR_WEIGHTS + HEAD_WEIGHTS))
    assert variant.notes == ["lm_head is tied to the embedding and keeps float32"]
    rows = 2 * (2 * 64 + 2 * 32 + 2 * 128 + 64)
    norms = 5 * 64
    assert variant.stored_bytes == LINEAR_WEIGHTS + 2 * rows + 4 * (HEAD_WEIGHTS + norms)
    assert variants.build(tiny_loaded, standard()).stored_bytes == 4 * (LINEAR_WEIGHTS + HEAD_WEIGHTS + norms)
    assert variants.build(tiny_loaded, standard("bf16")).stored_bytes == 2 * (LINEAR_WEIGHTS + HEAD_WEIGHTS + norms)


def test_an_untied_head_is_replaced_too(tiny_loaded):
    loaded = dataclasses.replace(tiny_loaded, model=make_tiny_model(tied=False))
    variant = variants.build(loaded, INT8)
    assert isinstance(variant.model.lm_head, CompressedLinear)
    assert (variant.coverage, variant.notes) == (1.0, [])


def test_int8_predicts_as_the_model_with_rounded_weights_does(tiny_loaded):
    rounded = make_tiny_model()
    for name, module in rounded.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight = nn.Parameter(fake_quantize(module.weight.detach(), bits=8), requires_grad=False)
    expected = logits(rounded)
    for kernel, bound in (("dequantize", 1e-5), ("tiled", 1e-5), ("int8pack_tiled", 0.02)):
        path = "fused" if kernel == "int8pack_tiled" else "dequantize_then_matmul"
        variant = variants.build(tiny_loaded, dataclasses.replace(INT8, kernel=kernel, kernel_path=path))
        assert (logits(variant.model) - expected).norm() / expected.norm() < bound


def test_the_article_variant_is_its_three_elements_together(tiny_loaded):
    parts = {
        key: change(variants.build(tiny_loaded, recipe), tiny_loaded) for key, recipe in elements(ARTICLE_FLASH).items()
    }
    assert set(parts) == {"weight_format", "sparsity", "kv_format"}
    assert all(part > 0 for part in parts.values())
    assert parts["sparsity"] > 5 * parts["weight_format"] > 0
    assert change(variants.build(tiny_loaded, ARTICLE_FLASH), tiny_loaded) == pytest.approx(parts["sparsity"], rel=0.3)


def test_article_and_best_compute_the_same_values_on_different_paths(tiny_loaded):
    article, best = variants.build(tiny_loaded, ARTICLE_FLASH), variants.build(tiny_loaded, FILLED)
    reference = logits(article.model, article.make_cache())
    assert (logits(best.model, best.make_cache()) - reference).norm() / reference.norm() < 0.05  # bf16 activations
    assert best.stored_bytes > article.stored_bytes  # zeros stored dense
    assert any(note.startswith("stored_dense") for note in best.notes)


def test_half_of_each_matrix_is_zero_after_pruning(tiny_loaded):
    variant = variants.build(tiny_loaded, elements(ARTICLE_FLASH)["sparsity"])
    store = variant.model.model.layers[1].mlp.up_proj.product.store
    assert store.values.numel() == 128 * 64 // 2
    dense = store.rows(0, 128, torch.float32)
    original = tiny_loaded.model.model.layers[1].mlp.up_proj.weight
    assert torch.equal(dense[dense != 0], original[dense != 0])
    assert original[dense == 0].abs().max() <= original[dense != 0].abs().min()


def test_variants_generate_with_their_own_cache(tiny_loaded):
    variant = variants.build(tiny_loaded, ARTICLE_FLASH)
    cache = variant.make_cache()
    with torch.inference_mode():
        out = variant.model.generate(
            IDS, attention_mask=torch.ones_like(IDS), cache=cache, max_new_tokens=4, do_sample=False, eos_token_id=None
        )
    assert out.shape == (1, 12)
    assert type(cache).__name__ == "IntegerCache" and variant.make_cache() is not cache


def test_a_layer_whose_shape_the_kernel_cannot_take_is_tiled_and_noted(tiny_loaded):
    model = make_tiny_model()
    layer = model.model.layers[0].mlp
    layer.gate_proj, layer.up_proj = nn.Linear(64, 100, bias=True), nn.Linear(64, 100, bias=False)
    layer.down_proj = nn.Linear(100, 64, bias=False)  # 100 is not divisible by 16
    loaded = dataclasses.replace(tiny_loaded, model=model.requires_grad_(False))
    variant = variants.build(loaded, INT8)
    assert variant.model.model.layers[0].mlp.down_proj.info.kernel == "tiled"
    assert variant.model.model.layers[0].mlp.gate_proj.bias is not None
    assert any("down_proj: int8pack_tiled takes in_features divisible by 16, not 100" in note for note in variant.notes)
    assert change(variant, loaded) < 0.05


def test_block_pruning_stores_blocks(tiny_loaded):
    recipe = Recipe(
        name="blocks", sparsity=0.5, pattern="block", sparse_format="bsr", block=(16, 16), kernel_path="fused"
    )
    variant = variants.build(tiny_loaded, recipe)
    assert variant.model.model.layers[0].self_attn.q_proj.product.matrix.values().shape == (8, 16, 16)


def test_pruned_channels_become_a_smaller_dense_weight(tiny_loaded):
    recipe = Recipe("channels", sparsity=0.5, pattern="channel", sparse_format="structured", kernel_path="fused")
    variant = variants.build(tiny_loaded, recipe)
    layer = variant.model.model.layers[0].mlp.up_proj
    assert layer.product.weight.shape == (64, 64)  # of 128 rows
    zeros = variants.build(tiny_loaded, dataclasses.replace(recipe, sparse_format="dense", kernel_path="stored_dense"))
    with torch.inference_mode():
        assert torch.allclose(variant.model(IDS).logits, zeros.model(IDS).logits, atol=1e-5)


def test_conv1d_models_are_refused_with_what_would_be_left_out(tiny_loaded):
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32))
    loaded = dataclasses.replace(tiny_loaded, model=gpt2.eval().requires_grad_(False))
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel is not covered: .* lie in nn.Linear, the rest in Conv1D"):
        variants.build(loaded, INT8)


@pytest.mark.parametrize(
    "recipe, message",
    [
        (BEST_FLASH, "kv_path 'unknown' names no path"),
        (dataclasses.replace(FILLED, kernel_path="unknown", kernel=""), "kernel_path 'unknown' names no kernel"),
        (dataclasses.replace(INT8, engine="compiled"), "engine 'compiled' is not built"),
        (dataclasses.replace(INT8, granularity="group", group_size=48), "q_proj: .*48 does not divide 64"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(tiny_loaded, recipe, message):
    with pytest.raises(ValueError, match=message):
        variants.build(tiny_loaded, recipe)


def test_a_tied_head_can_be_multiplied_from_a_copy_in_eight_bits(tiny_loaded):
    recipe = Recipe("int8", weight_format="int8", kernel_path="dequantize_then_matmul", head_format="int8")
    variant = variants.build(tiny_loaded, recipe)
    assert variant.coverage == 1.0
    assert variant.model.get_input_embeddings().weight is tiny_loaded.model.get_input_embeddings().weight
    plain = variants.build(tiny_loaded, dataclasses.replace(recipe, head_format=""))
    # the copy: 128 rows of 64 codes, a scale of 2 bytes each
    assert variant.stored_bytes - plain.stored_bytes == 128 * 64 + 128 * 2
    ids = torch.tensor([[1, 5, 9, 33]])
    with torch.inference_mode():
        found, expected = variant.model(ids).logits, plain.model(ids).logits
    assert 0 < (found - expected).norm() < 0.02 * expected.norm()

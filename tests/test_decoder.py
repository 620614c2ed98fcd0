import dataclasses

import pytest
import torch
from conftest import VOCABULARY
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

from flashstudy.compress.decoder import Decoder
from flashstudy.compress.variants import build
from flashstudy.facts.recipes import ARTICLE_FLASH, Recipe, standard
from flashstudy.measure import steps

PROMPT = torch.tensor([[1, 5, 9, 33, 70, 8, 4, 100], [7, 7, 3, 90, 11, 64, 2, 1]])
RECIPES = [standard(), ARTICLE_FLASH, dataclasses.replace(ARTICLE_FLASH, kv_format="none", kv_path="dense")]


def logits_of_the_library(variant, ids):
    with torch.inference_mode():
        return variant.model(input_ids=ids, cache=variant.make_cache(), use_cache=True).logits


def random_model(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.name} {recipe.kv_format}")
def test_prompt_and_steps_give_the_librarys_logits(tiny_loaded, recipe):
    variant = build(tiny_loaded, recipe)
    expected = logits_of_the_library(variant, PROMPT)
    decoder = Decoder(variant, capacity=8, batch=2)
    assert torch.allclose(decoder.read(PROMPT[:, :3]), expected[:, 2], atol=1e-4)
    assert torch.allclose(decoder.step(PROMPT[:, 3]), expected[:, 3], atol=1e-4)
    assert torch.allclose(decoder.read(PROMPT[:, 4:]), expected[:, 7], atol=1e-4)
    assert decoder.length == 8


def test_a_forgotten_token_leaves_no_trace(tiny_loaded):
    decoder = Decoder(build(tiny_loaded, standard()), capacity=8, batch=2)
    decoder.read(PROMPT[:, :4])
    first = decoder.step(PROMPT[:, 4])
    decoder.length = 4
    decoder.step(PROMPT[:, 5])
    decoder.length = 4
    assert torch.equal(decoder.step(PROMPT[:, 4]), first)


def test_generation_is_the_librarys_greedy_one(tiny_loaded):
    variant = build(tiny_loaded, ARTICLE_FLASH)
    settings = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
    expected = variant.model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **settings)
    plain = build(tiny_loaded, dataclasses.replace(ARTICLE_FLASH, kv_format="none", kv_path="dense"))
    found = Decoder(plain, capacity=16, batch=2).generate(PROMPT, 6)
    assert torch.equal(found, expected[:, 8:])


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_biases_and_other_families_are_run_alike(kind, tiny_loaded):
    sizes = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=1, initializer_range=0.3)  # fmt: skip
    config = Qwen2Config(**sizes) if kind == "qwen2" else MistralConfig(**sizes, sliding_window=None)
    model = random_model(config)
    if kind == "qwen2":
        torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.bias)
    variant = build(dataclasses.replace(tiny_loaded, model=model), standard())
    decoder = Decoder(variant, capacity=8, batch=2)
    decoder.read(PROMPT[:, :7])
    assert torch.allclose(decoder.step(PROMPT[:, 7]), logits_of_the_library(variant, PROMPT)[:, 7], atol=1e-4)


def test_an_int4_cache_holds_what_the_librarys_cache_class_holds(tiny_loaded):
    config = tiny_loaded.model.config
    wide = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3)  # fmt: skip
    loaded = dataclasses.replace(tiny_loaded, model=random_model(type(config)(**wide)))
    variant = build(loaded, dataclasses.replace(standard(), kv_format="int4", kv_path="dequantize_then_matmul"))
    expected = logits_of_the_library(variant, PROMPT)
    exact = logits_of_the_library(build(loaded, standard()), PROMPT)
    decoder = Decoder(variant, capacity=8, batch=2)
    decoder.read(PROMPT[:, :7])
    found = decoder.step(PROMPT[:, 7])
    assert torch.allclose(found, expected[:, 7], atol=1e-4)
    assert not torch.allclose(found, exact[:, 7], atol=1e-3)


def test_a_step_behind_random_tokens_repeats_and_kernels_cover_every_product(tiny_loaded):
    variant = build(tiny_loaded, standard())
    step = steps.loop(variant, context=5, batch=2)
    assert torch.equal(step(), step())
    decoder = Decoder(variant, capacity=6, batch=2)
    decoder.fill(6)
    names = [name for name, _ in decoder.kernels()]
    # two layers of seven projections, the head, and attention once a layer
    assert len(names) == 2 * 7 + 1 + 2 and "lm_head" in names and "attention 1" in names
    calls = dict(decoder.kernels())
    assert calls["model.layers.0.mlp.up_proj"]().shape == (2, 128)
    assert calls["attention 0"]().shape == (2, 2, 2, 16)
    steps.kernels(variant, context=5, batch=2)()


def test_a_library_layer_inside_one_of_ours_is_not_counted_again(tiny_loaded):
    recipe = Recipe("int8", "int8", kernel_path="dequantize_then_matmul", kernel="torchao")
    decoder = Decoder(build(tiny_loaded, recipe), capacity=4)
    decoder.fill(4)
    assert len(list(decoder.kernels())) == 17


def test_more_tokens_than_fit_are_refused(tiny_loaded):
    decoder = Decoder(build(tiny_loaded, standard()), capacity=8, batch=2)
    decoder.read(PROMPT)
    with pytest.raises(ValueError, match="1 tokens behind 8 do not fit a cache of 8"):
        decoder.step(PROMPT[:, 0])
    with pytest.raises(ValueError, match="9 tokens behind 0"):
        decoder.fill(9)


def test_other_architectures_are_refused_by_name(tiny_loaded):
    variant = build(tiny_loaded, standard())
    windowed = MistralConfig(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                             num_attention_heads=2, num_key_value_heads=1, sliding_window=4)  # fmt: skip
    with pytest.raises(ValueError, match="MistralForCausalLM attends to 4 tokens only"):
        Decoder(dataclasses.replace(variant, model=random_model(windowed)), capacity=8)
    with pytest.raises(ValueError, match="Linear is not run by the measuring loop, which takes LlamaForCausalLM"):
        Decoder(dataclasses.replace(variant, model=torch.nn.Linear(2, 2)), capacity=8)

import dataclasses

import pytest

from flashstudy.facts.recipes import ARTICLE_FLASH, BEST_FLASH, Recipe, elements, standard


def test_int4_in_groups_of_64_takes_four_and_a_quarter_bits():
    recipe = Recipe("int4", weight_format="int4", granularity="group", group_size=64, kernel_path="fused")
    assert recipe.bytes_per_weight * 8 == pytest.approx(4 + 16 / 64)


def test_a_zero_point_costs_as_much_as_a_scale():
    recipe = Recipe(
        "q4_1", weight_format="int4", granularity="group", group_size=32, symmetric=False, kernel_path="fused"
    )
    assert recipe.bytes_per_weight * 8 == pytest.approx(4 + 2 * 16 / 32)  # 5 bits, as GGUF's Q4_1


def test_the_article_flash_stores_five_bits_a_weight():
    values, indices, scales = ARTICLE_FLASH.stored_bytes(1024, 512)
    assert values == 1024 * 512 * 0.5
    assert indices == 1024 * 512 / 8  # one bit a weight
    assert scales == 1024 * 2


def test_csr_at_half_density_is_larger_than_dense_fp32():
    csr = Recipe("csr", sparsity=0.5, pattern="unstructured", sparse_format="csr", kernel_path="fused")
    assert sum(csr.stored_bytes(64, 64)) == 2048 * (4 + 4) + 4 * 65
    assert csr.bytes_per_weight > standard("fp32").bytes_per_weight


def test_unstructured_zeros_empty_almost_no_block():
    bsr = Recipe("bsr", sparsity=0.9, pattern="unstructured", sparse_format="bsr", block=(4, 4), kernel_path="fused")
    assert bsr.stored_density == pytest.approx(1 - 0.9**16)
    by_block = dataclasses.replace(bsr, pattern="block")
    assert by_block.stored_density == pytest.approx(0.1)


def test_two_of_four_takes_nine_sixteenths_of_bf16():
    recipe = Recipe("2:4", weight_format="bf16", sparsity=0.5, pattern="2:4", sparse_format="n_m", kernel_path="fused")
    assert recipe.bytes_per_weight / 2 == pytest.approx(9 / 16)


def test_best_flash_stores_what_the_article_stores():
    assert BEST_FLASH.stored_bytes(512, 512) == ARTICLE_FLASH.stored_bytes(512, 512)
    assert (BEST_FLASH.kernel_path, BEST_FLASH.kv_path) == ("unknown", "unknown")


def test_each_element_alone_changes_nothing_else():
    alone = elements(ARTICLE_FLASH, base=standard("bf16"))
    assert list(alone) == ["weight_format", "sparsity", "kv_format"]
    assert (alone["weight_format"].weight_format, alone["weight_format"].sparsity) == ("int8", 0)
    assert (alone["sparsity"].weight_format, alone["sparsity"].sparse_format) == ("bf16", "bitmap")
    assert alone["sparsity"].kernel_path == "dequantize_then_matmul"
    assert (alone["kv_format"].weight_format, alone["kv_format"].kernel_path) == ("bf16", "dense")


def test_an_element_that_is_switched_off_is_left_out():
    weights_only = Recipe("int8", weight_format="int8", kernel_path="native_lowbit")
    assert list(elements(weights_only)) == ["weight_format"]
    assert elements(standard()) == {}


def test_sparsity_alone_does_not_keep_a_low_bit_kernel():
    recipe = dataclasses.replace(ARTICLE_FLASH, kernel_path="native_lowbit", kernel="some_int8_kernel")
    alone = elements(recipe)["sparsity"]
    assert (alone.kernel_path, alone.kernel) == ("unknown", "")


def test_json_gives_the_recipe_back():
    bsr = Recipe("bsr", sparsity=0.9, pattern="block", sparse_format="bsr", block=(4, 8), kernel_path="fused")
    assert Recipe.from_json(bsr.to_json()) == bsr
    with pytest.raises(ValueError, match=r"unknown recipe fields \['colour'\]"):
        Recipe.from_json('{"name": "x", "colour": "red"}')


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"weight_format": "int7"}, "weight_format 'int7' is not one of"),
        ({"weight_format": "int8"}, "kernel_path 'dense' cannot multiply int8 weights"),
        ({"kernel_path": "native_lowbit"}, "cannot multiply fp32 weights stored as 'dense'; allowed are dense"),
        ({"sparsity": 0.5}, "sparsity 0.5 does not go with pattern 'none'"),
        ({"sparsity": 1.0, "pattern": "unstructured"}, r"not in \[0, 1\)"),
        ({"group_size": 64}, "group_size 64 does not go with granularity 'channel'"),
        ({"kv_path": "fused"}, "kv_path 'fused' does not go with kv_format 'none'"),
        ({"kv_format": "int8"}, "kv_path 'dense' does not go with kv_format 'int8'"),
        ({"sparsity": 0.6, "pattern": "2:4"}, "keeps half of the weights, not sparsity 0.6"),
        ({"sparsity": 0.5, "pattern": "block"}, r"block \(0, 0\) does not go with 'block'"),
    ],
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Recipe("bad", **fields)

"""Codes on disk: the same to the bit when they come back, as large as counted by hand, refused where they differ."""

import dataclasses
import json
import struct

import pytest
import torch
from conftest import make_tiny_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashstudy.compress import prequantized, variants
from flashstudy.compress.linear import CompressedLinear
from flashstudy.facts.recipes import ARTICLE_FLASH, Recipe, standard

IDS = torch.tensor([[1, 5, 9, 33, 70, 8, 4, 100]])
# q and o 64 × 64, k and v 32 × 64, gate, up and down 128 × 64: weights and rows of the two layers
LINEAR_WEIGHTS = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
ROWS = 2 * (2 * 64 + 2 * 32 + 2 * 128 + 64)
PLAIN = 128 * 64 + 5 * 64 + 2 * 8  # embedding, norms, rotary frequencies and their copy: fp32
TILED = dict(kernel_path="dequantize_then_matmul", kernel="tiled")
INT8 = Recipe("int8", weight_format="int8", **TILED)
INT4 = Recipe("int4", weight_format="int4", granularity="group", group_size=32, **TILED)
SAVEABLE = [
    INT8,
    dataclasses.replace(INT8, name="int8 asymmetric", symmetric=False),
    dataclasses.replace(INT8, name="int8 in groups", granularity="group", group_size=32, kernel="dequantize"),
    dataclasses.replace(INT8, name="int8 packed", kernel_path="fused", kernel="int8pack_tiled"),
    dataclasses.replace(INT8, name="int8 and cache", kv_format="int8", kv_path="dequantize_then_matmul"),
    INT4,
    dataclasses.replace(INT4, name="int4 asymmetric", symmetric=False),
    dataclasses.replace(INT4, name="int4 packed", kernel_path="fused", kernel="int4pack_tiled"),
    dataclasses.replace(INT4, name="int4 and head", head_format="int8"),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHSTUDY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def saved(tiny_loaded, tmp_path):
    """A saved INT8 variant and its folder."""
    variant = variants.build(tiny_loaded, INT8)
    prequantized.save(variant, tmp_path / "saved")
    return variant, tmp_path / "saved"


def logits(variant):
    with torch.inference_mode():
        return variant.model(input_ids=IDS, cache=variant.make_cache(), use_cache=True).logits


def tensors(variant):
    model = variant.model
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if b is not None}


@pytest.mark.parametrize("recipe", SAVEABLE, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("mapped", [False, True])
def test_every_tensor_and_the_logits_come_back_to_the_bit(tiny_loaded, tmp_path, recipe, mapped):
    variant = variants.build(tiny_loaded, recipe)
    prequantized.save(variant, tmp_path / "saved")
    back = prequantized.load(tmp_path / "saved", mapped=mapped)
    before, after = tensors(variant), tensors(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(back), logits(variant))
    same = ("recipe", "stored_bytes", "coverage", "notes")
    assert [getattr(back, name) for name in same] == [getattr(variant, name) for name in same]
    assert recipe.head_format or back.model.lm_head.weight is back.model.model.embed_tokens.weight
    assert not back.model.training


def test_an_untied_head_and_a_bias_come_back_too(tiny_loaded, tmp_path):
    model = make_tiny_model(tied=False)
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 128, bias=True)
    variant = variants.build(dataclasses.replace(tiny_loaded, model=model.requires_grad_(False)), INT8)
    prequantized.save(variant, tmp_path / "saved")
    back = prequantized.load(tmp_path / "saved")
    assert isinstance(back.model.lm_head, CompressedLinear) and back.model.model.layers[0].mlp.up_proj.bias is not None
    assert torch.equal(logits(back), logits(variant))


def test_bfloat16_stays_bfloat16(tiny_loaded, tmp_path):
    loaded = dataclasses.replace(tiny_loaded, model=tiny_loaded.model.to(torch.bfloat16))
    variant = variants.build(loaded, INT8)
    prequantized.save(variant, tmp_path / "saved")
    back = prequantized.load(tmp_path / "saved")
    assert back.model.dtype == torch.bfloat16 and torch.equal(logits(back), logits(variant))


@pytest.mark.parametrize("recipe, expected", [
    (INT8, LINEAR_WEIGHTS + 4 * ROWS + 4 * PLAIN),
    (INT4, LINEAR_WEIGHTS // 2 + 4 * LINEAR_WEIGHTS // 32 + 4 * PLAIN),
    (dataclasses.replace(INT4, symmetric=False), LINEAR_WEIGHTS // 2 + 5 * LINEAR_WEIGHTS // 32 + 4 * PLAIN),
], ids=["int8", "int4", "int4 asymmetric"])  # fmt: skip
def test_bytes_on_disk_match_the_hand_count(tiny_loaded, tmp_path, recipe, expected):
    prequantized.save(variants.build(tiny_loaded, recipe), tmp_path / "saved")
    (path,) = prequantized.files(tmp_path / "saved")
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
    assert path.stat().st_size - 8 - header_bytes == expected


class FloatsMade(TorchDispatchMode):
    """Counts the elements of every float tensor with memory of its own that an operation makes."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not tensor.is_meta:
                self.kept[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no address comes again
        return result

    def elements(self):
        return sum(tensor.numel() for tensor in self.kept.values())


def test_loading_never_makes_the_float_weights_of_the_projections(saved):
    _, folder = saved
    with FloatsMade() as made:
        prequantized.load(folder, mapped=True)
    assert made.elements() == PLAIN + ROWS
    with FloatsMade() as made:
        prequantized.load(folder)
    assert made.elements() == 2 * (PLAIN + ROWS)  # in the mapped file, and copied out of it
    with FloatsMade() as made:  # the check would see one
        loaded = prequantized.load(folder, mapped=True)
        loaded.model.model.layers[0].mlp.up_proj.product.store.rows(0, 128, torch.float32)
    assert made.elements() == PLAIN + ROWS + 128 * 64


def test_a_folder_holds_three_files_and_nothing_that_runs(saved):
    _, folder = saved
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "flashstudy.json", "model.safetensors"]


@pytest.mark.parametrize(
    "recipe, message",
    [
        (standard(), "standard keeps fp32 weights: it has no codes to save"),
        (ARTICLE_FLASH, r"layers.0.self_attn.q_proj: int8 weights stored bitmap cannot be saved; int8 and int4 stored"),
        (
            Recipe("dynamic", weight_format="int8", kernel_path="native_lowbit", kernel="dynamic_int8"),
            r"layers.0.self_attn.q_proj: kernel dynamic_int8 keeps no plain codes; dequantize, tiled",
        ),
        (dataclasses.replace(INT4, kernel_path="fused", kernel="int4pack"), "kernel int4pack keeps no plain codes"),
        (dataclasses.replace(INT8, kernel="torchao"), "kernel torchao keeps no plain codes"),
        (dataclasses.replace(INT8, kernel_path="stored_dense", kernel=""), "kernel dense keeps no plain codes"),
        (Recipe("nf4", weight_format="nf4", **TILED), "nf4 weights stored dense cannot be saved"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_cannot_be_saved_is_refused_by_name_and_leaves_nothing(tiny_loaded, tmp_path, recipe, message):
    variant = variants.build(tiny_loaded, recipe)
    with pytest.raises(ValueError, match=message) as caught:
        prequantized.save(variant, tmp_path / "saved")
    assert "\n" not in str(caught.value) and not (tmp_path / "saved").exists()


def test_a_folder_that_exists_is_not_written_over(saved):
    variant, folder = saved
    with pytest.raises(ValueError, match="folder saved exists already"):
        prequantized.save(variant, folder)


def edit(folder, **changes):
    path = folder / prequantized.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def described(folder):
    return json.loads((folder / prequantized.MANIFEST).read_text())


def refuse(folder, message):
    with pytest.raises(ValueError, match=message) as caught:
        prequantized.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_tampered_file_is_refused(saved, name):
    _, folder = saved
    path = folder / name
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    refuse(folder, f"saved/{name} is not the file that was saved: its hash is ")


def test_a_tampered_file_is_refused_after_it_was_loaded_well_too(saved):
    _, folder = saved
    prequantized.load(folder)
    path = folder / prequantized.WEIGHTS
    found = load_file(path)
    found["model.layers.1.mlp.up_proj.scale"].mul_(2)
    save_file(found, path, metadata={"format": "pt"})
    refuse(folder, "is not the file that was saved")


def test_what_does_not_fit_is_refused_by_name(saved):
    _, folder = saved
    content = described(folder)
    edit(folder, version=2)
    refuse(folder, "saved is a prequantized folder of version 2, not 1")
    edit(folder, version=1, model_class="Popen")
    refuse(folder, "'Popen' is no model class of transformers")
    edit(folder, model_class=content["model_class"], tensors=[*content["tensors"], "model.extra"])
    refuse(folder, "saved/model.safetensors has no tensor model.extra")
    edit(folder, tensors=[name for name in content["tensors"] if name != "model.norm.weight"])
    refuse(folder, "saved lacks 1 tensors of its model: model.norm.weight")
    edit(folder, tensors=content["tensors"], aliases={"model.nothing": "model.norm.weight"})
    refuse(folder, "LlamaForCausalLM has no tensor model.nothing")
    layers = {name: value | {"shape": [1, 64]} for name, value in content["layers"].items()}
    edit(folder, aliases=content["aliases"], layers=layers)
    refuse(folder, r"q_proj has codes of \(64, 64\) weights, not \(1, 64\)")
    edit(folder, layers={name: value | {"kernel": "int4pack"} for name, value in content["layers"].items()})
    refuse(folder, "int8 weights stored dense have no kernel 'int4pack'")
    (folder / prequantized.WEIGHTS).unlink()
    refuse(folder, "saved has no model.safetensors")
    (folder / prequantized.MANIFEST).unlink()
    refuse(folder, "has no flashstudy.json")

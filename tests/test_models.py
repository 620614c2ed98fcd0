import csv
import dataclasses
import json

import pytest

from flashstudy.facts import checkout, models

MODELS = models.load()
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 128, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {**LLAMA, "max_position_embeddings": 64, "pad_token_id": 0}


def test_smollm2_135m_has_134_515_008_unique_parameters():
    attention = 576 * 576 + 2 * 576 * 192 + 576 * 576  # q, k and v of 3 heads of 64, o
    layer = attention + 3 * 576 * 1536 + 2 * 576
    assert 49152 * 576 + 30 * layer + 576 == 134_515_008  # the tied head adds nothing
    assert MODELS["smollm2-135m"].n_parameters == 134_515_008


def test_llama_3_8b_has_8_030_261_248_parameters():
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert 2 * 128256 * 4096 + 32 * layer + 4096 == 8_030_261_248
    assert MODELS["llama3-8b"].n_parameters == 8_030_261_248


def test_products_include_the_head_and_leave_the_look_up_out():
    llama = MODELS["llama3-8b"]
    assert llama.matmul_parameters == llama.n_parameters - 128256 * 4096 - 65 * 4096  # less embedding and norms
    smollm = MODELS["smollm2-135m"]
    assert smollm.matmul_parameters == smollm.n_parameters - 61 * 576  # tied: the head's product reads the table


def test_biases_and_positions_count_in_gpt2():
    assert MODELS["gpt2-124m"].n_parameters == 124_439_808  # the count of the released checkpoint


def test_an_encoder_has_no_head():
    minilm = MODELS["minilm-l6"]
    assert minilm.n_parameters == 22_713_216
    assert minilm.matmul_parameters == 6 * (4 * 384**2 + 2 * 384 * 1536)


def test_two_of_eight_experts_are_active_in_mixtral():
    mixtral = MODELS["mixtral-8x7b"]
    assert mixtral.n_parameters == 46_702_792_704
    assert mixtral.n_parameters - mixtral.n_active_parameters == 32 * 6 * 3 * 4096 * 14336
    assert mixtral.stored_matmul_parameters - mixtral.matmul_parameters == 32 * 6 * 3 * 4096 * 14336


def test_grouped_heads_shrink_the_cache_not_the_queries():
    llama = MODELS["llama3-8b"]
    assert llama.kv_bytes_per_token(2) == 32 * 2 * 8 * 128 * 2 == 131_072
    assert dataclasses.replace(llama, n_kv_heads=32).kv_bytes_per_token(2) == 4 * 131_072


def test_a_sliding_layer_caches_its_window_only():
    shape = models.from_config({**LLAMA, "model_type": "mistral", "sliding_window": 32})
    per_token = 2 * 2 * 2 * 16 * 2
    assert shape.kv_bytes(32, 2) == shape.kv_bytes(100, 2) == 32 * per_token
    assert MODELS["gemma2-9b"].kv_bytes(8192, 2) == (21 * 8192 + 21 * 4096) * 2 * 8 * 256 * 2


def test_a_window_that_is_switched_off_is_no_window():
    shape = models.from_config({**LLAMA, "model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False})
    assert shape.kv_bytes(100, 2) == 100 * shape.kv_bytes_per_token(2)


def test_counts_close_to_the_stated_ones_unless_a_note_says_why_not():
    with open(checkout.data_dir() / "models.csv", newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    off = {
        row["name"]
        for row in rows
        if abs(MODELS[row["name"]].n_parameters / 1e9 / float(row["stated_parameters_b"]) - 1) > 0.01
    }
    assert all(row["note"] for row in rows if row["name"] in off)
    assert off == {"falcon-7b", "t5-xxl-enc", "t5-small", "sam-vit-h", "nanovlm-222m"}


def test_a_config_is_read_from_dict_file_and_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    shapes = [models.from_config(source, name="tiny") for source in (LLAMA, tmp_path, tmp_path / "config.json")]
    assert shapes[0] == shapes[1] == shapes[2]
    assert shapes[0].n_parameters == 82_240  # 90,432 would count the tied head twice


def test_what_the_formulas_do_not_cover_is_refused():
    with pytest.raises(ValueError, match="model_type 'gpt2' is not covered; covered are llama"):
        models.from_config({**LLAMA, "model_type": "gpt2"})
    with pytest.raises(ValueError, match="lacks intermediate_size"):
        models.from_config({key: value for key, value in LLAMA.items() if key != "intermediate_size"})
    with pytest.raises(ValueError, match="KV heads must divide heads"):
        models.from_config({**LLAMA, "num_key_value_heads": 3})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
        {"model_type": "mistral"},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 32},
        {"model_type": "phi3"},
        {"model_type": "granite"},
        {"model_type": "glm", "head_dim": 16},
        {"model_type": "glm4", "head_dim": 16, "attention_bias": False},
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        {
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 16,
        },
        {"model_type": "bert", "type_vocab_size": 2, "num_key_value_heads": None},
    ],
    ids=lambda changes: changes.get("model_type", "llama"),
)
def test_a_family_counts_as_transformers_counts(changes):
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = {**TINY, **changes}
    known = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = (AutoModel if config["model_type"] == "bert" else AutoModelForCausalLM).from_config(known)
    model.tie_weights()
    assert models.from_config(known.to_dict()).n_parameters == sum(p.numel() for p in model.parameters())

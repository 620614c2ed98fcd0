import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from conftest import make_tiny_tokenizer
from safetensors.torch import save_file
from torch import nn

from flashstudy import cli
from flashstudy.cli import diagnosis
from flashstudy.compress import inspect_checkpoint, inspect_model, packed, variants
from flashstudy.compress.checkpoints import InputError
from flashstudy.facts.recipes import Recipe, standard
from flashstudy.measure import anatomy, choices, machine, memory, timing
from flashstudy.measure.machine import MachineCard
from flashstudy.measure.statistics import Interval
from flashstudy.studies import causes, changes, doctor
from flashstudy.studies.causes import Symptoms
from flashstudy.studies.changes import Change

# The tiny Llama: 2 layers of q, o 64 × 64, k, v 32 × 64 and three 128 × 64, a table of 128 × 64, five norms of 64.
IN_LAYERS, TABLE, NORMS = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64), 128 * 64, 5 * 64
CARD = MachineCard(
    cpu_model="made up", arch="x86_64", simd=[], physical_cores=1, usable_cpus=1, cpu_quota=None, numa_nodes=1,
    memory_limit_bytes=2**35, llc_bytes=2**20, n_threads=1, thread_reason="", read_bytes_per_s={"1": 1e10},
    copy_bytes_per_s={"1": 1e10}, triad_bytes_per_s={"1": 1e10}, read_kernel={"1": "torch.mv"}, bandwidth_by_size=[],
    gemm_flop_per_s={"fp32": 5e10}, gemm_one_thread_flop_per_s={"fp32": 5e10}, gemm_kernel={},
    dequantize_weights_per_s={}, decompress_weights_per_s={}, fast_bf16=False, standard_dtype="float32", gpu=None,
    fingerprint="", torch_version="", measured_at="2026-12-01T00:00:00+00:00", measured_in_s=0.0, contended=False,
)  # fmt: skip


def chosen(recipe, shapes):
    """The recipe on a kernel that every machine has."""
    kernel = {"int8": "int8pack_tiled", "int4": "int4pack_tiled"}.get(recipe.weight_format, "")
    return dataclasses.replace(recipe, kernel_path="fused" if kernel else "dense", kernel=kernel)


@pytest.fixture
def known_machine(monkeypatch):
    """A machine card and kernels that take no measuring, and rounds that take a fraction of a second."""
    in_full = timing.measure
    monkeypatch.setattr(machine, "card", lambda: CARD)
    monkeypatch.setattr(choices, "best_kernels", chosen)
    monkeypatch.setattr(timing, "measure", lambda calls, **options: in_full(calls, **options | {"budget_s": 0.02}))


def folder_with(path, tensors, **config):
    """A model folder that is never loaded."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_gguf(path):
    """The tiny Llama's sizes as a GGUF file: projections Q4_0, table Q8_0, norms F32."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(path, "llama")
    for key, value in {
        "context_length": 256, "embedding_length": 64, "block_count": 2, "feed_forward_length": 128,
        "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 16, "vocab_size": 128,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"w{index}" for index in range(126)] + ["w", "0"])
    writer.add_token_types([1] * 128)
    writer.add_token_merges(["w 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)

    def add(name, rows, columns, kind):
        values = random.normal(size=(rows, columns)).astype(np.float32)
        writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", 128, 64, GGMLQuantizationType.Q8_0)
    sizes = dict(attn_q=(64, 64), attn_k=(32, 64), attn_v=(32, 64), attn_output=(64, 64), ffn_gate=(128, 64),
                 ffn_up=(128, 64), ffn_down=(64, 128))  # fmt: skip
    for block in range(2):
        for name, size in sizes.items():
            add(f"blk.{block}.{name}.weight", *size, GGMLQuantizationType.Q4_0)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{block}.{name}.weight", np.ones(64, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- what is stored --------------------------------------------------------------------------------------------------


def test_a_float_folder_is_stored_as_counted_by_hand(tiny_folder):
    stored = inspect_checkpoint.inspect(tiny_folder)
    (only,) = stored.formats
    assert (only.name, only.quantized, only.n_weights, only.n_bytes) == (
        "F32", False, IN_LAYERS + TABLE + NORMS, 4 * (IN_LAYERS + TABLE + NORMS),
    )  # fmt: skip
    assert (stored.quantized_share, stored.bits_per_weight, stored.multiplied_bits) == (0, 32, 32)


def test_a_gguf_file_is_stored_as_counted_by_hand(tmp_path):
    stored = inspect_checkpoint.inspect(write_gguf(tmp_path / "tiny.gguf"))
    q4_bytes, q8_bytes = IN_LAYERS // 32 * 18, TABLE // 32 * 34  # a block of 32: a 16-bit scale and the codes
    found = {one.name: (one.quantized, one.n_tensors, one.n_weights, one.n_bytes) for one in stored.formats}
    assert found == {
        "Q4_0": (True, 14, IN_LAYERS, q4_bytes),
        "Q8_0": (True, 1, TABLE, q8_bytes),
        "F32": (False, 5, NORMS, 4 * NORMS),
    }
    assert stored.quantized_share == (IN_LAYERS + TABLE) / (IN_LAYERS + TABLE + NORMS)
    assert stored.multiplied_bits == 8 * (q4_bytes + q8_bytes) / (IN_LAYERS + TABLE)  # the table is the head as well


def test_a_gptq_folder_is_counted_by_codes_and_told_why_it_is_not_loaded(tmp_path):
    tensors = {
        "model.layers.0.mlp.up_proj.qweight": torch.zeros(64 // 8, 128, dtype=torch.int32),
        "model.layers.0.mlp.up_proj.qzeros": torch.zeros(2, 128 // 8, dtype=torch.int32),
        "model.layers.0.mlp.up_proj.scales": torch.zeros(2, 128, dtype=torch.float16),
        "model.layers.0.mlp.up_proj.g_idx": torch.zeros(64, dtype=torch.int32),
        "model.embed_tokens.weight": torch.zeros(128, 64, dtype=torch.float16),
        "lm_head.weight": torch.zeros(128, 64, dtype=torch.float16),
    }
    folder = folder_with(tmp_path / "gptq", tensors, quantization_config={"quant_method": "gptq", "bits": 4})
    found = doctor.examine(str(folder))
    codes = {one.name: (one.n_weights, one.n_bytes) for one in found.stored.formats}
    scale_bytes = 2 * 16 * 4 + 2 * 128 * 2 + 64 * 4
    assert codes == {
        "4-bit in I32": (64 * 128, 64 * 128 // 2),
        inspect_checkpoint.SCALES: (0, scale_bytes),
        "F16": (2 * 128 * 64, 2 * 2 * 128 * 64),
    }
    assert found.stored.quantized_share == 1 / 3
    assert found.stored.multiplied_bits == 8 * (64 * 128 / 2 + scale_bytes + 2 * 128 * 64) / (2 * 64 * 128)
    assert found.in_effect is None and "stored quantized by 'gptq'" in found.not_loaded
    assert "NOT LOADED: model gptq is stored quantized by 'gptq'" in "\n".join(diagnosis.lines(found))


U8, I8, I32 = torch.uint8, torch.int8, torch.int32
FP8 = {"quant_method": "fp8"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
AWQ = {"quant_method": "awq", "bits": 4}
PACKED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"input_activations": {"num_bits": 8}, "weights": {"num_bits": 4}}},
}
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
MXFP4 = {"quant_method": "mxfp4"}


@pytest.mark.parametrize(
    ("config", "name", "codes", "scale", "expected"),
    [
        (NF4, "up_proj.weight", torch.zeros(4096, 1, dtype=U8), "up_proj.weight.absmax", "4-bit in U8"),
        (AWQ, "up_proj.qweight", torch.zeros(64, 16, dtype=I32), "up_proj.qzeros", "4-bit in I32"),
        (PACKED, "up_proj.weight_packed", torch.zeros(128, 8, dtype=I32), "up_proj.weight_scale", "4-bit in I32"),
        (FP8, "up_proj.weight", torch.zeros(128, 64).to(torch.float8_e4m3fn), "up_proj.weight_scale_inv", "F8_E4M3"),
        (TORCHAO, "up_proj._weight_qdata", torch.zeros(128, 64, dtype=I8), "up_proj._weight_scale", "I8"),
        (MXFP4, "experts.up_proj_blocks", torch.zeros(128, 2, 16, dtype=U8), "experts.up_proj_scales", "4-bit in U8"),
    ],
    ids=lambda value: value.get("quant_method") if isinstance(value, dict) else "",
)
def test_each_methods_codes_are_counted_as_weights_and_its_scales_are_not(
    tmp_path, config, name, codes, scale, expected
):
    tensors = {f"model.layers.0.mlp.{name}": codes, f"model.layers.0.mlp.{scale}": torch.ones(16)}
    stored = inspect_checkpoint.inspect(folder_with(tmp_path / "model", tensors, quantization_config=config))
    found = {one.name: one.n_weights for one in stored.formats}
    assert found == {expected: 8192, inspect_checkpoint.SCALES: 0}
    assert stored.method == config["quant_method"] and stored.quantized_share == 1


# --- what is in effect -----------------------------------------------------------------------------------------------


def test_a_tied_head_and_the_layers_cover_the_products_as_counted_by_hand(tiny_model):
    effect = inspect_model.inspect(tiny_model)
    assert effect.dtype_bytes == {"float32": 4 * (IN_LAYERS + TABLE + NORMS)}
    rows = [(g.kind, g.kernel_path, g.tied, g.n_layers, g.n_weights, g.share) for g in effect.groups]
    assert rows == [
        ("Linear", "dense", False, 14, IN_LAYERS, 0.9),
        ("Linear", "dense", True, 1, TABLE, 0.1),
    ]
    assert (effect.bits_per_weight, effect.covered("dense")) == (32, 1)


def test_compressed_layers_are_told_by_their_kernel(tiny_loaded):
    naive = Recipe("naive", weight_format="int8", kernel_path="dequantize_then_matmul", kernel="dequantize")
    effect = inspect_model.inspect(variants.build(tiny_loaded, naive).model)
    first, head = effect.groups
    assert (first.weight_format, first.kernel, first.kernel_path) == ("int8", "dequantize", naive.kernel_path)
    assert head.kernel_path == "dense" and head.tied
    assert effect.covered("dequantize_then_matmul") == 0.9
    assert 8 < effect.bits_per_weight < 0.9 * 8.6 + 0.1 * 32  # a scale for each row of 64 or 128 codes
    assert effect.dtype_bytes["int8"] == IN_LAYERS


class QuantLinear(nn.Module):
    """What a library might bring along: packed codes in a buffer."""

    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = 64, 32
        self.register_buffer("qweight", torch.zeros(8, 32, dtype=torch.int32))


def test_what_is_not_known_is_called_unknown_and_torchao_by_its_tensor():
    model = nn.ModuleList([nn.Embedding(9, 64), QuantLinear(), nn.LayerNorm(64), nn.Linear(64, 32)])
    model.append(packed.TorchAo(torch.randn(32, 64), "int8 torchao").linear)
    rows = {
        g.kind + g.kernel: (g.weight_format, g.kernel_path, g.n_weights) for g in inspect_model.inspect(model).groups
    }
    assert rows["QuantLinear"] == ("int32", "unknown", 2048)
    assert rows["Lineardense"] == ("float32", "dense", 2048)
    assert rows["Lineartorchao"] == ("Int8Tensor", "dequantize_then_matmul", 2048)


# --- the rule of causes ----------------------------------------------------------------------------------------------


def exactly(value: float) -> Interval:
    return Interval(value, value - 0.01, value + 0.01)


QUIET = Symptoms(
    read=exactly(0.9), kernels=exactly(0.04), outside=exactly(0.06), stored_bits=8, read_bits=8, weight_share=0.95,
    unpacked=0.0, arithmetic=0.1, dtype="float32",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "name", "share"),
    [
        ({}, "nothing", 0.9),
        ({"read_bits": 32}, "extra_bits", 0.9 * 0.95 * 0.75),
        ({"kernels": exactly(0.7), "read": exactly(0.24), "unpacked": 0.9}, "unpacking", 0.63),
        ({"kernels": exactly(0.7), "read": exactly(0.24), "arithmetic": 0.74}, "arithmetic", 0.5),
        ({"kernels": exactly(0.7), "read": exactly(0.24)}, "remainder", 0.7),
        ({"outside": exactly(0.5), "read": exactly(0.46)}, "overhead", 0.5),
    ],
)
def test_each_cause_is_reached_and_has_the_share_computed_by_hand(changed, name, share):
    found = causes.likely(dataclasses.replace(QUIET, **changed))
    assert found.name == name
    assert math.isclose(found.share.estimate, share)
    assert causes.is_conclusive(dataclasses.replace(QUIET, **changed))


def test_a_wrong_number_changes_the_cause():
    right = dataclasses.replace(QUIET, read=exactly(0.6), outside=exactly(0.36), read_bits=32, stored_bits=4.5)
    assert causes.likely(right).name == "extra_bits"
    assert causes.likely(dataclasses.replace(right, stored_bits=32)).name == "overhead"
    assert causes.likely(dataclasses.replace(right, weight_share=0.3)).name == "overhead"


def test_a_busy_machine_or_two_causes_that_overlap_are_not_conclusive():
    near = dataclasses.replace(QUIET, read=exactly(0.6), outside=Interval(0.36, 0.2, 0.52), read_bits=32)
    assert [cause.name for cause in causes.causes(near)][:2] == ["extra_bits", "overhead"]
    assert not causes.is_conclusive(near)
    assert not causes.is_conclusive(dataclasses.replace(QUIET, problem="a thread waited for its core"))


def test_what_is_not_explained_is_named_only_where_nothing_else_is():
    found = dataclasses.replace(QUIET, kernels=exactly(0.5), read=exactly(0.3), outside=exactly(0.2))
    assert [cause.name for cause in causes.causes(found)] == ["remainder", "overhead"]
    assert causes.likely(found).name == "overhead" and causes.is_conclusive(found)


def test_the_causes_of_a_step_never_exceed_it():
    full = dataclasses.replace(QUIET, kernels=exactly(0.5), read=exactly(0.3), outside=exactly(0.2), read_bits=32,
                               unpacked=0.6, arithmetic=2.0)  # fmt: skip
    assert sum(cause.share.estimate for cause in causes.causes(full)) <= 1


# --- the step taken apart --------------------------------------------------------------------------------------------


def test_plain_reads_touch_as_many_bytes_as_the_step_and_hold_four_caches_at_most():
    parts = anatomy.passes(10_000_000, llc_bytes=2**20)
    assert abs(sum(part.numel() * 4 for part in parts) - 10_000_000) < 4096
    assert len({part.data_ptr() for part in parts}) == 1 and parts[0].numel() * 4 == 4 * 2**20
    assert [part.numel() * 4 for part in anatomy.passes(40_960, llc_bytes=2**20)] == [40_960]


def test_the_parts_of_a_step_add_up_to_it(tiny_loaded):
    variant = variants.build(tiny_loaded, standard())
    taken = anatomy.measure(variant, context=16, read_bytes=400_000, llc_bytes=2**20, budget_s=0.05)
    parts = taken.parts()
    assert list(parts) == ["read", "kernels", "loop", "library"] and taken.not_looped == ""
    assert math.isclose(sum(part.estimate for part in parts.values()), 1)
    assert taken.share(anatomy.STEP).estimate == 1 and taken.share(taken.ceiling).estimate <= 1
    beyond = taken.difference(anatomy.STEP, anatomy.KERNELS)
    assert math.isclose(beyond.estimate, parts["loop"].estimate + parts["library"].estimate)
    assert beyond.low < beyond.estimate < beyond.high
    step = taken.time_s(anatomy.STEP)
    assert step.low <= step.estimate <= step.high and step.estimate > 0


def test_a_model_that_the_loop_does_not_run_still_gets_its_kernels(tiny_loaded):
    tiny_loaded.model.config.hidden_act = "gelu"
    variant = variants.build(tiny_loaded, standard())
    taken = anatomy.measure(variant, context=16, read_bytes=400_000, llc_bytes=2**20, budget_s=0.02)
    assert "gelu" in taken.not_looped and list(taken.parts()) == ["read", "kernels", "rest"]
    assert taken.ceiling in taken.readers
    assert math.isclose(sum(part.estimate for part in taken.parts().values()), 1)


# --- the whole answer ------------------------------------------------------------------------------------------------


def answer(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *arguments])
    return ended.value.code, capsys.readouterr()


def test_a_quantized_file_that_is_read_as_float32_is_told_so(tmp_path, monkeypatch, known_machine):
    monkeypatch.setenv("FLASHSTUDY_CACHE", str(tmp_path / "cache"))
    found = doctor.examine(str(write_gguf(tmp_path / "tiny.gguf")), context=16, budget_s=0.02)
    assert found.not_loaded == "" and found.dtype == "float32"
    assert found.in_effect.bits_per_weight == 32 and found.stored.multiplied_bits < 5
    assert "extra_bits" in [cause.name for cause in causes.causes(found.symptoms)]
    text = " ".join(" ".join(diagnosis.lines(found)).split())
    assert "Unpacked at load" in text and "4.9 bits a weight are stored, 32.0 lie in memory" in text


def test_the_answer_is_one_json_object_with_everything(tiny_folder, known_machine, capsys):
    code, said = answer(capsys, str(tiny_folder), "--context", "16", "--json")
    found = json.loads(said.out)
    assert code == 0 and found["decode"]["context"] == 16
    keys = "model source dtype stored in_effect not_loaded decode not_timed cause causes conclusive changes"
    assert set(keys.split()) | {"best_change", "took_s"} == set(found)
    assert found["stored"]["quantized_share"] == 0 and found["in_effect"]["groups"][0]["share"] == 0.9
    shares = found["decode"]["parts"]
    assert math.isclose(sum(part["estimate"] for part in shares.values()), 1)
    assert all(set(part) == {"estimate", "low", "high"} for part in shares.values())
    applied = [change for change in found["changes"] if change["measured"]]
    assert [bool(change["in_loop"]) for change in found["changes"]] == [False, True, True]
    assert len(applied) == 3 and all(change["predicted"] for change in found["changes"])


def test_the_text_fits_a_hundred_columns_and_has_every_part(tiny_folder, known_machine, capsys):
    code, said = answer(capsys, str(tiny_folder), "--context", "16")
    assert code == 0 and max(map(len, said.out.splitlines())) <= 100
    for part in ("STORED ON DISK: safetensors", "IN EFFECT after loading: float32", "ONE DECODE STEP (measured",
                 "CAUSE: ", "WHAT WOULD HELP MOST", "predicted", "Quality, INT8"):  # fmt: skip
        assert part in said.out


def test_a_measurement_outside_its_prediction_is_told():
    change = Change("INT8", Recipe("INT8", "int8", kernel_path="fused"), Interval(0.5, 0.4, 0.6), exactly(0.9))
    assert change.contradicted and not dataclasses.replace(change, measured=exactly(0.6)).contradicted


def test_the_shortest_measured_step_helps_most_and_only_below_the_time_now():
    slow, fast = Change("slow", measured=exactly(0.9)), Change("fast", measured=Interval(0.6, 0.4, 1.1))
    assert changes.helpful((slow, fast, Change("never run", predicted=exactly(0.1)))) is fast
    assert slow.is_sure and not fast.is_sure
    assert changes.helpful((Change("slower", measured=exactly(1.2)),)) is None


def test_an_encoder_has_no_step_and_is_still_examined(tmp_path, known_machine):
    from transformers import BertConfig, BertModel

    sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128, vocab_size=128)
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    make_tiny_tokenizer().save_pretrained(tmp_path / "bert")
    found = doctor.examine(str(tmp_path / "bert"))
    assert "BertModel has no decode step" in found.not_timed and found.decode is None
    assert found.in_effect.covered("dense") == 1


def test_a_model_that_does_not_fit_is_not_loaded(tiny_folder, monkeypatch):
    monkeypatch.setattr(memory, "allowed_bytes", lambda: 500_000)
    found = doctor.examine(str(tiny_folder))
    assert "examining it as float32 needs about 658 KB, 500 KB may be used here" in found.not_loaded


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "model 'nowhere' is not found; allowed: a default model"),
        (["."], "has no config.json"),
        (["note.txt"], "file note.txt is no GGUF file"),
        (["cut.gguf"], "file cut.gguf is no whole GGUF file"),
        (["tiny", "--dtype", "int8"], "dtype 'int8' is not known; allowed: float32, bfloat16, float16"),
        (["tiny", "--context", "0"], "Invalid value for '--context'"),
        ([], "Missing argument 'MODEL'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, complaint, tmp_path, monkeypatch, capsys):
    (tmp_path / "note.txt").write_text("no model")
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    monkeypatch.chdir(tmp_path)
    code, said = answer(capsys, *arguments)
    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert (code, said.out, len(errors)) == (2, "", 1)
    assert complaint in errors[0]


def test_a_safetensors_file_cut_short_is_bad_input(tiny_folder):
    path = tiny_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="not whole"):
        doctor.examine(str(tiny_folder))

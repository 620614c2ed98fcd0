"""Shared fixtures: a tiny Llama that needs no download, and the real default model."""

import pytest

VOCABULARY = 128


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    """Tests share the machine: one thread each; and the same random numbers, whatever tests ran before."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def generator():
    """A seeded source of random tensors."""
    import torch

    return torch.Generator().manual_seed(0)


def make_tiny_model(tied: bool = True, n_layers: int = 2):
    """A Llama of 2 layers or more, width 64, 4 heads over 2 KV heads, vocabulary 128; random but always the same."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=n_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval().requires_grad_(False)


def make_tiny_tokenizer():
    """One token a word: w0, w1, <eos>, w3 … w127 have the ids 0 … 127."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCABULARY) if index != 2} | {"<eos>": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<eos>", eos_token="<eos>", pad_token="<eos>")


@pytest.fixture
def tiny_model():
    """A fresh tiny model, head tied to the embedding."""
    return make_tiny_model()


@pytest.fixture
def tiny_loaded(tiny_model):
    """The tiny model as `load_model` would return it."""
    from flashstudy.compress.checkpoints import LoadedModel
    from flashstudy.facts import models

    shape = models.from_config(tiny_model.config.to_dict(), name="tiny")
    return LoadedModel(tiny_model, make_tiny_tokenizer(), shape, "tiny", "test", "0" * 64, "float32")


@pytest.fixture
def tiny_folder(tmp_path, monkeypatch):
    """The tiny model saved as a folder, with a cache of the test's own."""
    monkeypatch.setenv("FLASHSTUDY_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tiny"
    make_tiny_model().save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def default_model():
    """The real default model, fetched on first use."""
    from flashstudy.compress.checkpoints import load_model

    return load_model()


@pytest.fixture(scope="session")
def default_text():
    """The default text."""
    from flashstudy.compress.checkpoints import load_text

    return load_text()

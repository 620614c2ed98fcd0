import math
import os

import pytest
import torch
from conftest import make_tiny_model
from torch import nn

from flashstudy.compress import variants
from flashstudy.compress.checkpoints import InputError, windows
from flashstudy.compress.kv_cache import IntegerCache
from flashstudy.facts.recipes import Recipe
from flashstudy.measure import quality
from flashstudy.measure.quality import kl_and_top1, paired_difference, remember, token_nll

IDS = torch.randint(3, 128, (3, 20), generator=torch.Generator().manual_seed(0))

# The text and the windows that the expected value below was measured on: the topics of CPython 3.11, last 30%, 16
# windows of 512 tokens starting every 2,093 tokens or so, fp32, SmolLM2-135M-Instruct from its Q4_1 file.
TEXT_SHA256 = "d9dc35bce5ab1a24ed7f4c3c9b7c22450410e9d68279e3426db458c6be371621"
EXPECTED_NLL_NATS = 2.3313
EXPECTED_BY_WINDOW_NATS = (
    2.6678, 2.2935, 2.4096, 2.5413, 1.4942, 2.5552, 2.7381, 2.9527, 2.3611, 2.0206, 2.6679, 1.7964, 2.5509, 2.1591,
    2.3833, 1.7090,
)  # fmt: skip


@pytest.fixture
def other_model():
    model = make_tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


def test_the_loss_is_the_logits_own_cross_entropy(tiny_model):
    with torch.inference_mode():
        logits = tiny_model(IDS).logits[:, :-1].double()
    expected = -logits.log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    found = token_nll(tiny_model, IDS)
    assert found.shape == (3, 19)
    assert torch.allclose(found.double(), expected, atol=1e-5)


def test_a_model_that_knows_nothing_loses_the_logarithm_of_the_vocabulary(tiny_model):
    tiny_model.lm_head.weight.zero_()
    assert torch.allclose(token_nll(tiny_model, IDS), torch.full((3, 19), math.log(128)))


def test_batches_and_chunks_of_logits_change_nothing(tiny_model, monkeypatch):
    monkeypatch.setattr(quality, "BATCH_TOKENS", 20)  # one window at a time
    expected = token_nll(tiny_model, IDS)
    assert len(remember(tiny_model, IDS).hidden) == 3
    for batch_tokens, chunk_rows in ((40, 256), (60, 7), (1, 7)):
        monkeypatch.setattr(quality, "BATCH_TOKENS", batch_tokens)
        monkeypatch.setattr(quality, "CHUNK_ROWS", chunk_rows)
        assert torch.allclose(token_nll(tiny_model, IDS), expected, atol=1e-5)
        assert torch.allclose(quality.reference_nll(remember(tiny_model, IDS)), expected, atol=1e-5)
        found = kl_and_top1(remember(tiny_model, IDS), tiny_model, IDS)
        assert torch.allclose(found.nll_b, expected, atol=1e-5) and found.kl_nats.shape == expected.shape


def test_each_window_is_scored_alone(tiny_model):
    assert torch.allclose(token_nll(tiny_model, IDS[1:2]), token_nll(tiny_model, IDS)[1:2], atol=1e-6)


def test_heads_that_scale_their_logits_go_through_the_whole_model(tiny_model, monkeypatch):
    monkeypatch.setattr(quality, "BATCH_TOKENS", 20)
    expected = token_nll(tiny_model, IDS)
    tiny_model.config.logits_scaling = 8.0
    whole, forward = [], tiny_model.forward
    monkeypatch.setattr(tiny_model, "forward", lambda **inputs: whole.append(1) or forward(**inputs))
    assert torch.allclose(token_nll(tiny_model, IDS), expected, atol=1e-5) and len(whole) == 3
    with pytest.raises(InputError, match="changes its logits after the head"):
        remember(tiny_model, IDS)


def test_a_quantized_cache_is_used_when_it_is_given(tiny_model):
    dense = token_nll(tiny_model, IDS)
    int8 = token_nll(tiny_model, IDS, make_cache=lambda: IntegerCache(tiny_model.config))
    assert 0 < (int8 - dense).abs().max() < 0.3


def test_a_model_does_not_diverge_from_itself(tiny_model):
    found = kl_and_top1(tiny_model, tiny_model, IDS)
    assert found.kl_nats.abs().max() < 1e-6 and found.same_top1.all()
    assert torch.equal(found.nll_a, found.nll_b)
    assert torch.allclose(found.nll_a, token_nll(tiny_model, IDS), atol=1e-5)


def test_divergence_is_kl_of_a_from_b_token_by_token(tiny_model, other_model):
    with torch.inference_mode():
        p = tiny_model(IDS).logits[:, :-1].double().softmax(-1)
        q = other_model(IDS).logits[:, :-1].double().softmax(-1)
    found = kl_and_top1(tiny_model, other_model, IDS)
    assert torch.allclose(found.kl_nats.double(), (p * (p / q).log()).sum(-1), atol=1e-4)
    assert torch.equal(found.same_top1, p.argmax(-1) == q.argmax(-1))
    assert torch.allclose(found.nll_b, token_nll(other_model, IDS), atol=1e-5)
    assert found.kl_nats.min() >= -1e-6 and 0 < found.same_top1.float().mean() < 1


def test_a_remembered_reference_gives_the_same_figures(tiny_model, other_model):
    expected = kl_and_top1(tiny_model, other_model, IDS)
    found = kl_and_top1(remember(tiny_model, IDS), other_model, IDS)
    assert torch.equal(found.kl_nats, expected.kl_nats) and torch.equal(found.nll_a, expected.nll_a)
    with pytest.raises(ValueError, match="other windows"):
        kl_and_top1(remember(tiny_model, IDS), other_model, IDS[:2])


def test_a_constant_difference_has_no_spread():
    a = torch.randn(8, 256)
    interval = paired_difference(a + 0.25, a)
    assert interval.estimate == pytest.approx(0.25) and interval.n_tokens == 2048
    assert interval.low == pytest.approx(0.25, abs=1e-6) and interval.high == pytest.approx(0.25, abs=1e-6)


def test_the_sign_is_first_minus_second():
    a, b = torch.zeros(8, 256), torch.rand(8, 256)
    assert paired_difference(b, a).low > 0 > paired_difference(a, b).high


def test_the_interval_covers_the_truth_of_correlated_tokens_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    n_trials, covered, naive = 150, 0, 0
    for trial in range(n_trials):
        noise = torch.randn(16, 511 + 15, generator=generator)
        tokens = noise.unfold(1, 16, 1).mean(-1)  # a moving average: neighbors share 15 of 16 parts
        interval = paired_difference(tokens, torch.zeros_like(tokens), seed=trial)
        covered += interval.low <= 0 <= interval.high
        naive += abs(tokens.mean()) <= 1.96 * tokens.std() / math.sqrt(tokens.numel())
    assert 0.90 <= covered / n_trials <= 0.99
    assert naive / n_trials < 0.6  # what tokens taken for independent would claim


def test_the_same_seed_gives_the_same_interval():
    a, b = torch.randn(8, 256), torch.randn(8, 256)
    assert paired_difference(a, b, seed=1) == paired_difference(a, b, seed=1)
    assert paired_difference(a, b, seed=1) != paired_difference(a, b, seed=2)


def test_what_cannot_be_scored_is_refused(tiny_model):
    with pytest.raises(ValueError, match="int64 token ids"):
        token_nll(tiny_model, IDS[0])
    with pytest.raises(ValueError, match="int64 token ids"):
        token_nll(tiny_model, IDS.float())
    with pytest.raises(ValueError, match="token id 128 is outside the model's vocabulary of 128"):
        token_nll(tiny_model, torch.full((1, 4), 128))
    with pytest.raises(ValueError, match="equal shapes"):
        paired_difference(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="3 blocks of 128 tokens are too few"):
        paired_difference(torch.zeros(3, 100), torch.zeros(3, 100))


def test_encoders_have_no_likelihood(tiny_model):
    class Encoder(nn.Module):
        def get_output_embeddings(self):
            return None

    with pytest.raises(InputError, match="Encoder has no language head"):
        token_nll(Encoder(), IDS)


# --- the real default model: about 30 s on two quiet cores -----------------------------------------------------------


def use_free_cores():
    """Two threads where the machine is free; beside other work two threads wait for each other, and one is faster."""
    torch.set_num_threads(2 if os.getloadavg()[0] < 1.5 else 1)


@pytest.fixture(scope="module")
def real(default_model, default_text):
    """The model, the windows, the standard's loss on them, and whether they are those of the expected value."""
    use_free_cores()
    ids = windows(default_text.evaluation, default_model.tokenizer, n_windows=16, window_tokens=512)
    return default_model, ids, token_nll(default_model.model, ids), default_text.sha256 == TEXT_SHA256


def test_the_default_model_loses_what_it_always_has(real):
    _, ids, nll, is_the_text = real
    assert nll.shape == (16, 511) and nll.isfinite().all()
    assert 1.5 < nll.mean() < 3.5  # a language model on English documentation, whatever its version
    if is_the_text:
        assert nll.mean().item() == pytest.approx(EXPECTED_NLL_NATS, rel=0.005)
        assert nll.mean(dim=1).tolist() == pytest.approx(EXPECTED_BY_WINDOW_NATS, rel=0.005)


def test_int8_per_channel_costs_less_than_a_hundredth_of_a_nat(real):
    loaded, ids, reference, _ = real
    use_free_cores()
    # rounded once, multiplied dense: the cost of the format, whatever kernel runs it; every second window saves time
    recipe = Recipe(name="int8", weight_format="int8", kernel_path="stored_dense")
    nll = token_nll(variants.build(loaded, recipe).model, ids[::2])
    interval = paired_difference(nll, reference[::2])
    assert -0.01 < interval.low < interval.high < 0.01
    assert interval.n_tokens == 8 * 511
    assert (nll - reference[::2]).abs().max() > 0.01  # single tokens do move: the weights were rounded

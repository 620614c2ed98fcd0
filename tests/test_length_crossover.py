import pytest
import torch

from flashstudy.compress import rewrite, variants
from flashstudy.facts import models
from flashstudy.facts.recipes import ARTICLE_FLASH
from flashstudy.facts.units import MIB
from flashstudy.measure import steps
from flashstudy.studies import length_crossover as study
from tests import smoke
from tests.conftest import make_tiny_model

NAME = "length_crossover"


def test_smoke_run_answers_every_curve():
    result = smoke.check_rows(NAME, ["crossover_status", "context", "time_ratio", "predicted_ratio"])
    curves = result[result.crossover_status.notna()]
    assert set(zip(curves.phase, curves.recipe, strict=True)) == {
        (phase, recipe) for phase in ("prefill", "decode") for recipe in study.FLASH
    }
    assert set(curves.crossover_status) <= {"crosses", "always_faster", "always_slower", "inconclusive"}
    crossing = curves[curves.crossover_status == "crosses"]
    assert (crossing.low <= crossing.crossover_tokens).all() and (crossing.crossover_tokens <= crossing.high).all()


def test_points_stay_inside_the_range_that_was_asked_for():
    params = study.Params(**smoke.run(NAME).provenance["parameters"])
    for name in ("prefill", "decode"):
        lengths = study.phase(smoke.run(NAME).result, name).context.dropna()
        assert lengths.between(getattr(params, f"{name}_start"), getattr(params, f"{name}_stop")).all()
        assert len(lengths) >= 4


def test_claims_get_numbers_with_their_configuration():
    judged = smoke.check_verdicts(NAME, {"short_gain", "long_loss", "kv_decompression"})
    assert 0 < judged.estimate["kv_decompression"] < 1
    rows = smoke.run(NAME).result.dropna(subset=["claim_id"])
    assert rows.config.str.len().gt(0).all()


def test_a_curve_that_stays_below_one_is_in_words_always_faster():
    assert "ARTICLE_FLASH in prefill" in study.headline(smoke.run(NAME).result)


def test_first_layers_share_tensors_and_predict_the_same_hidden_states(tiny_model):
    short = rewrite.first_layers(tiny_model, 1)
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        states = tiny_model.get_decoder()(input_ids=ids, output_hidden_states=True).hidden_states[1]
        # the last norm follows the last layer, so compare before it
        short.get_decoder().norm = torch.nn.Identity()
        assert torch.equal(short.get_decoder()(input_ids=ids).last_hidden_state, states)
    assert tiny_model.config.num_hidden_layers == 2
    with pytest.raises(ValueError, match="n_layers 3 is not between 1 and the model's 2"):
        rewrite.first_layers(tiny_model, 3)


def test_slices_of_layers_in_turns_are_the_model(tiny_loaded):
    variant = variants.build(tiny_loaded, ARTICLE_FLASH)
    first, second = rewrite.layer_slices(variant, 1)
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        states = variant.model.get_decoder()(input_ids=ids, output_hidden_states=True).hidden_states
        for part in (first, second):
            part.model.get_decoder().norm = torch.nn.Identity()
        assert torch.equal(first.model.get_decoder()(input_ids=ids).last_hidden_state, states[1])
        onward = second.model.get_decoder()(inputs_embeds=states[1]).last_hidden_state
        assert torch.allclose(variant.model.get_decoder().norm(onward), states[2], atol=1e-6)
    weights = [part.model.get_decoder().layers[0].mlp.up_proj for part in (first, second)]
    assert weights[0] is not weights[1]
    steps.decode(second, context=3, head=False)()  # its cache has one layer, whatever its place in the model
    assert len(rewrite.layer_slices(variant, 2)) == 1
    with pytest.raises(ValueError, match="n_layers 3 is not between 1 and the model's 2"):
        rewrite.layer_slices(variant, 3)


def test_slices_have_places_of_their_own_in_a_cache_and_leave_out_a_shorter_rest():
    model = make_tiny_model(n_layers=5)
    whole = variants.Variant(model, ARTICLE_FLASH, lambda: None, 0, 1.0)
    slices = rewrite.layer_slices(whole, 2)
    stacks = [part.model.get_decoder() for part in slices]
    assert [[layer.self_attn.layer_idx for layer in stack.layers] for stack in stacks] == [[0, 1], [0, 1]]
    expected = [model.get_decoder().layers[index].mlp.up_proj.weight.data_ptr() for index in range(4)]
    assert [layer.mlp.up_proj.weight.data_ptr() for stack in stacks for layer in stack.layers] == expected
    assert [layer.self_attn.layer_idx for layer in model.get_decoder().layers] == [0, 1, 2, 3, 4]  # untouched
    assert len(slices[1].make_cache().layers) == 2


def test_layers_streamed_in_turns_exceed_the_cache_twice():
    shape = models.load()["smollm2-135m"]  # 3,538,944 weights a layer
    assert steps.layers_beyond(shape, weight_bytes=1.0, llc_bytes=32 * MIB) == 19  # 64 MiB / 3.54 MB = 18.96
    assert steps.layers_beyond(shape, weight_bytes=4.0, llc_bytes=32 * MIB) == 5
    assert steps.layers_beyond(shape, weight_bytes=1.0, llc_bytes=1024 * MIB) == 30  # all there are


def test_calls_in_turns_start_over():
    calls = steps.in_turns([lambda: "a", lambda: "b"])
    assert [calls() for _ in range(3)] == ["a", "b", "a"]


def test_range_that_ends_before_it_starts_is_refused():
    with pytest.raises(ValueError, match="decode_stop 64 must be above decode_start 128"):
        study.Params(decode_stop=64)

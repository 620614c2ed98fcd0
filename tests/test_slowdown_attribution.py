import dataclasses

import pytest
import torch

from flashstudy.compress import variants
from flashstudy.facts.recipes import BEST_FLASH, standard
from flashstudy.measure import machine
from flashstudy.measure.timing import Comparison
from flashstudy.studies import slowdown_attribution as study
from tests import smoke

NAME = "slowdown_attribution"
CARD = machine.card()  # before a test moves the cache


def exact(ratio: float, standard_s: float = 1.0) -> Comparison:
    return Comparison(ratio, ratio, ratio, 10, standard_s, ratio * standard_s, False, "", 1)


def test_smoke_run_compares_every_recipe_in_every_phase():
    result = smoke.check_rows(NAME, ["recipe", "phase", "time_ratio", "predicted_ratio", "size_ratio"])
    timed = result[result.claim_id.isna() & result.time_ratio.notna()]
    whole = timed[(timed.element == "all") & timed.recipe.isin(study.WHOLE)]
    assert set(zip(whole.recipe, whole.phase, strict=True)) == {
        (recipe, phase) for recipe in study.WHOLE for phase in study.PHASES
    }
    assert (whole[whole.recipe == "standard"].time_ratio == 1).all()


def test_each_element_is_measured_alone_in_the_phases_asked_for(tiny_folder, monkeypatch):
    monkeypatch.setattr(study.machine, "card", lambda: CARD)
    best = dataclasses.replace(BEST_FLASH, sparse_format="dense", kernel="tiled", kernel_path="dequantize_then_matmul")
    best = dataclasses.replace(best, kv_path="dequantize_then_matmul")
    monkeypatch.setattr(study.choices, "best_kernels", lambda recipe, **options: best)
    sizes = dict(input_tokens=16, output_tokens=4, budget_s=0.01, n_threads=1, prefill_layers=1)
    result = study.run(study.Params(model=str(tiny_folder), element_phases=["decode"], **sizes))
    alone = result[result.claim_id.isna() & (result.element != "all")]
    assert set(zip(alone.element, alone.phase, strict=True)) == {
        (element, "decode") for element in ("weight_format", "sparsity", "kv_format")
    }
    assert (alone.low <= alone.time_ratio).all() and (alone.time_ratio <= alone.high).all()
    by_element = alone.set_index("element")
    assert by_element.stored_bytes["kv_format"] > by_element.stored_bytes["sparsity"]  # half of fp32, plus a bit each
    assert by_element.stored_bytes["sparsity"] > by_element.stored_bytes["weight_format"]


def test_flash_variants_store_the_same_formats_and_less_than_the_standard():
    result = smoke.run(NAME).result
    sizes = result[(result.phase == "decode") & result.size_ratio.notna()].set_index(["recipe", "element"]).size_ratio
    assert sizes["BEST_FLASH", "all"] < 1 and sizes["ARTICLE_FLASH", "all"] < 1
    # 106,168,320 projection weights: int8 plus a bitmap at 50% keeps 0.625 bytes of each, fp32 4; the tied head stays.
    head = 49_152 * 576 + 61 * 576
    article = (106_168_320 * 0.625 + 4 * head) / (4 * (106_168_320 + head))
    if smoke.run(NAME).provenance["parameters"]["sparsity"] == 0.5 and "fp32" in set(result.weight_format.dropna()):
        assert sizes["ARTICLE_FLASH", "all"] == pytest.approx(article, rel=0.01)


def test_claims_get_numbers_and_the_reconstruction_is_its_arithmetic():
    judged = smoke.check_verdicts(NAME, {"slowdown", "reconstruction_overheads"})
    assert judged.estimate["reconstruction_overheads"] == pytest.approx(2.2171, abs=1e-4)  # 1.18 / 0.78 * 85 / 58
    assert judged.as_stated["reconstruction_overheads"] == "supported"


def test_a_step_says_how_much_of_it_its_kernels_do_not_explain():
    rows = study.overhead(smoke.run(NAME).result).set_index("recipe")
    assert set(rows.index) == {"standard", "BEST_FLASH"}
    assert (rows.low <= rows.part_share).all() and (rows.part_share <= rows.high).all() and (rows.part_share < 1).all()


def test_the_library_runs_the_steps_that_the_loop_does_not_know(tiny_loaded):
    variant = variants.build(tiny_loaded, standard())
    built = {"standard": variant}
    assert study._looped(study.Params(), variant) and not study._looped(study.Params(loop="transformers"), variant)
    unknown = dataclasses.replace(variant, model=torch.nn.Linear(2, 2))
    assert not study._looped(study.Params(), unknown)
    own = study._decodes(study.Params(input_tokens=8, output_tokens=4), built)["standard"]()
    library = study._decodes(study.Params(input_tokens=8, output_tokens=4, loop="transformers"), built)["standard"]()
    assert torch.allclose(own, library[:, 0], atol=1e-4)


def test_headline_states_both_variants_with_intervals():
    headline = study.headline(smoke.run(NAME).result)
    assert headline.count("[") == 2 and "articles" in headline and "best kernels" in headline


def test_task_ratio_weighs_the_phases_by_the_standards_time():
    params = study.Params(output_tokens=11)
    # a prefill as long as 30 steps at 2x, 10 steps at 4x: (30*2 + 10*4) / (30 + 10) = 2.5
    task = study._task(exact(2.0), exact(4.0), exact(30.0), params)
    assert task.ratio == pytest.approx(2.5)
    assert (task.low, task.high) == pytest.approx((2.5, 2.5))


def test_a_whole_prefill_is_its_layers_and_one_head_that_no_variant_changes():
    # 5 slices at 2x the standard's 1 s, and a head of 1 s for both: (5 * 2 + 1) / (5 + 1)
    whole = study._whole_prefill(exact(2.0), share=5.0, head=1.0)
    assert whole.ratio == pytest.approx(11 / 6) and whole.low == whole.high == whole.ratio
    assert (whole.standard_s, whole.flash_s) == pytest.approx((6.0, 11.0))


def test_task_is_contended_when_any_of_its_parts_is():
    busy = dataclasses.replace(exact(4.0), contended=True, reason="other work")
    assert study._task(exact(2.0), busy, exact(30.0), study.Params()).contended
    assert study._task(exact(2.0), exact(4.0), busy, study.Params()).contended


def test_task_interval_carries_the_uncertainty_of_the_dominant_phase():
    params = study.Params(output_tokens=11)
    wide = dataclasses.replace(exact(4.0), low=4.0 / 1.1, high=4.0 * 1.1)
    task = study._task(exact(2.0), wide, exact(0.001), params)
    assert (task.low, task.high) == pytest.approx((4.0 / 1.1, 4.0 * 1.1), rel=0.01)


def test_parameters_out_of_bounds_are_refused():
    with pytest.raises(ValueError, match="sparsity"):
        study.Params(sparsity=1.0)
    with pytest.raises(ValueError, match="device"):
        study.Params(device="tpu")

import dataclasses
import itertools
import math
import time

import pytest

from flashstudy.facts import hardware, models
from flashstudy.facts.recipes import ARTICLE_FLASH, BEST_FLASH, Recipe, elements, standard
from flashstudy.predict.constants import CONSTANTS
from flashstudy.predict.roofline import PARTS, in_sequence, linear_time, ratio, step_time

DEVICES, MODELS = hardware.load(), models.load()
A100 = DEVICES["A100-80"]
LAPTOP = dataclasses.replace(
    DEVICES["Ryzen3700X"], dequantize_weights_per_s={1: 0.3e9}, decompress_weights_per_s={1: 0.1e9}
)
BF16, FP32 = standard("bf16"), standard("fp32")
INT8 = Recipe("int8", weight_format="int8", kernel_path="fused", engine="compiled")
INT4 = Recipe("int4", weight_format="int4", granularity="group", group_size=32, kernel_path="fused", engine="compiled")
NAIVE = dataclasses.replace(INT8, kernel_path="dequantize_then_matmul")
DECODE = dict(phase="decode", batch=1, context=128)
PREFILL = dict(phase="prefill", batch=1, context=2048)


def compiled(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, engine="compiled")


def seconds(recipe: Recipe, device=A100, model="llama-7b", **size) -> float:
    return step_time(MODELS[model], device, recipe, **(size or DECODE)).total_s


def test_one_row_takes_the_time_of_reading_its_weight():
    parts = linear_time(4096, 4096, 1, A100, dataclasses.replace(BF16, engine="graph")).parts_s
    assert parts["weights"] == pytest.approx(4096 * 4096 * 2 / (2039e9 * CONSTANTS["datasheet_bandwidth"].value))
    assert parts["launch"] == pytest.approx(CONSTANTS["gpu_kernel_gap_s"].value)
    assert parts["arithmetic"] == 0


def test_many_rows_take_the_time_of_their_arithmetic():
    found = linear_time(4096, 4096, 8192, A100, dataclasses.replace(BF16, engine="graph"))
    arithmetic_s = 2 * 8192 * 4096**2 / (312e12 * CONSTANTS["datasheet_arithmetic"].value)
    assert found.total_s - found.parts_s["launch"] == pytest.approx(arithmetic_s)


@pytest.mark.parametrize("device", ["A100-80", "T4", "Xeon8480+"])
@pytest.mark.parametrize("size", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("recipe", [BF16, INT8, NAIVE, ARTICLE_FLASH, BEST_FLASH], ids=lambda recipe: recipe.name)
def test_parts_sum_to_the_total_and_the_interval_holds_it(device, size, recipe):
    found = step_time(MODELS["smollm2-135m"], DEVICES[device], recipe, **size)
    assert tuple(found.parts_s) == PARTS
    assert sum(found.parts_s.values()) == pytest.approx(found.total_s, rel=1e-12)
    assert min(found.parts_s.values()) >= 0
    assert 0 < found.low_s < found.total_s < found.high_s


def test_fused_int8_decodes_faster_than_bf16_and_dequantizing_first_slower():
    assert seconds(INT8) < seconds(compiled(BF16)) < seconds(NAIVE)


def test_a_bitmap_unpacked_at_every_step_is_slower_than_dense():
    sparsity = elements(ARTICLE_FLASH, base=BF16)["sparsity"]
    assert seconds(sparsity) > 1.2 * seconds(BF16)
    assert seconds(elements(ARTICLE_FLASH)["sparsity"], LAPTOP, "smollm2-135m") > 2 * seconds(
        FP32, LAPTOP, "smollm2-135m"
    )


def test_the_article_flash_is_slower_on_a_cpu_because_it_converts():
    found = step_time(MODELS["smollm2-135m"], LAPTOP, ARTICLE_FLASH, **DECODE)
    assert found.total_s > 3 * seconds(FP32, LAPTOP, "smollm2-135m")
    assert found.parts_s["dequantize"] + found.parts_s["decompress"] > 0.8 * found.total_s


def test_a_matrix_that_fits_the_cache_is_converted_at_the_rate_of_its_size():
    sized = dataclasses.replace(LAPTOP, dequantize_weights_per_s={100 * 100: 4e9, 4000 * 4000: 0.4e9})
    small, large = (linear_time(side, side, 1, sized, NAIVE).parts_s["dequantize"] for side in (100, 4000))
    moved = [n * 4 / (LAPTOP.bytes_per_s * CONSTANTS["datasheet_bandwidth"].value) for n in (1e4, 16e6)]  # fp32, once
    per_weight_s = [(small - moved[0]) / 1e4, (large - moved[1]) / 16e6]
    assert per_weight_s[1] / per_weight_s[0] == pytest.approx(10)


def test_a_measured_conversion_rate_replaces_the_assumed_one():
    fast = dataclasses.replace(LAPTOP, dequantize_weights_per_s={1: 3e9})
    smollm = MODELS["smollm2-135m"]
    slow_s, fast_s = (step_time(smollm, device, NAIVE, **DECODE).parts_s["dequantize"] for device in (LAPTOP, fast))
    n_weights = smollm.matmul_parameters - smollm.head_parameters
    saved_s = n_weights * (1 / 0.3e9 - 1 / 3e9) / CONSTANTS["measured_conversion"].value
    assert slow_s - fast_s == pytest.approx(saved_s)


def test_dequantizing_first_matters_less_the_more_rows_share_it():
    ratios = [linear_time(4096, 4096, n, A100, NAIVE).total_s / linear_time(4096, 4096, n, A100, compiled(BF16)).total_s
              for n in (1, 512, 8192)]  # fmt: skip
    assert ratios == sorted(ratios, reverse=True)
    assert 1 < ratios[-1] < 1.3


def test_a_step_bound_by_launches_gains_nothing_from_fewer_bytes():
    tiny = dict(model="tinyllama-1.1b", device=DEVICES["RTX4090"])
    assert seconds(dataclasses.replace(INT8, engine="eager"), **tiny) == pytest.approx(seconds(BF16, **tiny))
    graph = [seconds(dataclasses.replace(recipe, engine="graph"), **tiny) for recipe in (INT8, BF16)]
    assert graph[0] < 0.9 * graph[1]


def test_a_device_without_bf16_multiplies_it_slower_than_fp32():
    fp32, fp16, bf16 = (
        linear_time(4096, 4096, 4096, DEVICES["T4"], standard(name)).total_s for name in ("fp32", "fp16", "bf16")
    )
    assert fp16 < fp32 / 5
    assert bf16 == pytest.approx(fp32 / CONSTANTS["emulated_arithmetic"].value, rel=0.05)


def test_volta_gains_no_arithmetic_from_int8_products():
    native = dataclasses.replace(INT8, kernel_path="native_lowbit")
    volta, ampere = (
        linear_time(8192, 8192, 8192, DEVICES[key], native).total_s
        / linear_time(8192, 8192, 8192, DEVICES[key], compiled(standard("fp16"))).total_s
        for key in ("V100", "A100-80")
    )
    assert ampere < 0.7 < 1 < volta


@pytest.mark.parametrize("recipe", [BF16, INT8, NAIVE, ARTICLE_FLASH], ids=lambda recipe: recipe.name)
def test_more_work_takes_longer_and_more_bandwidth_less(recipe):
    recipe = dataclasses.replace(recipe, engine="graph")  # with launches, a short step would take no longer
    contexts = [seconds(recipe, phase="decode", batch=8, context=n) for n in (128, 4096, 16384)]
    batches = [seconds(recipe, phase="decode", batch=n, context=2048) for n in (1, 16, 64)]
    prefills = [seconds(recipe, phase="prefill", batch=1, context=n) for n in (128, 1024, 8192)]
    for times in (contexts, batches, prefills):
        assert all(shorter < longer for shorter, longer in itertools.pairwise(times))
    wider = dataclasses.replace(A100, bytes_per_s=2 * A100.bytes_per_s)
    assert seconds(recipe, wider, phase="decode", batch=8, context=4096) < contexts[1]


@pytest.mark.parametrize("recipe, measured_s", [(BF16, 0.00953289), (INT8, 0.00642756), (INT4, 0.0050813)])
def test_published_decode_steps_lie_within_the_interval(recipe, measured_s):
    """gpt-fast on an A100 80GB, Llama-2-7B, compiled; data/published/absolute.csv, A001 to A003."""
    found = step_time(MODELS["llama-7b"], A100, compiled(recipe), **DECODE)
    assert found.low_s < measured_s < found.high_s
    assert found.total_s == pytest.approx(measured_s, rel=0.25)


def test_an_unknown_path_lies_between_the_fused_and_the_naive_one():
    unknown = step_time(MODELS["llama-7b"], A100, dataclasses.replace(INT8, kernel_path="unknown"), **DECODE)
    assert seconds(INT8) < unknown.total_s < seconds(NAIVE)
    assert unknown.low_s < seconds(INT8) < seconds(NAIVE) < unknown.high_s


def test_a_ratio_is_surer_than_the_quotient_of_its_ends():
    variant, base = (step_time(MODELS["llama-7b"], A100, recipe, **DECODE) for recipe in (NAIVE, compiled(BF16)))
    estimate, low, high = ratio(variant, base)
    assert estimate == pytest.approx(variant.total_s / base.total_s)
    assert variant.low_s / base.high_s < low < estimate < high < variant.high_s / base.low_s


def test_only_the_remainder_stays_between_a_time_and_itself():
    base = step_time(MODELS["llama-7b"], A100, BF16, **DECODE)
    spread = base.shifts["remainder"] * 2**0.5
    assert ratio(base, base) == pytest.approx((1, math.exp(-spread), math.exp(spread)))


def test_what_does_not_fit_is_refused_with_both_sizes():
    with pytest.raises(
        ValueError, match=r"llama2-70b as standard with 1 × 128 cached tokens needs 138 GB, 1 × A100.* 85.9 GB"
    ):
        seconds(BF16, model="llama2-70b")
    assert step_time(MODELS["llama2-70b"], A100, BF16, **DECODE, n_devices=2).total_s > 0
    assert seconds(INT4, model="llama2-70b") > 0


def test_two_devices_halve_the_work_and_pay_for_talking():
    one, two = (step_time(MODELS["llama-7b"], A100, BF16, **PREFILL, n_devices=n) for n in (1, 2))
    assert two.parts_s["weights"] == pytest.approx(one.parts_s["weights"] / 2)
    sent_s = 2 * 32 * 2048 * 4096 * 2 / 300e9  # two all-reduces a layer, 2 (n - 1) / n = 1
    assert two.parts_s["communication"] == pytest.approx(sent_s + 2 * 32 * CONSTANTS["all_reduce_s"].value)
    assert two.total_s < one.total_s


def test_nine_heads_on_two_devices_leave_one_of_ten_places_empty():
    found = step_time(MODELS["smollm2-135m"], A100, BF16, **DECODE, n_devices=2)
    busy_s = found.total_s - found.parts_s["launch"] - found.parts_s["communication"] - found.parts_s["padding"]
    assert found.parts_s["padding"] == pytest.approx(busy_s / 9)


def test_devices_without_a_link_cannot_share():
    with pytest.raises(ValueError, match="has no interconnect"):
        step_time(MODELS["smollm2-135m"], LAPTOP, FP32, **DECODE, n_devices=2)


def test_a_prediction_is_cheap():
    start = time.process_time()
    for _ in range(200):
        seconds(BEST_FLASH)
    assert time.process_time() - start < 2


def test_steps_in_sequence_add_their_times_and_keep_their_interval():
    prefill, decode = (
        step_time(MODELS["llama3-8b"], A100, BF16, phase=phase, batch=1, context=256) for phase in ("prefill", "decode")
    )
    task = in_sequence([(prefill, 1), (decode, 63)])
    assert task.total_s == pytest.approx(prefill.total_s + 63 * decode.total_s)
    assert sum(task.parts_s.values()) == pytest.approx(task.total_s)
    alone = in_sequence([(decode, 5)])
    assert alone.high_s / alone.total_s == pytest.approx(decode.high_s / decode.total_s)

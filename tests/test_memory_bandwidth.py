import random
from dataclasses import astuple

import pandas as pd
import pytest
import torch

from flashstudy.compress.linear import make_linear
from flashstudy.measure import machine, parts, streams, timing
from flashstudy.measure.blocks import Block, Stopwatch
from flashstudy.measure.trial import Trial
from flashstudy.studies import memory_bandwidth as study
from tests import smoke

NAME = "memory_bandwidth"
N_WEIGHTS = 1024 * 4096  # the key projection of llama3-8b


def streamed():
    result = smoke.run(NAME).result
    return result[result.time_ratio.notna() & (result.residency == "streamed")]


def test_smoke_run_has_naive_library_and_best_candidates_of_int8():
    smoke.check_rows(NAME, ["mbu", "read_bytes", "role", "residency", "skipped"])
    int8 = streamed()[streamed().weight_format == "int8"]
    assert {"naive", "library", "best-candidate"} <= set(int8.role)
    result = smoke.run(NAME).result
    assert (result.residency == "hot_cache").sum() == 1
    compiled = result[result.kernel == "torchao_compiled"]
    assert compiled.time_ratio.isna().all() and compiled.skipped.str.contains("torch.compile").all()


def test_parts_of_a_naive_path_are_measured_each_and_sum_to_the_whole():
    rows = smoke.run(NAME).result
    found = rows[(rows.note == "stage") & rows.kernel.eq("dequantize")].set_index("part")
    staged = found.part_share
    assert set(staged.index) == {"dequantize", "multiply", "sum of parts"}
    # two sums of the same stages, one from the clock read inside; busy seconds may move them apart
    assert staged["dequantize"] + staged["multiply"] == pytest.approx(staged["sum of parts"], rel=0.1)
    # within 10% of the whole, as far as this short run can tell
    assert found.low["sum of parts"] <= 1.1 and found.high["sum of parts"] >= 0.9
    bounds = rows[(rows.note == "bound") & rows.kernel.eq("int8pack")].set_index("part").part_share
    assert set(bounds.index) == {"bytes", "instructions", "launch"} and (bounds > 0).all()


def test_a_stage_gets_its_share_of_the_whole_calls_time():
    ticks = iter([0.0, 3.0, 4.0] * 100_000)  # dequantize takes 3 units, multiply 1
    layer = make_linear(torch.randn(16, 64), weight_format="int8", kernel="dequantize")
    found = parts.stages([layer, layer], torch.ones(1, 64), budget_s=0.05, clock=lambda: next(ticks))
    by_name = {part.name: part.share for part in found}
    assert by_name["dequantize"] == pytest.approx(0.75 * by_name["sum of parts"])
    assert by_name["multiply"] == pytest.approx(0.25 * by_name["sum of parts"])
    packed = make_linear(torch.randn(16, 64), weight_format="int8", kernel="int8pack")
    with pytest.raises(ValueError, match="int8pack is one kernel and has no stages"):
        parts.stages([packed], torch.ones(1, 64), budget_s=0.05)


def test_working_sets_reach_from_the_cores_cache_to_beyond_the_last():
    rows = smoke.run(NAME).result.query("role == 'working set'").set_index("working_set_bytes")
    largest = rows.index.max()
    assert largest == 4 * machine.card().llc_bytes and rows.part_share[largest] == 1.0
    assert (rows.low <= rows.part_share).all() and (rows.part_share <= rows.high).all()


def test_roofs_come_from_the_card_and_pruned_work_counts_half():
    rows = smoke.run(NAME).result
    assert set(rows[rows.role == "ceiling"].weight_format) == {"fp32", "bf16", "fp16", "int8"}
    timed = streamed().set_index(["weight_format", "kernel"])
    assert timed.flop["fp32", "dense"] == 2 * N_WEIGHTS and timed.flop["int8", "bitmap_table"] == N_WEIGHTS


def test_a_share_of_the_ceiling_has_an_interval_of_its_own_and_is_at_most_all_of_it():
    rows = streamed()
    assert (rows.mbu_low <= rows.mbu).all() and (rows.mbu <= rows.mbu_high).all() and rows.mbu_high.max() <= 1
    assert (rows.ceiling_bytes_per_s > 1e9).all() and rows.ceiling.str.len().gt(0).all()


def test_a_share_is_bytes_per_second_over_the_fastest_readers():
    def block(call_s):
        return Block(call_s, call_s)

    taken = [{"read": block(1.0), "kernel": block(1.0), "slow": block(4.0)} for _ in range(30)]
    trial = Trial({name: None for name in taken[0]}, "read", Stopwatch(), random.Random(0), 5, 0.01, rounds=taken)
    found = streams.Streams(timing.Rounds(trial, "", False), {"read": 100, "kernel": 40, "slow": 100}, "read", "slow")
    assert astuple(found.share("kernel")) == pytest.approx((0.4, 0.4, 0.4, False))  # 40 bytes while the reader has 100
    assert found.share("slow").estimate == pytest.approx(0.25)
    wrong = streams.Streams(found.rounds, found.read_bytes | {"kernel": 400}, "read", "slow")
    assert wrong.share("kernel").contended  # four times the ceiling is no measurement


def test_a_table_at_many_rows_keeps_its_kernels():
    rows = pd.DataFrame(
        dict(kernel=["dequantize", "packed", "dense"], rows=[16, 16, 1], time_ratio=[3.0, 0.5, 0.7])
    ).assign(
        residency=["streamed", "streamed", "hot_cache"], note="acceptable", weight_format="int8", model="m", kind="k"
    )
    rows = rows.assign(
        role=["naive", "best-candidate", "library"], sparse_format="dense", low=0.4, high=3.2, contended=False
    )
    assert set(study.table(rows).kernel) == {"dequantize", "packed", "dense"}
    assert study.headline(rows).startswith("With 16 rows, INT8 takes 0.500")


def test_a_faster_kernel_with_a_wrong_product_is_not_the_best():
    rows = pd.DataFrame(
        dict(kernel=["naive", "wrong", "right"], time_ratio=[3.0, 0.2, 0.5], note=["acceptable", "error", "acceptable"])
    ).assign(rows=1, residency="streamed", weight_format="int8", sparse_format="dense", role="best-candidate")
    rows = rows.assign(model="m", kind="k")
    assert study.table(rows).kernel.tolist() == ["right"]


def test_no_kernel_exceeds_the_ceiling_and_the_ceiling_is_reached():
    mbu = streamed().mbu
    assert mbu.max() <= 1.0 and mbu.min() > 0
    assert mbu.max() > 0.5, "the best kernel or the plain read is near the ceiling"


def test_bytes_read_match_hand_counts():
    rows = streamed().set_index(["weight_format", "kernel"])
    assert rows.read_bytes["fp32", "dense"] == 4 * N_WEIGHTS
    # int8 with one 2- or 4-byte scale a row
    assert rows.read_bytes["int8", "dequantize"] == pytest.approx(N_WEIGHTS, rel=2e-3)


def test_weights_rotate_through_four_caches():
    from flashstudy.compress.linear import make_linear
    from flashstudy.facts import models
    from flashstudy.measure import rotation

    weight = rotation.random_weight(models.load()["smollm2-135m"], "o", seed=0)
    layer = make_linear(weight, weight_format="fp32", kernel="dense")
    copies = rotation.copies(layer, llc_bytes=3_000_000)
    assert len(copies) == 10  # 576 * 576 * 4 = 1,327,104 bytes; 12,000,000 / 1,327,104 = 9.04
    assert len({copy.product.weight.data_ptr() for copy in copies}) == 10


def test_claims_get_numbers():
    ids = {"flops_65", "dequant_share", "hierarchical_layout"}
    if smoke.run(NAME).result.weight_format.eq("bf16").any():
        ids.add("int8_speed")
    judged = smoke.check_verdicts(NAME, ids)
    assert judged.as_stated["flops_65"] == "not testable here"
    assert judged.estimate["dequant_share"] > 0


def test_standard_is_the_dtype_of_the_machine_card():
    expected = {"bfloat16": "bf16", "float32": "fp32"}[machine.card().standard_dtype]
    dense = streamed()[(streamed().kernel == "dense") & (streamed().time_ratio == 1.0)]
    assert set(dense.weight_format) == {expected}


def test_unknown_shape_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'gpt-9' is not one of .*llama3-8b"):
        study.Params(shapes=["llama3-8b", "gpt-9"])

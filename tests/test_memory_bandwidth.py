import random
from dataclasses import astuple

import pandas as pd
import pytest

from flashstudy.measure import machine, streams, timing
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
    assert (smoke.run(NAME).result.residency == "hot_cache").sum() == 1


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
    ).assign(residency=["streamed", "streamed", "hot_cache"], note="acceptable", weight_format="int8")
    rows = rows.assign(
        role=["naive", "best-candidate", "library"], sparse_format="dense", low=0.4, high=3.2, contended=False
    )
    assert set(study.table(rows).kernel) == {"dequantize", "packed", "dense"}
    assert study.headline(rows).startswith("With 16 rows, INT8 takes 0.500")


def test_a_faster_kernel_with_a_wrong_product_is_not_the_best():
    rows = pd.DataFrame(
        dict(kernel=["naive", "wrong", "right"], time_ratio=[3.0, 0.2, 0.5], note=["acceptable", "error", "acceptable"])
    ).assign(rows=1, residency="streamed", weight_format="int8", sparse_format="dense", role="best-candidate")
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
    exact = streamed()[(streamed().time_ratio == 1.0) & (streamed().low == 1.0)]
    assert set(exact.weight_format) == {expected}


def test_unknown_shape_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'gpt-9' is not one of .*llama3-8b"):
        study.Params(shape="gpt-9")

import pytest

from flashstudy.measure import machine
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

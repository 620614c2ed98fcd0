import pandas as pd
import pytest

from flashstudy.studies import quantization_error as study
from tests import smoke

NAME = "quantization_error"


def test_smoke_run_has_a_row_for_every_matrix_and_every_format():
    result = smoke.check_rows(NAME, ["sqnr_db", "delta_nll_nats", "kl_nats", "bits_per_weight"])
    params = study.Params(**smoke.run(NAME).provenance["parameters"])
    n_formats = len(params.bits) * len(params.granularities)
    assert len(study.table(result)) == n_formats + 1
    matrices = result[result.kind.notna()]
    n_layers = len(range(0, 30, params.layer_stride))
    assert len(matrices) == n_layers * 7 * n_formats
    assert set(matrices.kind) == {"q", "k", "v", "o", "gate", "up", "down"}


def test_four_bits_lose_25_db_against_eight_at_the_same_scale_rule():
    matrices = smoke.run(NAME).result.dropna(subset=["kind"])
    mean = matrices[matrices.granularity == "channel"].groupby("bits").sqnr_db.mean()
    # both scales come from the same largest weight: 20 log10(127 / 7) = 25.2 dB while rounding dominates
    assert mean[8] - mean[4] == pytest.approx(25.2, abs=1.0)


def test_finer_scales_keep_more_signal():
    mean = smoke.run(NAME).result.dropna(subset=["kind"]).groupby(["bits", "granularity"]).sqnr_db.mean()
    for bits in (8, 4):
        assert mean[bits, "tensor"] < mean[bits, "channel"]


def test_groups_keep_more_signal_than_rows(tiny_loaded):
    formats = study._formats(study.Params(bits=[4], granularities=["channel", "group"], group_size=32))
    rows = pd.DataFrame(study.measure_matrices(tiny_loaded, formats, layer_stride=1))
    mean = rows.groupby("granularity").sqnr_db.mean()
    # normal weights, 64 to a row: a largest weight of 32 is smaller than one of 64 by about 0.25 deviations of 2.4
    assert 0.5 < mean["group"] - mean["channel"] < 1.5
    assert set(rows.kind) == {"q", "k", "v", "o", "gate", "up", "down"}


def test_eight_bits_per_channel_are_nearly_lossless_and_four_per_tensor_are_not():
    quality = study.table(smoke.run(NAME).result).set_index(["bits", "granularity"])
    assert abs(quality.delta_nll_nats[8, "channel"]) < 0.03
    assert quality.low[4, "tensor"] > 0.1
    assert quality.kl_nats[8, "channel"] < 0.01 < quality.kl_nats[4, "tensor"]


def test_int8_halves_sixteen_bits_it_does_not_quarter_them():
    judged = smoke.check_verdicts(NAME, {"int8_memory", "attention_error"})
    # 576- and 1536-wide rows with a 2-byte scale each: 16 / (8 + 16 / in_features), mean over the model's weights
    assert judged.estimate["int8_memory"] == pytest.approx(1.995, abs=0.003)
    assert judged.as_stated["int8_memory"] == judged.mechanism_here["int8_memory"] == "contradicted"


def test_attention_gap_is_the_difference_of_the_means():
    matrices = pd.DataFrame(
        [dict(layer=layer, kind=kind, sqnr_db=30.0 + 4.0 * (kind == "q")) for layer in range(5) for kind in ("q", "up")]
    )
    assert study.attention_gap_db(matrices, seed=0) == pytest.approx((4.0, 4.0, 4.0))


def test_too_little_text_for_an_interval_is_refused_before_any_work():
    with pytest.raises(ValueError, match="n_windows 3 of window_tokens 64 give 3 blocks"):
        study.Params(n_windows=3)
    assert study.Params(n_windows=2, window_tokens=256).n_windows == 2


def test_group_that_does_not_divide_is_refused_before_any_work_with_sizes_that_do():
    with pytest.raises(ValueError, match=r"128 does not divide in_features \[576\].*64, 32, 16"):
        study.run(study.Params(group_size=128))


def test_headline_names_each_width():
    headline = study.headline(smoke.run(NAME).result)
    assert "INT8" in headline and "INT4" in headline and "measured" in headline

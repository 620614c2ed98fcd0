import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flashstudy.compress import probes
from flashstudy.compress.kernel_table import WeightLayout
from flashstudy.compress.linear import available_kernels, make_linear
from flashstudy.facts import columns
from flashstudy.facts.recipes import ARTICLE_FLASH, BEST_FLASH, elements, standard
from flashstudy.measure import kernels
from flashstudy.measure.kernels import fill, main_shapes, rank
from flashstudy.measure.timing import Comparison

SMALL = dict(out_features=96, in_features=64, rows=2, n_threads=1, budget_s=0.02, standard_dtype="float32")


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """A machine with a last-level cache of 64 KiB, so that few copies exceed it."""
    monkeypatch.setattr(kernels.host, "read", lambda: SimpleNamespace(llc_bytes=1 << 16))


@pytest.fixture
def known_times(monkeypatch):
    """Replaces the clock: `times[kernel, rows]` in seconds of each kernel, the dense product taking 1."""
    times = {}

    def compare_many(calls, reference, **options):
        comparisons = {}
        for name, call in calls.items():
            kernel = name if isinstance(name, str) else name[0]
            rows = call().shape[0]
            seconds = times.get((kernel, rows), 1.0)
            comparisons[name] = Comparison(seconds, seconds, seconds, 9, 1.0, seconds, False, "", 1)
        return comparisons

    monkeypatch.setattr(kernels, "compare_many", compare_many)
    monkeypatch.setattr(kernels, "_one_call_s", lambda call: 1.0)
    return times


def test_every_kernel_of_the_format_has_a_row_after_the_standards():
    frame = rank("int8", **SMALL)
    assert frame.kernel[0] == "dense fp32" and frame.role[0] == "standard" and frame.time_ratio[0] == 1
    assert set(frame.kernel[1:]) == {info.kernel for info in available_kernels("int8")}
    columns.check(frame)
    measured = frame[frame.skipped == ""]
    assert (measured.time_ratio > 0).all() and (measured.low <= measured.time_ratio).all()
    assert ((measured.n_pairs >= 2) | measured.contended).all() and measured.relative_error.notna().all()
    assert {"naive", "library", "best"} <= set(frame.role)


def test_the_best_is_the_fastest_kernel_that_computes_the_right_product():
    frame = rank("int8", **SMALL)
    acceptable = frame[(frame.note == "acceptable") & (frame.role != "standard")]
    assert frame[frame.role == "best"].index.tolist() == [acceptable.time_ratio.idxmin()]
    rounding = frame[frame.kernel_path == "native_lowbit"]
    assert rounding.note.str.startswith("error above 0.01").all()  # int8 activations beside an outlier channel


def test_a_fast_kernel_beyond_the_bound_is_not_the_best(known_times):
    known_times |= {("dynamic_int8", 2): 0.1, ("int8pack", 2): 0.5}
    frame = rank("int8", **SMALL)
    assert frame[frame.role == "best"].kernel.tolist() == ["int8pack"]
    assert frame[frame.kernel == "dynamic_int8"].role.tolist() == ["candidate"]


def test_int8_activations_are_acceptable_where_they_are_asked_for():
    frame = rank("int8", activation_format="int8", **SMALL)
    assert (frame[frame.kernel_path == "native_lowbit"].note == "acceptable").all()


def test_what_cannot_run_is_a_row_with_the_reason():
    frame = rank("int8", **(SMALL | dict(in_features=40)))
    skipped = frame[frame.skipped != ""].set_index("kernel")
    assert "divisible by 16, not 40" in skipped.skipped["int8pack"]
    assert skipped.time_ratio.isna().all()


def test_sparse_layouts_are_ranked_on_pruned_weights():
    layout = WeightLayout("fp32", sparse_format="csr")
    frame = rank("fp32", layout=layout, sparsity=0.75, **SMALL)
    assert frame.kernel.tolist() == ["dense fp32", "csr"]
    assert frame.read_bytes.tolist() == [96 * 64 * 4, 96 * 16 * 8 + 97 * 4]


def test_weights_stream_from_copies_beyond_the_cache_unless_asked_to_stay():
    bench = kernels.Bench((96, 64), torch.float32, 0.0, 0)
    layer = bench.standard().layer
    calls = {residency: bench.call(layer, 1, residency) for residency in ("streamed", "hot_cache")}
    assert sum(copy.read_bytes for copy in bench._copies[id(layer)]) >= 4 * (1 << 16)
    assert len({copy.product.weight.data_ptr() for copy in bench._copies[id(layer)]}) == len(bench._copies[id(layer)])
    assert torch.equal(calls["streamed"](), calls["hot_cache"]())
    with pytest.raises(ValueError, match="residency 'warm' is not"):
        rank("int8", residency="warm", **SMALL)


# --- fill ------------------------------------------------------------------------------------------------------------


def test_recipes_without_unknown_paths_come_back_as_they_are():
    for recipe in (ARTICLE_FLASH, standard(), elements(ARTICLE_FLASH)["kv_format"]):
        assert fill(recipe, shapes=[(96, 64)]) == (recipe, False)
    assert fill(elements(BEST_FLASH)["kv_format"], shapes=[])[0].kv_path == "dequantize_then_matmul"


def test_the_kernel_with_the_least_time_for_the_task_wins(known_times):
    # decode counts 64 steps, prefill one: 64 · 0.5 + 20 beats 64 · 1 + 0.1
    known_times |= {("tiled", 1): 0.5, ("tiled", 256): 20, ("int8pack", 1): 1, ("int8pack", 256): 0.1}
    known_times |= {(name, rows): 30 for name in ("torchao", "int8pack_tiled", "bitmap_table") for rows in (1, 256)}
    filled, _ = fill(BEST_FLASH, shapes=[(96, 64)], standard_dtype="float32")
    assert (filled.kernel, filled.kernel_path) == ("tiled", "dequantize_then_matmul")
    known_times["tiled", 256] = 40  # 32 + 40 > 64 + 0.1
    filled, _ = fill(BEST_FLASH, shapes=[(96, 64)], standard_dtype="float32")
    assert (filled.kernel, filled.kernel_path) == ("int8pack", "fused")
    assert (filled.sparse_format, filled.kv_path, filled.name) == ("dense", "dequantize_then_matmul", "BEST_FLASH")


def test_decompressing_wins_only_where_it_is_faster(known_times):
    known_times["bitmap_table", 1] = 0.1
    assert fill(BEST_FLASH, shapes=[(96, 64)], standard_dtype="float32")[0].sparse_format == "bitmap"


def test_a_faster_kernel_with_a_wrong_product_is_not_chosen(known_times):
    known_times["dynamic_int8", 1] = 0.001
    recipe = dataclasses.replace(BEST_FLASH, sparsity=0.0, pattern="none", sparse_format="dense")
    assert fill(recipe, shapes=[(96, 64)], standard_dtype="float32")[0].kernel != "dynamic_int8"
    asked = dataclasses.replace(recipe, activation_format="int8")
    assert fill(asked, shapes=[(96, 64)], standard_dtype="float32")[0].kernel == "dynamic_int8"


def test_the_bound_decides_among_kernels_of_the_same_activations(known_times, monkeypatch):
    known_times |= {("int8pack", 1): 0.1, ("int8pack_tiled", 1): 0.2, ("tiled", 1): 0.3}
    assert fill(BEST_FLASH, shapes=[(96, 64)], standard_dtype="float32")[0].kernel == "int8pack"
    monkeypatch.setitem(probes.ERROR_BOUNDS, "int8", 1e-4)  # bf16 activations cost 3e-3
    assert fill(BEST_FLASH, shapes=[(96, 64)], standard_dtype="float32")[0].kernel == "tiled"
    monkeypatch.setitem(probes.ERROR_BOUNDS, "int8", 1e-9)
    monkeypatch.setitem(probes.ERROR_BOUNDS, "fp32", 1e-9)
    with pytest.raises(ValueError, match="no kernel here multiplies int8"):
        fill(BEST_FLASH, shapes=[(96, 64)], standard_dtype="float32")


def test_a_hopeless_kernel_is_not_timed_in_rounds(known_times, monkeypatch):
    seen = set()
    timed = kernels.compare_many
    monkeypatch.setattr(kernels, "compare_many", lambda calls, *a, **k: seen.update(calls) or timed(calls, *a, **k))
    slow = iter([1.0, 100.0, *[1.0] * 20])
    monkeypatch.setattr(kernels, "_one_call_s", lambda call: next(slow))
    recipe = dataclasses.replace(BEST_FLASH, sparsity=0.0, pattern="none", sparse_format="dense")
    runs = kernels.bench_runs(recipe, kernels.Bench((96, 64), torch.float32, 0.0, 0))
    bench = kernels.Bench((96, 64), torch.float32, 0.0, 0)
    times, _ = kernels._times(runs, bench.standard(), bench, 1, 1.0, 1)
    left_out = list(runs)[1]
    assert left_out not in seen and times[left_out] == 100.0


def test_pruning_alone_keeps_float_zeros_dense_where_that_is_fastest(known_times):
    known_times |= {("dense", 1): 0.5, ("dense", 256): 0.5}
    filled, _ = fill(elements(BEST_FLASH)["sparsity"], shapes=[(96, 64)], standard_dtype="float32")
    assert (filled.kernel, filled.kernel_path, filled.sparse_format) == ("dense", "stored_dense", "dense")


def test_filling_with_the_real_clock_gives_a_recipe_that_can_be_built():
    filled, _ = fill(BEST_FLASH, shapes=[(96, 64)] * 3, budget_s=0.2, n_threads=1, standard_dtype="float32")
    layer = make_linear(
        torch.randn(96, 64), weight_format="int8", kernel=filled.kernel, sparse_format=filled.sparse_format
    )
    assert layer.info.kernel_path == filled.kernel_path != "unknown"


def test_shapes_are_measured_until_most_weights_are_covered():
    layer = [(576, 576)] * 2 + [(192, 576)] * 2 + [(1536, 576)] * 2 + [(576, 1536)]
    # weights: gate and up 50%, down 25%, q and o 19%, k and v 6%
    assert main_shapes(layer * 30) == {(1536, 576): 60, (576, 1536): 30}
    assert main_shapes([(8, 8)]) == {(8, 8): 1}
    with pytest.raises(ValueError, match="shapes is empty"):
        main_shapes([])


# --- the probes ------------------------------------------------------------------------------------------------------


class SharedScale(nn.Module):
    """Activations rounded with one scale a call, as a kernel does that the probes must catch."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        scale = x.abs().max() / 127
        return ((x / scale).round() * scale) @ self.weight.T


def test_the_probes_catch_a_scale_shared_with_the_first_token():
    weight = torch.randn(64, 128)
    assert probes.relative_error(SharedScale(weight), weight.double(), torch.float32) > 0.5
    assert probes.relative_error(lambda x: x @ weight.T, weight.double(), torch.float32) < 1e-6


def test_the_probes_catch_one_wrong_column_and_one_percent_of_gain():
    weight = torch.randn(64, 128)
    wrong = weight.clone()
    wrong[:, 40] = 0
    assert probes.relative_error(lambda x: x @ wrong.T, weight.double(), torch.float32) > 0.01
    error = probes.relative_error(lambda x: 1.01 * (x @ weight.T), weight.double(), torch.float32)
    assert error == pytest.approx(0.01, rel=1e-3)


def test_probe_activations_have_an_outlier_channel_and_a_first_token():
    x = probes.activations(200, 96, 0)
    spread = x[1:].std(dim=0)
    assert spread.argmax() == 32 and spread[32] > 20 * spread.median()
    assert x[0].abs().max() > 100 * x[1:].abs().median()
    assert x[0].abs().median() > 10 * x[1:].abs().median()
    assert probes.activations(1, 96, 0).abs().max() < 200  # one row is an ordinary token's


def test_bounds_are_what_the_format_itself_costs():
    weight = torch.randn(512, 4096, generator=torch.Generator().manual_seed(0))
    for layout in (WeightLayout("int8"), WeightLayout("int4", granularity="group", group_size=64)):
        layer = make_linear(
            weight,
            weight_format=layout.weight_format,
            kernel="tiled",
            granularity=layout.granularity,
            group_size=layout.group_size,
        )
        cost = ((probes.exact_weight(layer, weight, layout) - weight).norm() / weight.norm()).item()
        assert cost == pytest.approx(probes.error_bound(layout.weight_format), rel=0.2)

import dataclasses
import io
import pickle
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from flashstudy.compress import gguf_cut, loading
from flashstudy.facts import claims
from flashstudy.measure import memory, memory_limit, page_cache, starts, steps
from flashstudy.share import markup, plots, style, verdicts
from flashstudy.studies import cold_start as study
from tests import smoke

NAME = "cold_start"
# The tiny model's first layer, q and o 64 × 64, k and v 32 × 64, gate, up and down 128 × 64; embedding and three norms
LINEAR_WEIGHTS = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64
ROWS = 2 * 64 + 2 * 32 + 2 * 128 + 64
FLOAT_BYTES = 4 * (LINEAR_WEIGHTS + 128 * 64 + 3 * 64)


def timed(phase="ready"):
    result = smoke.run(NAME).result
    return result[(result.phase == phase) & result.time_ratio.notna()].set_index(["way", "page_cache"])


# --- a run -----------------------------------------------------------------------------------------------------------


def test_smoke_run_times_every_way_and_says_what_was_skipped():
    result = smoke.check_rows(NAME, ["way", "page_cache", "phase", "time_ratio", "stored_bytes", "skipped"])
    ways = {study.NAMES[way] for way in ("safetensors", "gguf", "dequantize")}
    assert set(timed().index.get_level_values("way")) == ways
    cold_is_skipped = result.skipped.str.contains("pages of", na=False).any()
    assert {*timed().index.get_level_values("page_cache")} == ({"warm"} if cold_is_skipped else {"warm", "cold"})
    assert result[result.phase == "compile"].skipped.str.startswith("compiled is off").all()
    assert study.headline(result).startswith("With a ") and len(study.table(result)) >= len(ways)


def test_a_total_is_at_least_its_parts_and_the_standard_is_one():
    ready, first, load = timed(), timed("first token"), timed("load")
    assert (first.time_s >= 0.9 * ready.time_s).all() and (ready.time_s >= 0.9 * load.time_s.reindex(ready.index)).all()
    assert (ready.time_ratio.loc["safetensors"] == 1.0).all()


def test_claims_get_numbers_and_swapping_a_reason():
    judged = smoke.check_verdicts(NAME, {"cold_start"})
    result = smoke.run(NAME).result
    configs = result.config[result.claim_id == "cold_start"]
    assert {config.split(" on load")[0] for config in configs} == {"GGUF, converted", "INT8, dequantized"}
    assert judged.mechanism_here["swapping"] == judged.as_stated["swapping"] == "not testable here"
    assert judged.reason["swapping"] == "the standard's own peak was not asked for, so there is no limit to set"


# --- the ways to load ------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_files(tiny_loaded, tmp_path, monkeypatch):
    """The tiny model's first layer on disk in its forms."""
    monkeypatch.setenv("FLASHSTUDY_CACHE", str(tmp_path / "cache"))
    return loading.write(tiny_loaded, tmp_path, tmp_path / "forms", n_layers=1)


def loaded(way, files):
    found = None
    for step in loading.steps(way, files, "float32").values():
        found = step(found)
    return found


def logits(variant):
    return steps.prefill(variant, torch.tensor([[1, 5, 9, 33]]))()


def same_tensors(one, other):
    mine, theirs = one.model.state_dict(), other.model.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_float_ways_give_the_same_model_and_quantized_ways_the_same_codes(tiny_files):
    by_way = {way: loaded(way, tiny_files) for way in loading.WAYS if way != "gguf"}
    assert same_tensors(by_way["mapped"], by_way["safetensors"])
    assert same_tensors(by_way["quantize"], by_way["prequantized"])
    torch.testing.assert_close(logits(by_way["dequantize"]), logits(by_way["prequantized"]))
    assert not torch.equal(logits(by_way["prequantized"]), logits(by_way["safetensors"]))
    assert len(by_way["quantize"].model.model.layers) == 1
    assert by_way["quantize"].stored_bytes == by_way["prequantized"].stored_bytes
    assert by_way["quantize"].coverage == pytest.approx(by_way["prequantized"].coverage)
    assert by_way["safetensors"].stored_bytes == FLOAT_BYTES


def test_only_the_mapped_way_leaves_weights_in_the_file(tiny_files):
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc/self/maps here")
    kept = {way: loaded(way, tiny_files) for way in loading.WAYS if way != "gguf"}
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [[int(end, 16) for end in span[0].split("-")] for span in maps if span[-1].endswith(".safetensors")]

    def in_file(variant):
        tensors = [*variant.model.parameters(), *variant.model.buffers()]
        return any(low <= tensor.data_ptr() < high for low, high in spans for tensor in tensors)

    assert {way: in_file(variant) for way, variant in kept.items()} == {
        "safetensors": False, "mapped": True, "quantize": False, "prequantized": False, "dequantize": False,
    }  # fmt: skip


def test_without_a_gguf_file_the_way_says_why(tiny_files, tiny_loaded):
    assert tiny_files.gguf is None and tiny_files.of("gguf") == []
    assert tiny_files.why_no_gguf == "tiny did not come as a GGUF file"
    assert tiny_files.stored_bytes("prequantized") < tiny_files.stored_bytes("safetensors")
    with pytest.raises(ValueError, match="way 'pickle' is not one of safetensors, mapped"):
        loading.steps("pickle", tiny_files, "float32")


def test_a_model_without_a_language_head_is_refused(tiny_loaded, tmp_path):
    encoder = dataclasses.replace(tiny_loaded, model=tiny_loaded.model.model)
    with pytest.raises(ValueError, match="tiny has no language head and gives no first token"):
        loading.write(encoder, tmp_path, tmp_path / "forms", n_layers=1)


def test_a_cut_gguf_keeps_its_blocks_and_counts_its_layers(tmp_path):
    gguf = pytest.importorskip("gguf")
    source, target = tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_block_count(12)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_array("general.languages", ["en"])
    rng = np.random.default_rng(0)
    names = ["token_embd.weight", *(f"blk.{layer}.ffn_up.weight" for layer in range(12))]
    blocks = {name: rng.integers(0, 256, (4, 20), dtype=np.uint8) for name in names}  # 20 bytes: 32 weights of Q4_1
    for name, block in blocks.items():
        writer.add_tensor(name, block, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()

    gguf_cut.cut(source, target, n_layers=2)
    cut = gguf.GGUFReader(target)
    assert [tensor.name for tensor in cut.tensors] == ["token_embd.weight", *names[1:3]]  # 10 and 11 are not 1
    assert all(np.array_equal(tensor.data, blocks[tensor.name]) for tensor in cut.tensors)
    assert all(tensor.tensor_type == gguf.GGMLQuantizationType.Q4_1 for tensor in cut.tensors)
    assert cut.get_field("llama.block_count").contents() == 2
    assert cut.get_field("general.languages").contents() == ["en"]
    assert cut.get_field("tokenizer.ggml.tokens") is None


# --- peaks -----------------------------------------------------------------------------------------------------------


def peak(private, libraries=100, weights=0, file=0):
    phases = tuple(
        memory.PhasePeak(name, 0.1, 10 * size, size, 5, 0)
        for name, size in zip(("import", "load", "convert", "decode"), (9000, *private), strict=True)
    )
    value = {"libraries": libraries, "mapped_libraries": 2, "weights": weights, "file": file}
    return memory.Peak(phases, 0, 0, 0, 0, 0, value)


def test_a_peak_counts_from_the_libraries_on_and_leaves_their_import_out():
    assert starts.over_libraries(peak((300, 700, 500))) == 600
    estimate, low, high = starts.ratio("dequantize", [peak((300, 700, 500))], [peak((600, 300, 300))])
    assert estimate == pytest.approx(600 / 500)
    assert (low, high) == pytest.approx((1.2 * 0.99, 1.2 * 1.01))  # half a percent of each
    assert starts.ratio("prequantized", [peak((300, 700, 500))], [peak((600, 300, 300))])[1] < low


def test_while_a_file_is_read_its_split_is_not_believed_within_the_file():
    assert starts.over_libraries(peak((730, 500, 600), file=150)) == 500  # 730 may be 600 and what was not yet sampled
    assert starts.over_libraries(peak((760, 500, 600), file=150)) == 660  # more than the file can explain


def test_the_interval_of_repeated_peaks_spans_them():
    mine = [peak((300, top, 500)) for top in (680, 700, 740)]
    estimate, low, high = starts.ratio("dequantize", mine, [peak((600, 300, 300)), peak((620, 300, 300))])
    assert estimate == pytest.approx(600 / 510)
    assert low <= 580 / 520 and high >= 640 / 500


def test_peak_rows_are_those_of_their_phases_and_carry_the_claim():
    rows = pd.DataFrame(
        study._peak_rows({"safetensors": [peak((600, 300, 300))], "dequantize": [peak((300, 700, 500), weights=550)]})
    )
    naive = rows[rows.way == "INT8, dequantized"].set_index("phase")
    assert list(naive.index) == ["load", "convert", "decode", "peak"]
    assert naive.over_baseline_bytes.to_list() == [200, 600, 400, 600]
    assert (naive.file_mapped_bytes == 3).all() and naive.peak_bytes["peak"] == 7000
    assert naive.predicted_bytes["peak"] == 550
    claim = rows[rows.claim_id == "peak_memory"].iloc[0]
    assert (claim.estimate, claim.low) == (naive.memory_ratio["peak"], naive.low["peak"])


def test_a_start_can_be_told_to_another_process(tiny_files):
    start = starts.Start("dequantize", tiny_files, "float32", [[1, 2, 3]], 1)
    assert pickle.loads(pickle.dumps((starts.hold, start))) == (starts.hold, start)


def test_a_start_marks_its_phases_in_order(tiny_files):
    marks = []
    held = starts.hold(marks.append, starts.Start("dequantize", tiny_files, "float32", [[1, 2, 3]], 1))
    assert marks == ["import", "load", "convert", "prefill", "decode"]
    assert held["weights"] == FLOAT_BYTES + LINEAR_WEIGHTS + 2 * ROWS  # and two bytes a scale
    assert held["file"] == tiny_files.stored_bytes("prequantized") < FLOAT_BYTES
    assert starts.hold(marks.append, starts.Start("mapped", tiny_files, "float32", [[1, 2, 3]], 1))["weights"] == 0


def test_decode_steps_inside_a_group_give_their_major_faults(tiny_files, tmp_path):
    start = starts.Start("mapped", tiny_files, "float32", [[1, 2, 3]], 1)
    assert starts.faults(lambda name: None, start, str(tmp_path), 5) == [0] * 5  # no limit holds in a plain folder
    assert (tmp_path / "cgroup.procs").read_text().isdigit()


# --- where something cannot be done ----------------------------------------------------------------------------------


def test_without_a_memory_limit_swapping_is_not_testable_with_the_reason(monkeypatch):
    def refuse(limit_bytes):
        raise memory_limit.NoLimitError("no control group at hand")

    monkeypatch.setattr(study.memory_limit, "limited_group", refuse)
    row = study._paging(study.Params(), None, [peak((600, 300, 300))])
    judged = verdicts.judge(pd.DataFrame([row]), claims.select(NAME, ["swapping"])).iloc[0]
    assert (judged.mechanism_here, judged.reason) == ("not testable here", "no control group at hand")


def test_where_pages_stay_in_memory_the_cold_rows_are_skipped_with_the_reason(tiny_files, tiny_loaded, monkeypatch):
    stuck = page_cache.Dropped(1.0, "100% of the pages of model.safetensors stayed in memory")
    monkeypatch.setattr(study.page_cache, "drop", lambda path: stuck)
    bench = study.Bench(tiny_files, tiny_loaded, 1, torch.tensor([[1, 2, 3]]))
    rows = pd.DataFrame(study._times(study.Params(ways=["mapped", "gguf"], n_rounds=2, n_threads=1), bench))
    assert set(rows.page_cache[rows.time_ratio.notna()]) == {"warm"}
    assert rows.skipped[(rows.page_cache == "cold")].unique().tolist() == [stuck.reason]
    assert "tiny did not come as a GGUF file" in set(rows.skipped.dropna())
    shown = study.table(rows.assign(over_baseline_bytes=np.nan, n_layers=1, memory_ratio=np.nan))
    assert {"first_token_s", "over_baseline_bytes"} <= set(shown.columns)


def test_pages_that_came_back_make_a_cold_row_contended(tiny_files, tiny_loaded, monkeypatch):
    answers = iter([page_cache.Dropped(0.0, ""), *[page_cache.Dropped(0.3, "30% of the pages stayed")] * 100])
    monkeypatch.setattr(study.page_cache, "drop", lambda path: next(answers))
    bench = study.Bench(tiny_files, tiny_loaded, 1, torch.tensor([[1, 2, 3]]))
    rows = pd.DataFrame(study._times(study.Params(ways=["prequantized"], n_rounds=2, n_threads=1), bench))
    cold = rows[rows.page_cache == "cold"]
    assert cold.contended.all() and set(cold.reason) == {"30% of the pages stayed"}


def test_a_quick_way_is_needed_to_compare_with():
    with pytest.raises(ValueError, match="needs one of mapped, quantize, prequantized, dequantize"):
        study.Params(ways=["safetensors", "gguf"])


# --- the figures -----------------------------------------------------------------------------------------------------


def start_frame():
    seconds = {
        "safetensors": (0.2, 0.0, 0.1),
        "INT8, prequantized": (0.1, 0.0, 0.1),
        "GGUF, converted": (9.0, 0.0, 0.1),
    }
    rows = [
        dict(way=way, page_cache="warm", phase=phase, time_s=s, time_ratio=1.0, low=0.9, high=1.1, standard_s=0.3)
        for way, parts in seconds.items()
        for phase, s in [*zip(("load", "convert", "first call"), parts, strict=True), ("first token", sum(parts))]
        if s
    ]
    held = dict(private_bytes=3e8, baseline_bytes=1e8, over_baseline_bytes=2e8, file_mapped_bytes=5e7)
    return pd.DataFrame(
        [
            *rows,
            dict(way="safetensors", phase="peak", **held, predicted_bytes=1.9e8, memory_ratio=1.0, low=1.0, high=1.0),
        ]
    )


@pytest.fixture
def drawn():
    plots.set_style()
    yield lambda name, frame: (lambda fig, ax: (fig, getattr(plots, name)(frame, ax)))(*plots.axes())
    plt.close("all")


def texts(fig):
    return [text.get_text() for text in fig.findobj(matplotlib.text.Text) if text.get_text()]


def test_bars_are_as_long_as_their_phases_and_a_giant_is_cut_with_its_length_in_words(drawn):
    fig, ax = drawn("start_time", start_frame())
    assert sorted(round(bar.get_width(), 3) for bar in ax.patches) == [0.1, 0.1, 0.1, 0.2, 0.33]
    assert {"300 ms", "200 ms", "9.10 s, bar cut", "Page cache warm"} <= set(texts(fig))
    assert ax.get_xlim()[1] < 0.5


def test_memory_bars_are_libraries_private_and_mapped(drawn):
    fig, ax = drawn("start_memory", start_frame())
    assert [bar.get_width() for bar in ax.patches] == [1e8, 2e8, 5e7]
    assert "200 MB, 1.00×" in texts(fig)
    (predicted,) = [line for line in ax.lines if line.get_color() == style.PREDICTED]
    assert predicted.get_xdata()[0] == pytest.approx(1e8 + 1.9e8)


@pytest.mark.parametrize("name", ["start_time", "start_memory"])
def test_figures_use_the_colors_of_the_page_and_say_when_they_are_empty(drawn, name):
    buffer = io.StringIO()
    drawn(name, start_frame())[0].savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    inlined = markup.safe_svg(buffer.getvalue(), prefix="x-", label=name)
    assert "#" not in "".join(part[:7] for part in inlined.split("fill: ")[1:])
    fig, ax = drawn(name, pd.DataFrame({"claim_id": ["cold_start"], "time_ratio": [2.0]}))
    assert len(texts(fig)) >= 1 and not ax.lines and not ax.patches

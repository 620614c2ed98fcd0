"""Numbers, tables and the progress line as a reader meets them."""

import io
import json
import math
import sys
from types import SimpleNamespace

import pandas as pd
import pytest

from flashstudy.facts import claims
from flashstudy.runs import folders
from flashstudy.share import ledger_tables, numbers, tables, verdicts
from flashstudy.share import progress as progress_module

FRAME = pd.DataFrame(
    {
        "model": "toy", "recipe": ["ARTICLE_FLASH", "BEST_FLASH", "BEST_FLASH"], "phase": ["task", "task", "decode"],
        "time_ratio": [2.314, 0.58, 1.0], "low": [2.2, 0.545, 0.9], "high": [2.45, 0.615, 1.1],
        "predicted_ratio": [2.0, 0.5, 1.0], "predicted_ratio_low": [1.5, 0.4, 0.8],
        "predicted_ratio_high": [2.6, 0.7, 1.3], "time_s": [0.0123, 0.02, 0.05],
        "stored_bytes": [6.4e7, 6.4e7, 1.28e8], "n_pairs": [24, 1200, 30], "contended": [False, True, False],
    }
)  # fmt: skip


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("numbers_in", "text"),
    [
        ((2.314, 2.2, 2.45), "2.31 [2.20, 2.45]"),
        ((0.0012, -0.0005, 0.003), "0.0012 [−0.0005, 0.0030]"),
        ((1234.5, 1200, 1300), "1234 [1200, 1300]"),
        ((2.3, 1.0, 15.0), "2.3 [1.0, 15.0]"),
        ((3.0, 3.0, 3.0), "3.00"),
        ((2.0, math.nan, math.nan), "2.00"),
    ],
)
def test_an_interval_shares_its_decimals(numbers_in, text):
    assert numbers.interval(*numbers_in) == text


def test_amounts_speak_the_unit_of_their_claim():
    assert numbers.amount(0.22, "fraction") == "22.0%"
    assert numbers.amount_interval(2.31, 2.2, 2.45, "ratio") == "2.31× [2.20, 2.45]"
    assert numbers.edge(0.0001, "fraction") == "0.01%"
    assert numbers.distance(0.04, "fraction") == "4.0 points"
    assert numbers.plain(math.nan) == "n/a"
    assert numbers.plain(-0.0000001) == "−1.0e−07"


def test_a_table_merges_intervals_and_marks_a_busy_machine_in_words():
    text = plain(tables.show(FRAME).text)
    assert "2.31 [2.20, 2.45]" in text
    assert "2.00 [1.50, 2.60]" in text or "2.0 [1.5, 2.6]" in text
    assert "0.580 [0.545, 0.615], machine busy, not counted" in text
    assert text.count("machine busy") == 1


def test_units_stand_in_the_headers_at_a_readable_size():
    header, first, second, _, caption = plain(tables.show(FRAME).text).splitlines()
    assert "Time ratio (variant / standard)" in header
    assert "Time (ms)" in header and "Stored size (MB)" in header
    assert "12.3" in first and "64.0" in first
    assert "1,200" in second
    assert caption == "model toy"  # what never changes is said once


def test_factors_that_do_not_tell_rows_apart_are_left_out():
    frame = FRAME.assign(kernel=["naive", "packed", "packed"], device="cpu")
    assert tables.choose(frame)[:2] == ["recipe", "phase"]
    assert "kernel" not in tables.choose(frame)
    assert len(tables.choose(frame)) <= tables.MAX_COLUMNS


def test_a_row_shows_its_interval_at_the_value_it_has():
    frame = pd.DataFrame(
        [
            {"recipe": "a", "context": 512, "time_ratio": 0.9, "low": 0.8, "high": 1.0},
            {"recipe": "a", "crossover_tokens": 4962.0, "low": 4100.0, "high": 6500.0},
        ]
    )
    lines = plain(tables.show(frame, ["recipe", "time_ratio", "crossover_tokens"]).text).splitlines()
    assert "0.90 [0.80, 1.00]" in lines[1] and "[4100, 6500]" not in lines[1]
    assert "4962 [4100, 6500]" in lines[2] and "0.90" not in lines[2]


def test_a_table_ends_after_a_dozen_rows_and_says_so():
    many = pd.DataFrame({"context": range(40), "time_ratio": 1.5})
    shown = tables.show(many)
    assert shown.html.count("<tr>") == 13
    assert "12 of 40 rows" in shown.html
    assert "of 40 rows" not in tables.show(many, rows=40).html


def test_claim_rows_are_left_to_the_verdict_table():
    both = pd.concat([FRAME, pd.DataFrame({"claim_id": ["slowdown"], "estimate": [9.99]})])
    assert tables.show(both).html.count("<tr>") == 4


def test_a_skipped_configuration_says_why():
    frame = pd.DataFrame({"recipe": ["a", "b"], "time_ratio": [1.2, math.nan], "skipped": ["", "no INT4 kernel here"]})
    assert "not measured: no INT4 kernel here" in plain(tables.show(frame).text)


def test_cells_are_escaped():
    hostile = pd.DataFrame({"kernel": ["<script>alert(1)</script>", "b"], "time_ratio": [1.0, 2.0]})
    assert "<script" not in tables.show(hostile).html


def test_unknown_columns_and_no_rows_are_refused():
    with pytest.raises(ValueError, match=r"no columns \['speed'\]"):
        tables.show(FRAME, ["recipe", "speed"])
    with pytest.raises(ValueError, match="rows=0"):
        tables.show(FRAME, rows=0)


def test_ledger_tables_state_claim_band_and_both_verdicts():
    selected = claims.select("memory_bandwidth")
    result = pd.DataFrame(
        [{"claim_id": "int8_speed", "verdict_kind": "mechanism_here", "estimate": 2, "low": 1.9, "high": 2.1}]
    )
    listed, judged = (
        ledger_tables.claims_table(selected),
        ledger_tables.verdicts_table(verdicts.judge(result, selected)),
    )
    assert "at one row, weights beyond the cache: 1.8× to 2.2×" in listed.html
    assert "about 2×" in listed.html and "article A" in listed.html
    assert judged.html.count("supported</strong>") == 1
    assert "+0.10" in judged.html


def test_jupyter_shows_ledger_frames_as_tables_and_others_as_they_are():
    registered = {}
    formatter = SimpleNamespace(for_type=lambda kind, draw: registered.update({kind: draw}))
    shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": formatter}))
    ledger_tables.show_ledger_frames(shell)
    draw = registered[pd.DataFrame]
    selected = claims.select("slowdown_attribution")
    assert draw(selected) == ledger_tables.claims_table(selected).html
    assert "Mechanism here" in draw(verdicts.judge(pd.DataFrame(), selected))
    other = pd.DataFrame({"a": [1]})
    assert draw(other) == other._repr_html_()


def test_progress_leaves_its_last_state_in_the_runs_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLASHSTUDY_RUN_DIR", str(tmp_path / "run"))
    report = tables.progress()
    report(0, 4, "model")
    report(4, 4, "done")
    state = json.loads((tmp_path / "run" / folders.PROGRESS).read_text())
    assert (state["done"], state["total"], state["label"]) == (4, 4, "done")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [folders.PROGRESS]
    assert capsys.readouterr().err.count("\n") == 1  # a log gets one line, not one a step


def test_progress_rewrites_one_line_in_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("FLASHSTUDY_RUN_DIR", raising=False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress_module, "_SECONDS_BETWEEN_UPDATES", 0)
    report = tables.progress()
    for done in range(3):
        report(done, 2, f"step {done}")
    assert sys.stderr.getvalue().count("\n") == 1
    assert sys.stderr.getvalue().count("\r") == 3
    assert "[##########] 2 of 2 · step 2" in sys.stderr.getvalue()


def test_progress_updates_one_display_in_jupyter(monkeypatch):
    shown, updates = [], []
    handle = SimpleNamespace(update=lambda data, **more: updates.append(data))
    fake = SimpleNamespace(display=lambda data, **more: shown.append((data, more)) or handle)
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    monkeypatch.setattr(progress_module, "_shell", lambda: object())
    monkeypatch.setattr(progress_module, "_SECONDS_BETWEEN_UPDATES", 0)
    report = tables.progress()
    report(0, 2, "<b>")
    report(1, 2, "decode")
    assert len(shown) == 1 and len(updates) == 1
    assert shown[0][1]["metadata"] == progress_module.MARK
    assert "&lt;b&gt;" in shown[0][0]["text/html"] and "1 of 2 · decode" in updates[0]["text/html"]


def test_progress_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="done 5 of 4"):
        tables.progress()(5, 4, "too far")

"""Figures draw what the frame says, stay legible, and use only colors that a page can swap for its theme."""

import io
import math
import re

import matplotlib
import pandas as pd
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import to_hex

from flashstudy.share import markup, plots, style
from flashstudy.share.templating import STYLESHEET

plots.set_style()


def slowdown() -> pd.DataFrame:
    rows = []
    for phase, article, best in (("task", 6.1, 0.61), ("decode", 7.9, 0.58)):
        for recipe, element, ratio in (
            ("standard", "all", 1.0),
            ("ARTICLE_FLASH", "all", article),
            ("BEST_FLASH", "all", best),
        ):
            rows.append({"recipe": recipe, "element": element, "phase": phase, "time_ratio": ratio})
        rows.append({"recipe": "ARTICLE_FLASH", "element": "sparsity", "phase": phase, "time_ratio": 1.2})
    frame = pd.DataFrame(rows)
    frame["low"], frame["high"] = 0.95 * frame.time_ratio, 1.05 * frame.time_ratio
    frame["predicted_ratio"] = 0.9 * frame.time_ratio
    frame["predicted_ratio_low"], frame["predicted_ratio_high"] = 0.7 * frame.time_ratio, 1.2 * frame.time_ratio
    return frame.assign(contended=(frame.recipe == "BEST_FLASH") & (frame.phase == "decode"), claim_id=None)


def lengths() -> pd.DataFrame:
    points = [
        {
            "recipe": recipe,
            "phase": "decode",
            "context": n,
            "time_ratio": ratio,
            "low": 0.9 * ratio,
            "high": 1.1 * ratio,
        }
        for recipe, ratios in (("ARTICLE_FLASH", (5.0, 5.5, 6.0)), ("BEST_FLASH", (0.6, 0.8, 1.1)))
        for n, ratio in zip((128, 1024, 8192), ratios, strict=True)
    ]
    crossing = {"recipe": "BEST_FLASH", "phase": "decode", "crossover_tokens": 4900.0, "low": 4000.0, "high": 6200.0}
    frame = pd.DataFrame([*points, crossing | {"crossover_status": "crosses"}])
    return frame.assign(predicted_ratio=0.8 * frame.time_ratio, contended=frame.context == 1024)


def bandwidth() -> pd.DataFrame:
    rows = [
        ("fp32", "mkl", "standard", 0.86, 1.0, "streamed"), ("int8", "dequantize", "naive", 0.02, 11.0, "streamed"),
        ("int8", "packed", "best", 0.79, 0.31, "streamed"), ("int8", "packed", "best", 0.97, 0.2, "hot_cache"),
    ]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["weight_format", "kernel", "role", "mbu", "time_ratio", "residency"])
    return frame.assign(rows=1, mbu_low=0.8 * frame.mbu, mbu_high=1.1 * frame.mbu, ceiling_bytes_per_s=2.63e10)


def matrices() -> pd.DataFrame:
    rows = [
        {"bits": bits, "granularity": "channel", "bits_per_weight": bits + 0.03, "layer": layer, "kind": kind}
        | {"sqnr_db": 6.02 * bits - layer / 10 - (kind == "q")}
        for bits in (8, 4)
        for layer in range(4)
        for kind in ("q", "down")
    ]
    scored = [
        {"bits": 8, "granularity": "channel", "delta_nll_nats": 0.002, "low": -0.001, "high": 0.005, "kl_nats": 0.003},
        {"bits": 4, "granularity": "channel", "delta_nll_nats": 0.42, "low": 0.37, "high": 0.47, "kl_nats": 0.38},
        {"granularity": "fp32", "delta_nll_nats": 0.0, "low": 0.0, "high": 0.0, "kl_nats": 0.0},
    ]
    return pd.DataFrame([*rows, *scored])


def sparse() -> pd.DataFrame:
    rows = [
        {"sparse_format": name, "sparsity": s, "time_ratio": ratio, "low": 0.9 * ratio, "high": 1.1 * ratio}
        | {"compression": compression, "block": block}
        for name, block, s, ratio, compression in (
            ("csr", None, 0.5, 2.1, 1.0), ("csr", None, 0.9, 0.42, 5.0), ("bsr", "16×16", 0.5, 0.98, 1.99),
            ("bsr", "16×16", 0.9, 0.22, 9.9), ("dense", None, 0.5, 1.0, 1.0),
        )
    ]  # fmt: skip
    losses = [
        {"pattern": pattern, "sparsity": s, "delta_nll_nats": loss, "low": 0.9 * loss, "high": 1.1 * loss}
        for pattern, s, loss in (
            ("unstructured", 0.5, 0.03),
            ("unstructured", 0.9, 0.3),
            ("block", 0.5, 0.2),
            ("block", 0.9, 1.1),
        )
    ]
    return pd.DataFrame([*rows, *losses])


def roofline() -> pd.DataFrame:
    rows = [("fp32", "dense", 1, 0.5, 5e9), ("int8", "packed", 1, 2.0, 9e9), ("int8", "packed", 16, 32.0, 2.5e10)]
    points = pd.DataFrame(rows, columns=["weight_format", "kernel", "rows", "flop", "flop_per_s"])
    points = points.assign(read_bytes=1.0, role="best", contended=[False, False, True])
    roofs = pd.DataFrame(dict(weight_format=["fp32", "int8"], flop_per_s=[4e10, 1.5e11], ceiling_bytes_per_s=1.4e10))
    return pd.concat([points, roofs.assign(role="ceiling")], ignore_index=True).assign(claim_id=None)


def parts() -> pd.DataFrame:
    rows = [
        ("naive", "stage", "dequantize", 0.7), ("naive", "stage", "multiply", 0.28),
        ("naive", "stage", "sum of parts", 0.97), ("packed", "bound", "bytes", 0.6),
        ("packed", "bound", "instructions", 0.9), ("packed", "bound", "launch", 0.05),
    ]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["kernel", "note", "part", "part_share"])
    ends = dict(low=frame.part_share - 0.02, high=frame.part_share + 0.02)
    return frame.assign(**ends, weight_format="int8", model="m", kind="k", claim_id=None)


FIGURES = {
    "ratios": slowdown, "crossover": lengths, "bandwidth": bandwidth, "fragmentation": sparse, "compression": sparse,
    "pruned_quality": sparse, "sqnr": matrices, "sqnr_by_depth": matrices, "quality": matrices,
    "roofline": roofline, "parts": parts,
}  # fmt: skip


def drawn(name: str, frame: pd.DataFrame | None = None):
    fig, ax = plots.axes()
    returned = getattr(plots, name)(FIGURES[name]() if frame is None else frame, ax)
    assert returned is ax
    return fig, ax


def svg(fig) -> str:
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return buffer.getvalue()


def texts(fig) -> list[str]:
    return [text.get_text() for text in fig.findobj(matplotlib.text.Text) if text.get_text()]


def points(ax, x: float) -> list[float]:
    """Heights of the round markers drawn at x."""
    lines = [line for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata()) == 1]
    return [float(line.get_ydata()[0]) for line in lines if math.isclose(float(line.get_xdata()[0]), x, rel_tol=1e-9)]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_leaves_its_frame_alone_and_repeats_itself_to_the_byte(name):
    frame = FIGURES[name]()
    before = frame.copy(deep=True)
    first, second = svg(drawn(name, frame)[0]), svg(drawn(name, frame)[0])
    pd.testing.assert_frame_equal(frame, before)
    assert first == second
    assert len(first) < 200_000  # larger ones would be stored as PNG


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_is_smaller_than_nine_points(name):
    fig, _ = drawn(name)
    sizes = {text.get_fontsize() for text in fig.findobj(matplotlib.text.Text) if text.get_text()}
    assert min(sizes) >= 9


@pytest.mark.parametrize("name", FIGURES)
def test_a_page_can_swap_every_color_for_its_theme(name):
    inlined = markup.safe_svg(svg(drawn(name)[0]), prefix="x-", label=name)
    assert not re.findall(r"#[0-9a-f]{6}", inlined)
    used = set(re.findall(r"var\((--fig-[a-z-]+)\)", inlined))
    css = STYLESHEET.read_text()
    assert used and all(css.count(f"{name}:") >= 1 for name in used)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_without_data_says_so_in_words(name):
    fig, ax = drawn(
        name, pd.DataFrame({"claim_id": ["slowdown"], "time_ratio": [2.0], "mbu": [0.5], "delta_nll_nats": [1.0]})
    )
    assert len(texts(fig)) >= 1 and not ax.lines and not ax.patches


def test_text_colors_reach_a_contrast_of_four_and_a_half_on_white():
    for color in (style.INK, style.MUTED, *map(style.text_color, style.CATEGORIES)):
        assert contrast(color, style.PAPER) >= 4.5, color


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio of two colors."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    channels = matplotlib.colors.to_rgb(color)
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast_is_that_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_ratios_put_a_marker_at_each_measured_ratio_and_hollow_where_busy():
    fig, ax = drawn("ratios")
    assert ax.get_xscale() == "log"
    assert len(points(ax, 6.1)) == len(points(ax, 7.9)) == len(points(ax, 0.61)) == 1
    assert not points(ax, 1.0)  # the standard against itself is the line, not a point
    faces = {
        round(float(m.get_xdata()[0]), 2): to_hex(m.get_markerfacecolor()) for m in ax.lines if m.get_marker() == "o"
    }
    assert faces[0.58] == style.PAPER  # timed on a busy machine
    assert faces[0.61] == style.BLUE and faces[7.9] == style.VERMILION
    assert {"Task", "Decode", "same speed", "← faster", "slower →", "pruned weights alone"} <= set(texts(fig))
    assert "6.10 [5.79, 6.41]" in texts(fig)


def test_faster_is_left_of_the_line_at_one():
    fig, ax = drawn("ratios")
    fig.canvas.draw()
    place = {
        text.get_text(): text.get_window_extent().x0 for text in ax.findobj(matplotlib.text.Text) if text.get_text()
    }
    assert place["← faster"] < ax.transData.transform((1, 0))[0] < place["slower →"]


def test_predictions_are_thin_and_grey():
    _, ax = drawn("ratios")
    grey = [line for line in ax.lines if to_hex(line.get_color()) == style.PREDICTED and len(line.get_xdata()) == 2]
    assert sorted(round(float(line.get_xdata()[0]), 3) for line in grey)[0] == pytest.approx(0.7 * 0.58, abs=1e-3)
    assert all(line.get_linewidth() < 1.5 for line in grey)


def test_crossings_are_shaded_over_their_interval():
    fig, ax = drawn("crossover")
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in ax.patches if hasattr(patch, "get_x")]
    assert (4000.0, 6200.0) in spans
    assert "crosses at 4.79K" in texts(fig)  # 4,900 / 1,024
    assert points(ax, 1024) == [5.5, 0.8]


def test_bandwidth_bars_are_as_long_as_the_share_of_the_ceiling():
    fig, ax = drawn("bandwidth")
    bars = sorted(round(patch.get_width(), 2) for patch in ax.patches)
    assert bars == [0.02, 0.79, 0.86, 0.97]
    hatched = [patch for patch in ax.patches if patch.get_hatch()]
    assert [round(patch.get_width(), 2) for patch in hatched] == [0.97]  # the cached weights, and only they
    assert "ceiling, 26.3 GB/s" in texts(fig) and "2.0%" in texts(fig)


def test_bandwidth_whiskers_are_the_intervals_of_mbu():
    _, ax = drawn("bandwidth")
    whiskers = [line.get_xdata() for line in ax.lines if len(line.get_xdata()) == 2 and line.get_linewidth() == 1.3]
    assert pytest.approx([0.86 * 0.8, 0.86 * 1.1]) == list(whiskers[0])


def test_stored_size_is_the_inverse_of_compression():
    _, ax = drawn("compression")
    assert points(ax, 0.9) == pytest.approx([1 / 5.0, 1 / 9.9])


def test_sparse_lines_leave_dense_to_the_reference():
    fig, ax = drawn("fragmentation")
    assert points(ax, 0.5) == [2.1, 0.98]
    assert {"dense", "CSR", "BSR 16×16"} <= set(texts(fig))


def test_the_reference_is_not_compared_with_itself():
    fig, ax = drawn("quality")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["INT8 per channel", "INT4 per channel"]
    assert "+0.0020 [−0.0010, 0.0050]" in texts(fig)


def test_depth_shows_the_format_that_was_asked_for():
    _, ax = plots.axes()
    plots.sqnr_by_depth(matrices(), ax, bits=8)
    assert max(float(max(line.get_ydata())) for line in ax.lines) == pytest.approx(48.16)


def test_axes_gives_one_panel_or_a_list():
    fig, ax = plots.axes()
    assert tuple(fig.get_size_inches()) == (6, 4)
    fig, panels = plots.axes(columns=2)
    assert len(panels) == 2
    with pytest.raises(ValueError, match="0 columns"):
        plots.axes(columns=0)


def test_spread_labels_keep_their_order_and_their_distance():
    spread = style.spread_labels([1.0, 1.01, 5.0, 0.99], low=0, high=10, gap=1)
    assert sorted(spread) == [0.99, 1.99, 2.99, 5.0]
    assert spread[3] < spread[0] < spread[1] < spread[2]
    assert style.spread_labels([9.9, 9.95], low=0, high=10, gap=1) == [9.0, 10]


def test_ratio_ticks_hold_one_and_stay_few():
    assert style.ratio_ticks(0.3, 12) == [0.5, 1, 2, 5, 10]
    assert style.ratio_ticks(2, 12)[0] == 1
    assert all(len(style.ratio_ticks(1 / span, span)) <= 10 for span in (1.1, 1.4, 2, 3, 8, 100, 1000))


def test_stages_stand_end_to_end_and_bounds_start_at_zero():
    _, ax = drawn("parts")
    bars = sorted((round(bar.get_x(), 2), round(bar.get_width(), 2)) for bar in ax.patches)
    assert bars == [(0.0, 0.05), (0.0, 0.6), (0.0, 0.7), (0.0, 0.9), (0.7, 0.28)]  # no bar for the sum


def test_a_kernel_stands_at_its_work_per_byte_under_its_roof():
    _, ax = drawn("roofline")
    assert points(ax, 2.0) == [9e9] and points(ax, 0.5) == [5e9]
    busy = [line for line in ax.lines if line.get_marker() == "s" and to_hex(line.get_markerfacecolor()) == style.PAPER]
    assert len(busy) == 1

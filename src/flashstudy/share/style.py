"""How figures look: one palette with names, fonts that follow the page, and helpers for direct labels.

In a notebook a figure is a white card, legible on light and dark. In a page its colors are swapped for the stylesheet's
variables of the same name (see svg.py), so it follows the reader's theme; that works for the colors below only.
Text stays text in SVG: small files, selectable, and set in the page's own font, which is narrower than the DejaVu Sans
that positions were computed with, so nothing collides.
"""

import math
from collections.abc import Iterable

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

INK, MUTED, GRID, PAPER = "#1f2428", "#5b6470", "#e2e6ea", "#ffffff"
AXIS, PREDICTED = "#c3cad1", "#9aa3ad"
# Source: seaborn's "colorblind" palette
BLUE, ORANGE, GREEN, VERMILION, PURPLE, BROWN, SKY = (
    "#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#56b4e9",
)  # fmt: skip
CATEGORIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BROWN)
_TEXT_COLORS = {  # the same hues, dark enough for text on white (contrast 4.5 and more)
    BLUE: "#01659c", ORANGE: "#8f5a00", GREEN: "#01704f", VERMILION: "#a84a00", PURPLE: "#93407f", BROWN: "#7f5630",
    SKY: "#1a6a98",
}  # fmt: skip
_HUES = {
    BLUE: "blue", ORANGE: "orange", GREEN: "green", VERMILION: "vermilion", PURPLE: "purple", BROWN: "brown",
    SKY: "sky",
}  # fmt: skip
COLOR_NAMES = {
    **{INK: "ink", MUTED: "muted", AXIS: "axis", GRID: "grid", PAPER: "paper", PREDICTED: "predicted"},
    **_HUES,
    **{text: f"{_HUES[color]}-text" for color, text in _TEXT_COLORS.items()},
}

_READ = (
    "claim_id", "recipe", "element", "phase", "context", "rows", "weight_format", "kernel", "kernel_path", "role",
    "residency", "sparse_format", "sparsity", "pattern", "block", "bits", "granularity", "layer", "kind", "time_ratio",
    "low", "high", "contended", "mbu", "ceiling_bytes_per_s", "bits_per_weight", "delta_nll_nats", "kl_nats",
    "predicted_ratio", "predicted_ratio_low", "predicted_ratio_high", "model", "part", "part_share", "note", "flop",
    "flop_per_s", "read_bytes",
)  # fmt: skip
ON_LINE = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.2}  # behind words that stand on a line
WIDTH_IN, HEIGHT_IN = 6.0, 4.0
FONT_PT = 10.0
SMALL_PT = 9.0


def set_style() -> None:
    """Set matplotlib's defaults for every figure that follows; inside Jupyter also SVG output and ledger tables."""
    mpl.rcParams.update(_RC)
    if shell := _jupyter_shell():
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        from flashstudy.share import ledger_tables

        set_matplotlib_formats("svg", metadata={"Date": None})
        ledger_tables.show_ledger_frames(shell)


def axes(columns: int = 1, rows: int = 1, height_in: float = HEIGHT_IN) -> tuple[Figure, "Axes | list[Axes]"]:
    """A figure of 6 × 4 in a panel and its axes: one Axes, or a list of them in reading order."""
    import matplotlib.pyplot as plt

    if columns < 1 or rows < 1:
        raise ValueError(f"a figure needs at least one panel, got {rows} rows and {columns} columns")
    width = WIDTH_IN if columns == 1 else 5.2 * columns
    fig, grid = plt.subplots(rows, columns, figsize=(width, height_in * rows), layout="constrained", squeeze=False)
    fig.get_layout_engine().set(wspace=0.06)
    panels = list(grid.flat)
    return fig, panels[0] if len(panels) == 1 else panels


def text_color(color: str) -> str:
    """The color to write in where a mark has `color`."""
    return _TEXT_COLORS.get(color, color)


def log_ratio_axis(axis, limits: tuple[float, float]) -> None:
    """Ticks of a logarithmic time-ratio axis as 0.5×, 1×, 2×, at most about eight of them."""
    axis.set_major_locator(mpl.ticker.FixedLocator(ratio_ticks(*limits)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))


def ratio_ticks(low: float, high: float) -> list[float]:
    """Round ratios from low to high: fine steps over a narrow range, powers of ten over a wide one. 1 is always in."""
    span = math.log10(high / low)
    if span < 0.35:
        steps = [n / 10 for n in range(1, 40)] if span > 0.12 else [n / 20 for n in range(2, 80)]
    else:
        mantissas = (1, 2, 5) if span < 2.2 else (1,)
        steps = [m * 10.0**power for power in range(-6, 7) for m in mantissas]
    return sorted({1.0, *(step for step in steps if low <= step <= high)})


def power_of_two_axis(axis, values: Iterable[float]) -> None:
    """Ticks of a log2 axis at the powers of two among `values` and between them, written 128, 1K, 8K."""
    finite = [value for value in values if value > 0]
    powers = range(math.floor(math.log2(min(finite))), math.ceil(math.log2(max(finite))) + 1)
    stride = max(1, math.ceil(len(powers) / 8))
    axis.set_major_locator(mpl.ticker.FixedLocator([2.0**power for power in list(powers)[::stride]]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))


def short_count(value: float) -> str:
    """A count of tokens in few characters: 128, 1K, 8K, 1.5K (K is 1,024)."""
    return f"{value / 1024:.3g}K" if value >= 1024 else f"{value:.3g}"


def spread_labels(positions: list[float], low: float, high: float, gap: float) -> list[float]:
    """Positions moved apart until neighbors are `gap` away, order kept, inside [low, high] where they fit."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    placed: list[float] = []
    for index in order:
        placed.append(max(positions[index], placed[-1] + gap) if placed else max(positions[index], low))
    if placed and placed[-1] > high:
        placed[-1] = high
        for k in range(len(placed) - 2, -1, -1):
            placed[k] = min(placed[k], placed[k + 1] - gap)
    spread = [0.0] * len(positions)
    for index, value in zip(order, placed, strict=True):
        spread[index] = value
    return spread


def label_ends(ax: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Names lines at their right ends, given as (x, y, label, color), moved apart where they end close together."""
    forward = ax.transData.transform
    back = ax.transData.inverted().transform
    bottom, top = ax.bbox.y0, ax.bbox.y1
    gap = SMALL_PT * ax.figure.dpi / 72 * 1.45
    heights = spread_labels([forward((x, y))[1] for x, y, _, _ in ends], bottom + gap / 2, top - gap / 2, gap)
    for (x, y, label, color), height in zip(ends, heights, strict=True):
        place = x, back((forward((x, y))[0], height))[1]
        ax.annotate(
            label, place, xytext=(8, 0), textcoords="offset points", va="center", ha="left", size=SMALL_PT,
            color=text_color(color), annotation_clip=False, bbox=ON_LINE, zorder=4,
        )  # fmt: skip


def key_below(ax: Axes, handles: list, center: float = 0.5, columns: int = 0, **spacing) -> None:
    """A line below the axes that names kinds of marks; names of single lines stand on the lines instead.

    columns: names a line, 0 for all.
    """
    place = dict(loc="upper center", bbox_to_anchor=(center, -0.13), ncol=columns or len(handles))
    spacing = {"handletextpad": 0.5, "columnspacing": 1.6} | spacing
    ax.legend(handles=handles, labelcolor=MUTED, **place, **spacing)


def empty(ax: Axes, text: str) -> Axes:
    """An axes that says in words why it shows nothing."""
    ax.set_axis_off()
    ax.text(0.5, 0.5, text, ha="center", va="center", color=MUTED, wrap=True, transform=ax.transAxes)
    return ax


def is_contended(row: pd.Series) -> bool:
    """Whether the row was timed while the machine was busy."""
    value = row.get("contended")
    return bool(value) if pd.notna(value) else False


def measured_rows(result: pd.DataFrame, column: str) -> pd.DataFrame:
    """Rows with a number in `column` that are not claim rows; columns that figures read and it lacks are NaN."""
    full = result.reindex(columns=list(dict.fromkeys([*result.columns, *_READ, column])))
    return full[pd.to_numeric(full[column], errors="coerce").notna() & full["claim_id"].isna()]


def words(column: pd.Series) -> pd.Series:
    """A column as text: blanks are "", a block of 16 is "16×16"."""
    return column.astype(object).map(lambda value: "" if pd.isna(value) else _word(value, column.name))


def _word(value, name: str) -> str:
    if name == "block" and isinstance(value, int | float):
        return f"{value:g}×{value:g}"
    return str(value)


def _jupyter_shell():
    """The running Jupyter kernel's shell, None in a plain Python."""
    import sys

    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell if shell is not None and hasattr(shell, "kernel") else None


_RC = {
    "figure.facecolor": PAPER, "savefig.facecolor": PAPER, "axes.facecolor": PAPER, "figure.dpi": 96,
    "savefig.dpi": 144,
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": FONT_PT, "axes.labelsize": FONT_PT,
    "xtick.labelsize": SMALL_PT, "ytick.labelsize": SMALL_PT, "text.color": INK, "axes.labelcolor": MUTED,
    "xtick.color": GRID, "ytick.color": GRID, "xtick.labelcolor": MUTED, "ytick.labelcolor": INK,
    "axes.edgecolor": AXIS, "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8, "axes.axisbelow": True,
    "lines.linewidth": 1.8, "lines.markersize": 6.5, "lines.solid_capstyle": "round", "hatch.linewidth": 0.8,
    "axes.prop_cycle": mpl.cycler(color=CATEGORIES), "legend.frameon": False, "legend.fontsize": SMALL_PT,
    "axes.unicode_minus": True, "mathtext.default": "regular",
    "svg.fonttype": "none", "svg.hashsalt": "flashstudy",
}  # fmt: skip

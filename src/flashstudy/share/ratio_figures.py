"""Figures of time ratios: which variant is slower, in which phase, and from which length on.

Measured points carry their 95% interval, predictions are thin and grey, and a point timed on a busy machine is hollow:
it is shown, and counts for nothing. Every axis is logarithmic, because twice as slow and twice as fast are equally far
from the same speed.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from flashstudy.share import style
from flashstudy.share.numbers import interval, plain

PHASES = ("task", "prefill", "decode", "layer")
ELEMENTS = {
    "weight_format": "quantized weights alone",
    "sparsity": "pruned weights alone",
    "kv_format": "quantized cache alone",
}
_LINE_STYLES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)))
_NARROWEST = 1.35  # an axis shows at least this factor on each side of 1, so that a tie looks like one


def ratios(result: pd.DataFrame, ax: Axes) -> Axes:
    """Time ratio of each recipe by phase, with 95% intervals and predictions; left of the line at 1 is faster."""
    rows = style.measured_rows(result, "time_ratio")
    rows = rows[rows["recipe"] != "standard"]
    if rows.empty:
        return style.empty(ax, "No time ratio was measured.")
    lines = list(_ratio_lines(rows))
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.set_xscale("log")
    ax.set_xlim(*limits(rows))
    style.log_ratio_axis(ax.xaxis, ax.get_xlim())
    for position, kind, row in lines:
        _draw_line(ax, position, kind, row)
    heights = [position for position, _, _ in lines]
    ax.set(ylim=(max(heights) + 0.7, min(heights) - 1.0), xlabel="Time ratio, variant / standard (log scale)")
    _label_regions(ax)
    _key(ax, rows)
    return ax


def _ratio_lines(rows: pd.DataFrame) -> Iterator[tuple[float, str, object]]:
    """(height, "phase" or "row", phase name or row): phases in order, in each whole recipes before single elements."""
    height = 0.0
    is_part = rows["element"].notna() & ~rows["element"].isin(["", "all"])
    phases = style.words(rows["phase"])
    known = [phase for phase in PHASES if (phases == phase).any()]
    for phase in [*known, *dict.fromkeys(phases[~phases.isin(known)])]:
        yield height, "phase", phase
        height += 0.95
        for part in (False, True):
            for _, row in rows[(phases == phase) & (is_part == part)].iterrows():
                yield height, "element" if part else "recipe", row
                height += 0.78 if part else 1.0
        height += 0.35


def _draw_line(ax: Axes, position: float, kind: str, row) -> None:
    left = ax.get_yaxis_transform()
    if kind == "phase":
        ax.text(-0.02, position, str(row).capitalize(), transform=left, ha="right", va="center", weight="bold")
        return
    main = kind == "recipe"
    color = recipe_color(row["recipe"]) if main else style.MUTED
    name = recipe_name(row["recipe"]) if main else ELEMENTS.get(row["element"], str(row["element"]))
    size = style.FONT_PT if main else style.SMALL_PT
    ax.text(-0.02, position, name, transform=left, ha="right", va="center", color=style.text_color(color), size=size)
    _draw_prediction(ax, position, row)
    _draw_measurement(ax, position, row, color, main)
    words = interval(row["time_ratio"], row.get("low"), row.get("high")) if main else plain(row["time_ratio"])
    ax.text(1.02, position, words, transform=left, ha="left", va="center", size=size, color=style.text_color(color))


def _draw_measurement(ax: Axes, position: float, row: pd.Series, color: str, main: bool) -> None:
    contended = style.is_contended(row)
    if pd.notna(row.get("low")) and pd.notna(row.get("high")):
        faded = 0.45 if contended else 1
        ax.plot([row["low"], row["high"]], [position] * 2, color=color, lw=3 if main else 2, alpha=faded)
    face = style.PAPER if contended else color
    ax.plot(row["time_ratio"], position, "o", ms=7 if main else 5, mfc=face, mec=color, mew=1.5, zorder=3)


def _draw_prediction(ax: Axes, position: float, row: pd.Series) -> None:
    low, high, center = (row.get(name) for name in ("predicted_ratio_low", "predicted_ratio_high", "predicted_ratio"))
    if pd.notna(low) and pd.notna(high):
        ax.plot([low, high], [position] * 2, color=style.PREDICTED, lw=1.3, zorder=1.5, solid_capstyle="butt")
    if pd.notna(center):
        ax.plot(center, position, "|", color=style.PREDICTED, ms=9, mew=1.5, zorder=2.5)


def _label_regions(ax: Axes) -> None:
    ax.axvline(1, color=style.MUTED, lw=1.1, ls=(0, (4, 3)), zorder=1)
    for words, shift, align, color in (
        ("same speed", 0, "center", style.INK),
        ("← faster", -36, "right", style.MUTED),
        ("slower →", 36, "left", style.MUTED),
    ):
        ax.annotate(
            words, (1, 1.01), xycoords=ax.get_xaxis_transform(), xytext=(shift, 0), textcoords="offset points",
            ha=align, va="bottom", size=style.SMALL_PT, color=color,
        )  # fmt: skip


def _key(ax: Axes, rows: pd.DataFrame) -> None:
    """One line that names the three ways a number is drawn, as far as they occur."""
    handles = [Line2D([], [], color=style.MUTED, marker="o", lw=2.2, ms=6.5, label="measured, 95% interval")]
    if rows["predicted_ratio"].notna().any():
        handles.append(Line2D([], [], color=style.PREDICTED, marker="|", lw=1.3, ms=9, mew=1.5, label="predicted"))
    if any(style.is_contended(row) for _, row in rows.iterrows()):
        hollow = dict(mfc=style.PAPER, mec=style.MUTED, mew=1.5, ls="", ms=6.5)
        handles.append(Line2D([], [], marker="o", label="machine busy: not counted", **hollow))
    style.key_below(ax, handles)


def limits(rows: pd.DataFrame, pad: float = 0.06) -> tuple[float, float]:
    """Axis limits that hold 1, every measured interval and the predictions, the latter up to three times beyond.

    `pad` is the share of the span left free at each end.
    """
    measured = [rows["time_ratio"], *(rows[name] for name in ("low", "high") if name in rows)]
    values = pd.concat(measured).astype(float)
    values = values[np.isfinite(values) & (values > 0)]
    low, high = min(values.min(), 1 / _NARROWEST), max(values.max(), _NARROWEST)
    names = [name for name in ("predicted_ratio_low", "predicted_ratio_high", "predicted_ratio") if name in rows]
    for predicted in pd.concat([rows[name] for name in names]).dropna() if names else ():
        low, high = min(low, max(predicted, low / 3)), max(high, min(predicted, high * 3))
    margin = (high / low) ** pad
    return low / margin, high * margin


def recipe_name(recipe: str) -> str:
    """A recipe's name in a figure: ARTICLE_FLASH reads "Article Flash"."""
    return " ".join(part.capitalize() if part.isupper() else part for part in str(recipe).split("_"))


def recipe_color(recipe: str) -> str:
    """The recipe's color, the same in every figure."""
    name = str(recipe).upper()
    if "ARTICLE" in name:
        return style.VERMILION
    if "BEST" in name:
        return style.BLUE
    return style.INK if "STANDARD" in name else style.GREEN


def crossover(result: pd.DataFrame, ax: Axes) -> Axes:
    """Time ratio over length, one line a recipe (and phase); bands are 95%, crossings shaded, predictions grey."""
    points = style.measured_rows(result, "time_ratio")
    points = points[points["context"].notna()]
    if points.empty:
        return style.empty(ax, "No ratio was measured over length.")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlim(points["context"].min() / 1.12, points["context"].max() * 1.9)
    ax.set_ylim(*limits(points, pad=0.12))
    style.power_of_two_axis(ax.xaxis, points["context"])
    style.log_ratio_axis(ax.yaxis, ax.get_ylim())
    _shade_crossings(ax, result)
    ends = [_draw_curve(ax, label, rows, *look) for label, rows, look in _curves(points)]
    mark_same_speed(ax)
    style.label_ends(ax, [*ends, (points["context"].max(), 1.0, "same speed", style.INK)])
    _label_predicted(ax, points)
    phases = list(points["phase"].dropna().unique())
    of = {"prefill": "Prompt", "decode": "Cache"}.get(phases[0], "Context") if len(phases) == 1 else "Context"
    ax.set(xlabel=f"{of} length (tokens)", ylabel="Time ratio (above 1 is slower)")
    return ax


def _curves(points: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, tuple]]:
    keys = [key for key in ("recipe", "phase") if points[key].notna().all()]
    several = "phase" in keys and points["phase"].nunique() > 1
    for values, rows in points.groupby(keys, sort=False) if keys else [((), points)]:
        named = dict(zip(keys, values, strict=True))
        phases = list(points["phase"].unique()) if several else []
        dashes = _LINE_STYLES[phases.index(named["phase"]) % 3] if several else "-"
        label = recipe_name(named.get("recipe", "")) + (f", {named['phase']}" if several else "")
        yield label, rows.sort_values("context"), (recipe_color(named.get("recipe", "")), dashes)


def _draw_curve(ax: Axes, label: str, rows: pd.DataFrame, color: str, dashes) -> tuple[float, float, str, str]:
    if rows["predicted_ratio"].notna().any():
        ax.plot(rows["context"], rows["predicted_ratio"], color=style.PREDICTED, lw=1.2, ls=dashes, zorder=1.5)
    band = rows[["context", "low", "high"]].dropna().astype(float)
    if len(band):
        ax.fill_between(band["context"], band["low"], band["high"], color=color, alpha=0.18, lw=0)
    ax.plot(rows["context"], rows["time_ratio"], color=color, ls=dashes, zorder=2)
    for _, row in rows.iterrows():
        face = style.PAPER if style.is_contended(row) else color
        ax.plot(row["context"], row["time_ratio"], "o", mfc=face, mec=color, mew=1.4, ms=6, zorder=3)
    last = rows.iloc[-1]
    return float(last["context"]), float(last["time_ratio"]), label, color


def mark_same_speed(ax: Axes) -> None:
    """The dashed line at 1."""
    ax.axhline(1, color=style.MUTED, lw=1.1, ls=(0, (4, 3)), zorder=1)


def _label_predicted(ax: Axes, points: pd.DataFrame) -> None:
    """Names the grey lines once, at the lowest of their left ends."""
    if points["predicted_ratio"].isna().all():
        return
    starts = points[points["predicted_ratio"].notna() & (points["context"] == points["context"].min())]
    if len(starts):
        at = starts.loc[starts["predicted_ratio"].idxmin()]
        place = dict(xytext=(0, -9), textcoords="offset points", va="top", size=style.SMALL_PT, color=style.MUTED)
        ax.annotate("predicted", (at["context"], at["predicted_ratio"]), **place)


def _shade_crossings(ax: Axes, result: pd.DataFrame) -> None:
    crossings = style.measured_rows(result, "crossover_tokens")
    for number, (_, row) in enumerate(crossings.iterrows()):
        color = recipe_color(row.get("recipe", ""))
        words = f"crosses at {style.short_count(row['crossover_tokens'])}"
        if pd.notna(row.get("low")) and pd.notna(row.get("high")):
            ax.axvspan(row["low"], row["high"], color=color, alpha=0.10, lw=0, zorder=0.5)
        ax.axvline(row["crossover_tokens"], color=color, lw=1, alpha=0.6, zorder=0.8)
        ax.annotate(
            words, (row["crossover_tokens"], 0.015 + 0.06 * number), xycoords=ax.get_xaxis_transform(), xytext=(-4, 0),
            textcoords="offset points", ha="right", va="bottom", size=style.SMALL_PT, color=style.text_color(color),
            bbox=style.ON_LINE,
        )  # fmt: skip

"""Figures of what limits a kernel: the machine's roofline with every kernel on it, and the parts of a call's time."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from flashstudy.facts.units import format_bytes
from flashstudy.share import style

FORMATS = {
    "fp32": style.INK, "bf16": style.BLUE, "fp16": style.SKY, "fp8": style.PURPLE, "int8": style.VERMILION,
    "int4": style.GREEN, "nf4": style.ORANGE,
}  # fmt: skip
PARTS = {
    "bytes": style.BLUE, "instructions": style.VERMILION, "launch": style.MUTED, "decompress": style.PURPLE,
    "dequantize": style.ORANGE, "multiply": style.GREEN,
}  # fmt: skip
MARKERS = {1: "o", 4: "v", 16: "s", 64: "D", 128: "^", 256: "P"}
SUM = "sum of parts"


def roofline(result: pd.DataFrame, ax: Axes) -> Axes:
    """Useful FLOP/s against useful FLOP per stored byte, a mark a kernel and number of rows, under the machine's roofs.

    The slope is the measured read bandwidth, each flat line the measured product rate of a format.
    """
    rows = style.measured_rows(result, "flop_per_s")
    roofs = rows[rows["role"] == "ceiling"]
    points = rows[rows["role"] != "ceiling"].assign(intensity=lambda rows: rows["flop"] / rows["read_bytes"])
    if points.empty or roofs.empty:
        return style.empty(ax, "No kernel was timed.")
    low, high = points["intensity"].min() / 1.6, points["intensity"].max() * 4
    rates = pd.concat([points["flop_per_s"], roofs["flop_per_s"]])
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(rates.min() / 2, rates.max() * 2))
    read = float(roofs["ceiling_bytes_per_s"].iloc[0])
    ends = list(_draw_roofs(ax, roofs, read, low, high))
    for _, row in points.iterrows():
        color = FORMATS.get(row["weight_format"], style.PURPLE)
        face = style.PAPER if style.is_contended(row) else color
        marker = MARKERS.get(int(row["rows"]), "o")
        ax.plot(row["intensity"], row["flop_per_s"], marker, mfc=face, mec=color, ms=5.5, mew=1.2, zorder=3)
    style.label_ends(ax, ends)
    _roofline_key(ax, points)
    ax.set_xlabel("Useful work per stored byte (FLOP/byte)")
    ax.set_ylabel("Useful work per second (FLOP/s)")
    return ax


def _draw_roofs(
    ax: Axes, roofs: pd.DataFrame, read: float, low: float, high: float
) -> Iterator[tuple[float, float, str, str]]:
    """The slope and the flat roofs; (x, y, label, color) of each flat end."""
    top = roofs["flop_per_s"].max()
    knee = min(top / read, high)
    ax.plot([low, knee], [low * read, knee * read], color=style.MUTED, lw=1.2, zorder=1)
    place = dict(xytext=(-4, 4), textcoords="offset points", ha="right", va="bottom")
    middle = (low * knee) ** 0.5
    ax.annotate(f"memory, {format_bytes(read)}/s", (middle, middle * read), size=style.SMALL_PT, **place)
    for _, roof in roofs.iterrows():
        rate, color = roof["flop_per_s"], FORMATS.get(roof["weight_format"], style.PURPLE)
        if rate / read < high:  # else the slope alone is the roof
            ax.plot([max(rate / read, low), high], [rate] * 2, color=color, lw=1.2, ls=(0, (4, 3)), zorder=1)
            yield high, rate, roof["weight_format"], color


def _roofline_key(ax: Axes, points: pd.DataFrame) -> None:
    handles = [
        Line2D([], [], marker="o", ls="", color=color, label=name)
        for name, color in FORMATS.items()
        if (points["weight_format"] == name).any()
    ]
    handles += [
        Line2D([], [], marker=MARKERS.get(int(rows), "o"), ls="", color=style.MUTED, mfc=style.PAPER,
               label=f"{rows:.0f} row{'s' if rows > 1 else ''}")
        for rows in sorted(points["rows"].dropna().unique())
    ]  # fmt: skip
    style.key_below(ax, handles, columns=6, handlelength=1.0, columnspacing=1.2)


def parts(result: pd.DataFrame, ax: Axes) -> Axes:
    """Parts of one call as shares of the whole, a line a kernel: stages end to end, bounds from zero one above another.

    Whiskers are 95% intervals. Stages are what the path does in turn, so they should end at 100%; bounds overlap in
    time, so the longest of them says what limits the kernel.
    """
    rows = style.measured_rows(result, "part_share")
    rows = rows[rows["kernel"].notna()]
    if rows.empty:
        return style.empty(ax, "No parts were timed.")
    first = rows.iloc[0][["model", "kind"]]
    rows = rows[(rows[["model", "kind"]] == first).all(axis=1)]
    heights, names = [], []
    for height, ((_, name), group) in enumerate(rows.groupby([_order(rows), _kernel_names(rows)], sort=True)):
        (_draw_stages if (group["note"] == "stage").any() else _draw_bounds)(ax, height, group)
        heights.append(height)
        names.append(name)
    ax.set_yticks(heights, names)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.axvline(1, color=style.MUTED, lw=1.1, ls=(0, (4, 3)), zorder=1)
    ax.set_xlim(0, max(1.1, 1.05 * float(rows["part_share"].max())))
    ax.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    ax.set_xlabel("Time of the part (of the whole call)")
    ax.grid(axis="y", visible=False)
    shown = [name for name in PARTS if (rows["part"] == name).any()]
    style.key_below(ax, [Patch(facecolor=PARTS[name], label=name) for name in shown], handlelength=1.2)
    return ax


def _order(rows: pd.DataFrame) -> pd.Series:
    return pd.Series(np.where(rows["note"] == "stage", 1, 0), index=rows.index)


def _kernel_names(rows: pd.DataFrame) -> pd.Series:
    return rows["weight_format"] + " " + rows["kernel"]


def _draw_stages(ax: Axes, height: float, group: pd.DataFrame) -> None:
    start = 0.0
    for _, row in group[group["part"] != SUM].iterrows():
        ax.barh(height, row["part_share"], 0.62, left=start, color=PARTS.get(row["part"], style.MUTED), zorder=2)
        start += row["part_share"]
    for _, row in group[group["part"] == SUM].iterrows():
        ax.plot([row["low"], row["high"]], [height] * 2, color=style.INK, lw=1.4, zorder=3)


def _draw_bounds(ax: Axes, height: float, group: pd.DataFrame) -> None:
    thickness = 0.66 / max(len(group), 1)
    for number, (_, row) in enumerate(group.iterrows()):
        place = height - 0.33 + thickness * (number + 0.5)
        ax.barh(place, row["part_share"], 0.9 * thickness, color=PARTS.get(row["part"], style.MUTED), zorder=2)
        ax.plot([row["low"], row["high"]], [place] * 2, color=style.INK, lw=1.1, zorder=3)

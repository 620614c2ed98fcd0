"""Figures of what weights cost in storage and in reading: bandwidth by kernel, time and bytes by sparse format.

Naive, library and best kernels keep their colors throughout, so that a slow format is not confused with a slow kernel.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from flashstudy.facts.units import format_bytes
from flashstudy.share import style
from flashstudy.share.ratio_figures import limits, mark_same_speed

ROLES = {
    "standard": (style.MUTED, "standard"),
    "naive": (style.VERMILION, "naive"),
    "library": (style.SKY, "library's"),
    "best": (style.BLUE, "best here"),
}
FORMATS = {"dense": style.INK, "bitmap": style.VERMILION, "csr": style.ORANGE, "bsr": style.BLUE, "n_m": style.GREEN}
WIDEST_FIRST = ("fp32", "bf16", "fp16", "fp8", "int8", "int4", "nf4")
_HATCH = "////"


def bandwidth(result: pd.DataFrame, ax: Axes) -> Axes:
    """Share of the machine's read bandwidth (MBU) that each kernel reaches, one bar a format and kernel.

    The whiskers are MBU's 95% interval: bytes are exact, so only time is uncertain.
    """
    bars = _bandwidth_rows(result)
    if bars.empty:
        return style.empty(ax, "No bandwidth was measured.")
    heights = _bar_heights(bars)
    for height, (_, row) in zip(heights, bars.iterrows(), strict=True):
        _draw_bar(ax, height, row)
    ax.set_yticks(heights, [_kernel_name(row) for _, row in bars.iterrows()])
    ax.tick_params(axis="y", length=0)
    for name, rows in bars.assign(height=heights).groupby("weight_format", sort=False):
        place = dict(transform=ax.get_yaxis_transform(), ha="right", va="center")
        ax.text(-0.015, rows["height"].min() - 0.82, name, weight="bold", **place)
    top = max(1.12, float(bars["mbu"].max()) * 1.12)
    ax.set(xlim=(0, top), ylim=(max(heights) + 0.7, min(heights) - 1.7))
    ax.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    ax.set_xlabel("Share of the measured read bandwidth (MBU)")
    ax.grid(axis="y", visible=False)
    _mark_ceiling(ax, bars)
    _role_key(ax, bars)
    return ax


def _bandwidth_rows(result: pd.DataFrame) -> pd.DataFrame:
    """Rows with an MBU at the fewest activation rows, widest formats first, hot-cache bars last in each."""
    rows = style.measured_rows(result, "mbu")
    if rows["rows"].notna().any():
        rows = rows[rows["rows"] == rows["rows"].min()]
    order = {name: number for number, name in enumerate(dict.fromkeys([*WIDEST_FIRST, *rows["weight_format"]]))}
    roles = {name: number for number, name in enumerate(ROLES)}
    return rows.assign(
        _format=rows["weight_format"].map(order), _hot=rows["residency"] == "hot_cache", _role=rows["role"].map(roles)
    ).sort_values(["_format", "_hot", "_role"], kind="stable")


def _bar_heights(bars: pd.DataFrame) -> list[float]:
    """Heights one apart, with room for the format's name before each new format."""
    heights, height, before = [], -1.0, None
    for name in bars["weight_format"]:
        height += 1.0 if name == before else 2.0
        heights.append(height)
        before = name
    return heights


def _draw_bar(ax: Axes, height: float, row: pd.Series) -> None:
    color, _ = ROLES.get(row.get("role"), (style.MUTED, ""))
    hollow = style.is_contended(row)
    hot = row.get("residency") == "hot_cache"
    face = style.PAPER if hollow or hot else color
    ax.barh(height, row["mbu"], 0.74, facecolor=face, edgecolor=color, hatch=_HATCH if hot else None, lw=1.2)
    low, high = _mbu_interval(row)
    if np.isfinite(low) and high - low > 0.004:
        ax.plot([low, high], [height] * 2, color=style.INK, lw=1.3, solid_capstyle="butt")
    note = " busy: not counted" if hollow else " from cache" if hot else ""
    words = f"{100 * row['mbu']:.{0 if row['mbu'] >= 0.0995 else 1}f}%{note}"
    ax.annotate(
        words, (np.nanmax([row["mbu"], high]), height), xytext=(5, 0), textcoords="offset points", va="center",
        size=style.SMALL_PT, color=style.INK, bbox=dict(facecolor=style.PAPER, edgecolor="none", pad=0.6), zorder=4,
    )  # fmt: skip


def _mbu_interval(row: pd.Series) -> tuple[float, float]:
    return row.get("mbu_low", np.nan), row.get("mbu_high", np.nan)


def _kernel_name(row: pd.Series) -> str:
    kernel = row.get("kernel")
    name = str(kernel if pd.notna(kernel) and kernel else row.get("kernel_path", ""))
    return name if len(name) <= 26 else name[:25] + "…"


def _mark_ceiling(ax: Axes, bars: pd.DataFrame) -> None:
    ax.axvline(1, color=style.MUTED, lw=1.1, ls=(0, (4, 3)), zorder=1)
    rate = bars["ceiling_bytes_per_s"].dropna()
    words = f"ceiling, {format_bytes(rate.median())}/s" if len(rate) else "ceiling"
    place = dict(xycoords=ax.get_xaxis_transform(), ha="center", va="bottom")
    ax.annotate(words, (1, 1.01), size=style.SMALL_PT, color=style.INK, **place)


def _role_key(ax: Axes, bars: pd.DataFrame) -> None:
    looks = [look for role, look in ROLES.items() if (bars["role"] == role).any()]
    handles = [Patch(facecolor=color, edgecolor=color, label=label) for color, label in looks]
    if bars["_hot"].any():
        handles.append(Patch(facecolor=style.PAPER, edgecolor=style.BLUE, hatch=_HATCH, label="cached weights"))
    style.key_below(ax, handles, center=0.32, handlelength=1.2, columnspacing=1.4)


def fragmentation(result: pd.DataFrame, ax: Axes) -> Axes:
    """Time ratio to the dense product against sparsity, one line a storage format; below 1 the format pays."""
    rows = _sparse_rows(result, "time_ratio")
    if rows.empty:
        return style.empty(ax, "No sparse product was timed.")
    ax.set_yscale("log")
    ax.set_ylim(*limits(rows))
    style.log_ratio_axis(ax.yaxis, ax.get_ylim())
    ends = [_draw_sparse_line(ax, line, "time_ratio") for line in _sparse_lines(rows)]
    _sparsity_axis(ax, rows)
    mark_same_speed(ax)
    style.label_ends(ax, [*ends, (rows["sparsity"].max(), 1.0, "dense", style.INK)])
    ax.set_ylabel("Time ratio, sparse / dense")
    return ax


def compression(result: pd.DataFrame, ax: Axes) -> Axes:
    """Stored size over dense size against sparsity, one line a format; indices are part of it."""
    rows = _sparse_rows(result, "compression")
    if rows.empty:
        return style.empty(ax, "No stored size was counted.")
    rows = rows.assign(size_ratio=1 / rows["compression"])
    ends = [_draw_sparse_line(ax, line, "size_ratio") for line in _sparse_lines(rows)]
    _sparsity_axis(ax, rows)
    ax.set_ylim(0, max(1.1, 1.08 * rows["size_ratio"].max()))
    ax.axhline(1, color=style.MUTED, lw=1.1, ls=(0, (4, 3)), zorder=1)
    style.label_ends(ax, [*ends, (rows["sparsity"].max(), 1.0, "dense", style.INK)])
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    ax.set_ylabel("Stored size, indices included (of dense)")
    return ax


def _sparse_rows(result: pd.DataFrame, column: str) -> pd.DataFrame:
    rows = style.measured_rows(result, column)
    return rows[rows["sparse_format"].notna() & (rows["sparse_format"] != "dense")]


def _sparse_lines(rows: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(label, color, rows sorted by sparsity) of each storage format, blocks of different sizes apart."""
    blocks, values = style.words(rows["block"]), style.words(rows["weight_format"])
    several = values.nunique() > 1
    for (name, block, value), line in rows.groupby([rows["sparse_format"], blocks, values], sort=False):
        label = name.upper() if name in ("csr", "bsr") else {"n_m": "2:4"}.get(name, name)
        label += f" {block}" * bool(block and name == "bsr") + f" {value}" * several
        yield label, FORMATS.get(name, style.PURPLE), line.sort_values("sparsity")


def _draw_sparse_line(ax: Axes, line: tuple[str, str, pd.DataFrame], column: str) -> tuple[float, float, str, str]:
    label, color, rows = line
    center = rows.groupby("sparsity", as_index=False)[column].median()
    ax.plot(center["sparsity"], center[column], color=color, zorder=2)
    for _, row in rows.iterrows():
        if column == "time_ratio" and pd.notna(row.get("low")) and pd.notna(row.get("high")):
            ax.plot([row["sparsity"]] * 2, [row["low"], row["high"]], color=color, lw=1.6, zorder=2.5)
        face = style.PAPER if column == "time_ratio" and style.is_contended(row) else color
        ax.plot(row["sparsity"], row[column], "o", mfc=face, mec=color, mew=1.4, ms=6, zorder=3)
    return float(center["sparsity"].iloc[-1]), float(center[column].iloc[-1]), label, color


def _sparsity_axis(ax: Axes, rows: pd.DataFrame) -> None:
    low, high = rows["sparsity"].min(), rows["sparsity"].max()
    room = max(high - low, 0.1)
    ax.set_xlim(low - 0.08 * room, high + 0.38 * room)
    ax.set_xticks(sorted(rows["sparsity"].unique()))
    ax.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    ax.set_xlabel("Sparsity (share of zeros)")

"""Figures of what compression costs in quality: error of single matrices, loss of the whole model.

A change of the loss is paired token by token with the unrounded model and drawn with its 95% interval; zero is "no
loss". The axis is linear near zero and logarithmic beyond, because INT8 and INT4 differ by a factor of a hundred.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from flashstudy.share import style
from flashstudy.share.numbers import interval, plain

ATTENTION = ("q", "k", "v", "o")
GROUPS = {"attention": style.BLUE, "MLP": style.VERMILION, "head": style.GREEN}
PATTERNS = {"unstructured": style.VERMILION, "block": style.BLUE, "2:4": style.GREEN, "channel": style.PURPLE}
_LINEAR_NATS = 0.01  # below this change the loss axis is linear
_STRIP = 0.34  # width of one group's strip of markers, in categories


def sqnr(result: pd.DataFrame, ax: Axes) -> Axes:
    """SQNR of every matrix by format, attention beside MLP; in each strip the first layer is left, the last right."""
    rows = _matrix_rows(result)
    if rows.empty:
        return style.empty(ax, "No matrix was compared with its original.")
    formats = _formats(rows)
    groups = [name for name in GROUPS if (rows["_group"] == name).any()]
    for number, name in enumerate(groups):
        center = (number - (len(groups) - 1) / 2) * (_STRIP + 0.06)
        for position, fmt in enumerate(formats):
            _draw_strip(ax, position + center, rows[(rows["_format"] == fmt) & (rows["_group"] == name)], GROUPS[name])
    ax.set_xticks(range(len(formats)), [fmt.replace(" per ", "\n") for fmt in formats])
    ax.grid(axis="x", visible=False)
    ax.set(xlim=(-0.6, len(formats) - 0.4), ylabel="Signal-to-quantization-noise ratio (dB)")
    ax.set_xlabel("Format (in each strip: first layer left, last layer right)")
    _name_groups(ax, groups)
    return ax


def sqnr_by_depth(result: pd.DataFrame, ax: Axes, bits: float | None = None, granularity: str | None = None) -> Axes:
    """SQNR over depth, one line a matrix kind, at one format: by default the fewest bits at the finest granularity."""
    rows = _matrix_rows(result)
    rows = rows[rows["layer"].notna()]
    if rows.empty:
        return style.empty(ax, "No matrix was compared with its original.")
    rows = rows[rows["bits"] == (bits if bits is not None else rows["bits"].min())]
    finest = rows.loc[rows["bits_per_weight"].idxmax(), "granularity"]
    rows = rows[rows["granularity"] == (granularity or finest)]
    ends = []
    for kind, line in rows.groupby("kind", sort=False):
        line, color = line.sort_values("layer"), GROUPS[_group(kind)]
        ax.plot(line["layer"], line["sqnr_db"], color=color, marker="o", ms=4, lw=1.4)
        ends.append((float(line["layer"].iloc[-1]), float(line["sqnr_db"].iloc[-1]), str(kind), color))
    ax.set(xlabel="Layer (index from the input)", ylabel="Signal-to-quantization-noise ratio (dB)")
    ax.set_xlim(right=rows["layer"].max() * 1.15 + 0.5)
    _name_groups(ax, [name for name in GROUPS if (rows["_group"] == name).any()])
    style.label_ends(ax, ends)
    return ax


def quality(result: pd.DataFrame, ax: Axes) -> Axes:
    """Change of the loss of the whole model by format, with 95% intervals, the KL divergence as a hollow diamond."""
    rows = style.measured_rows(result, "delta_nll_nats")
    rows = rows[~((rows["low"] == 0) & (rows["high"] == 0))]  # the reference against itself
    if rows.empty:
        return style.empty(ax, "No format was scored.")
    rows = rows.assign(_format=[_format_name(row) for _, row in rows.iterrows()])
    _loss_axis(ax, ax.xaxis, rows)
    for position, (_, row) in enumerate(rows.iterrows()):
        _draw_loss(ax, position, row)
    ax.set_yticks(range(len(rows)), list(rows["_format"]))
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.set(ylim=(len(rows) - 0.4, -0.7), xlabel="Change of the loss, NLL (nats per token)")
    ax.axvline(0, color=style.MUTED, lw=1.1, ls=(0, (4, 3)), zorder=1)
    top = ax.get_xaxis_transform()
    ax.annotate("no loss", (0, 1.01), xycoords=top, ha="center", va="bottom", size=style.SMALL_PT, color=style.INK)
    _loss_key(ax, rows)
    return ax


def pruned_quality(result: pd.DataFrame, ax: Axes) -> Axes:
    """Change of the loss against sparsity, one line a pattern, with 95% intervals."""
    rows = style.measured_rows(result, "delta_nll_nats")
    rows = rows[rows["sparsity"].astype(float).fillna(0) > 0]
    if rows.empty:
        return style.empty(ax, "No pruned model was scored.")
    _loss_axis(ax, ax.yaxis, rows)
    ends = [_draw_pruned(ax, label, color, line) for label, color, line in _patterns(rows)]
    low, high = rows["sparsity"].min(), rows["sparsity"].max()
    room = max(high - low, 0.1)
    ax.set_xlim(low - 0.08 * room, high + 0.42 * room)
    ax.set_xticks(sorted(rows["sparsity"].unique()))
    ax.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    ax.axhline(0, color=style.MUTED, lw=1.1, ls=(0, (4, 3)), zorder=1)
    style.label_ends(ax, [*ends, (high, 0.0, "no loss", style.INK)])
    ax.set(xlabel="Sparsity (share of zeros)", ylabel="Change of the loss, NLL (nats per token)")
    return ax


def _matrix_rows(result: pd.DataFrame) -> pd.DataFrame:
    rows = style.measured_rows(result, "sqnr_db")
    rows = rows[np.isfinite(rows["sqnr_db"].astype(float)) & rows["kind"].notna()]
    named = [_format_name(row) for _, row in rows.iterrows()]
    return rows.assign(_group=[_group(kind) for kind in rows["kind"]], _format=named)


def _group(kind: str) -> str:
    return "attention" if kind in ATTENTION else "head" if kind == "head" else "MLP"


def _format_name(row: pd.Series) -> str:
    """What was done to the weights, in a few words: "INT8 per channel"."""
    bits, granularity, recipe = (row.get(name) for name in ("bits", "granularity", "recipe"))
    if pd.notna(bits):
        return f"INT{bits:.0f}" + (f" per {granularity}" if pd.notna(granularity) else "")
    name = next((value for value in (recipe, row.get("weight_format"), granularity) if pd.notna(value)), "")
    return str(name).replace("_", " ")


def _formats(rows: pd.DataFrame) -> list[str]:
    """Format names, most bits first, then in order of stored size."""
    first = rows.drop_duplicates("_format")
    return list(first.sort_values(["bits", "bits_per_weight"], ascending=[False, True], kind="stable")["_format"])


def _draw_strip(ax: Axes, center: float, rows: pd.DataFrame, color: str) -> None:
    if rows.empty:
        return
    depth = rows["layer"].astype(float).fillna(0.0)
    span = depth.max() - depth.min()
    offset = (depth - depth.min()) / span - 0.5 if span else depth * 0
    ax.plot(center + _STRIP * offset, rows["sqnr_db"], "o", ms=3.2, color=color, alpha=0.55, mew=0)
    mean = [rows["sqnr_db"].mean()] * 2
    ax.plot([center - _STRIP / 2, center + _STRIP / 2], mean, color=style.text_color(color), lw=2)


def _name_groups(ax: Axes, groups: list[str]) -> None:
    for number, name in enumerate(groups):
        ax.annotate(
            f"{name} matrices", (0.985, 0.97 - 0.065 * number), xycoords="axes fraction", ha="right", va="top",
            color=style.text_color(GROUPS[name]), weight="bold", size=style.SMALL_PT, bbox=style.ON_LINE,
        )  # fmt: skip


def _loss_axis(ax: Axes, axis, rows: pd.DataFrame) -> None:
    """Linear within ±0.01 nats, logarithmic beyond, few ticks."""
    names = [name for name in ("delta_nll_nats", "low", "high", "kl_nats") if name in rows]
    values = pd.concat([rows[name] for name in names]).dropna().astype(float)
    set_scale, set_limits = (ax.set_xscale, ax.set_xlim) if axis is ax.xaxis else (ax.set_yscale, ax.set_ylim)
    set_scale("symlog", linthresh=_LINEAR_NATS, linscale=0.8)
    low, high = min(values.min() * 1.5, -_LINEAR_NATS), max(values.max() * 1.6, 3 * _LINEAR_NATS)
    set_limits(low, high)
    ticks = [0.0, *(sign * m * 10.0**p for sign in (1, -1) for p in range(-2, 3) for m in (1,))]
    axis.set_major_locator(FixedLocator(sorted(tick for tick in ticks if low <= tick <= high)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:+g}".replace("-", "−") if value else "0")


def _draw_loss(ax: Axes, position: int, row: pd.Series) -> None:
    color = style.VERMILION if row["low"] > 0 else style.BLUE if row["high"] < 0 else style.MUTED
    kl = row.get("kl_nats")
    if pd.notna(kl):
        ax.plot(kl, position + 0.22, "D", ms=4.5, mfc=style.PAPER, mec=style.MUTED, mew=1.2, zorder=2.5)
    ax.plot([row["low"], row["high"]], [position] * 2, color=color, lw=3, zorder=2)
    face = style.PAPER if style.is_contended(row) else color
    ax.plot(row["delta_nll_nats"], position, "o", ms=7, mfc=face, mec=color, mew=1.4, zorder=3)
    words = "+" * (row["delta_nll_nats"] > 0) + interval(row["delta_nll_nats"], row["low"], row["high"])
    place = dict(transform=ax.get_yaxis_transform(), va="center", size=style.SMALL_PT)
    ax.text(1.02, position, words, color=style.text_color(color), **place)


def _loss_key(ax: Axes, rows: pd.DataFrame) -> None:
    handles = [Line2D([], [], color=style.MUTED, marker="o", lw=3, ms=7, label="measured, 95% interval")]
    if rows["kl_nats"].notna().any():
        hollow = dict(mfc=style.PAPER, mec=style.MUTED, mew=1.2, ls="", ms=5)
        handles.append(Line2D([], [], marker="D", label="KL divergence", **hollow))
    style.key_below(ax, handles)


def _patterns(rows: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    blocks = style.words(rows["block"])
    for (pattern, block), line in rows.groupby([style.words(rows["pattern"]), blocks], sort=False):
        label = "blocks" + f" {block}" * bool(block) if pattern == "block" else pattern or "pruned"
        yield label, PATTERNS.get(pattern, style.ORANGE), line.sort_values("sparsity")


def _draw_pruned(ax: Axes, label: str, color: str, line: pd.DataFrame) -> tuple[float, float, str, str]:
    ax.plot(line["sparsity"], line["delta_nll_nats"], color=color, marker="o", ms=6)
    for _, row in line.dropna(subset=["low", "high"]).iterrows():
        ax.plot([row["sparsity"]] * 2, [row["low"], row["high"]], color=color, lw=2.2)
    last = line.iloc[-1]
    return float(last["sparsity"]), float(last["delta_nll_nats"]), f"{label} ({plain(last['delta_nll_nats'])})", color

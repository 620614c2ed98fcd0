"""Figures of a start: where the time to the first token goes, and what peak memory is made of.

Bars are stacked from what comes first. A bar many times longer than the others would leave nothing of them to see: it
is cut, with a gap and its true length in words.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from flashstudy.facts.units import format_bytes, format_ratio, format_seconds
from flashstudy.share import style

PHASES = {"load": style.BLUE, "convert": style.VERMILION, "first call": style.GREEN}
STATES = {"warm": "Page cache warm", "cold": "Page cache cold"}
LONG = 4.0  # over the median bar
_HATCH = "////"
_MEMORY = ("way", "phase", "claim_id", "private_bytes", "file_mapped_bytes", "baseline_bytes", "over_baseline_bytes")


def start_time(result: pd.DataFrame, ax: Axes) -> Axes:
    """Time to the first token of each way to load, by phase, one bar a way and state of the page cache.

    The whisker is the 95% interval of the ratio to the standard, in seconds of the standard's median.
    """
    bars = list(_time_bars(result))
    if not bars:
        return style.empty(ax, "No load was timed.")
    longest = _longest_shown([total for *_, total in bars])
    heights = []
    for height, state, parts, total in _placed(bars):
        if state:
            ax.text(-0.02, height, state, transform=ax.get_yaxis_transform(), ha="right", va="center", weight="bold")
            continue
        heights.append((height, parts))
        _draw_time_bar(ax, height, parts, total, longest)
    ax.set_yticks([height for height, _ in heights], [parts["way"] for _, parts in heights])
    ax.tick_params(axis="y", length=0)
    ax.set(xlim=(0, 1.5 * longest), ylim=(heights[-1][0] + 0.7, -0.7))
    ax.set_xlabel("Time to the first token (s)")
    ax.grid(axis="y", visible=False)
    style.key_below(ax, [Patch(color=color, label=phase) for phase, color in PHASES.items()], center=0.3)
    return ax


def _time_bars(result: pd.DataFrame) -> Iterator[tuple[str, dict, float]]:
    """(state, phases' seconds with the total's row, seconds in all) by state, in the order of the frame."""
    full = result.reindex(columns=list(dict.fromkeys([*result.columns, "way", "page_cache", "phase", "time_s"])))
    rows = full[full["time_s"].notna() & full["way"].notna()]
    for state in STATES:
        for way, own in rows[rows["page_cache"] == state].groupby("way", sort=False):
            found = own.set_index("phase")
            if "first token" in found.index:
                seconds = {phase: float(found["time_s"].get(phase, 0.0)) for phase in PHASES}
                yield state, {"way": way, "row": found.loc["first token"], **seconds}, sum(seconds.values())


def _placed(bars: list[tuple[str, dict, float]]) -> Iterator[tuple[float, str, dict, float]]:
    """(height, title or "", parts, total): a line for the title of each state, then its bars one below the other."""
    height, before = -1.0, ""
    for state, parts, total in bars:
        if state != before:
            height += 1.0
            yield height, STATES[state], {}, 0.0
            before = state
        height += 0.9
        yield height, "", parts, total


def _longest_shown(totals: list[float]) -> float:
    """The longest bar that is not many times longer than the usual one."""
    usual = float(np.median(totals))
    return max(total for total in totals if total <= LONG * usual)


def _draw_time_bar(ax: Axes, height: float, parts: dict, total: float, longest: float) -> None:
    cut, contended = total > 1.1 * longest, style.is_contended(parts["row"])
    shown, left = (1.1 * longest if cut else total), 0.0
    for phase, color in PHASES.items():
        right = min(left + parts[phase], shown)
        if right > left:
            face = style.PAPER if contended else color
            ax.barh(height, right - left, 0.66, left=left, facecolor=face, edgecolor=color, lw=1.2)
            left = right
    low, high = _interval_s(parts["row"])
    if cut:
        ax.plot([0.96 * shown] * 2, [height - 0.45, height + 0.45], color=style.PAPER, lw=4)
    elif high > low and not contended:
        ax.plot([low, min(high, 1.1 * longest)], [height] * 2, color=style.INK, lw=1.3, solid_capstyle="butt")
        shown = max(shown, min(high, 1.1 * longest))
    note = ", busy: not counted" if contended else ", bar cut" if cut else ""
    _write(ax, shown, height, format_seconds(parts["row"]["time_s"]) + note)


def _interval_s(row: pd.Series) -> tuple[float, float]:
    """The ratio's interval in seconds of the standard's median; (0, 0) where there is none."""
    ends = [row.get(end, np.nan) * row.get("standard_s", np.nan) for end in ("low", "high")]
    return (ends[0], ends[1]) if np.isfinite(ends).all() else (0.0, 0.0)


def _write(ax: Axes, x: float, height: float, words: str) -> None:
    ax.annotate(
        words, (x, height), xytext=(5, 0), textcoords="offset points", va="center", size=style.SMALL_PT,
        color=style.INK, bbox=dict(facecolor=style.PAPER, edgecolor="none", pad=0.6), zorder=4,
    )  # fmt: skip


def start_memory(result: pd.DataFrame, ax: Axes) -> Axes:
    """Peak memory of each way to load: private, over the libraries', and mapped from files; the grey line is predicted.

    Each kind is at its own highest point, which need not be the same moment.
    """
    rows = _memory_rows(result)
    if rows.empty:
        return style.empty(ax, "No peak was measured.")
    for height, (_, row) in enumerate(rows.iterrows()):
        _draw_memory_bar(ax, height, row)
    ax.set_yticks(range(len(rows)), rows["way"])
    ax.tick_params(axis="y", length=0)
    longest = (rows["baseline_bytes"] + rows["over_baseline_bytes"] + rows["file_mapped_bytes"]).max()
    ax.set(xlim=(0, 1.42 * longest), ylim=(len(rows) - 0.4, -0.6))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:.0f}")
    ax.set_xlabel("Peak memory (MB)")
    ax.grid(axis="y", visible=False)
    _memory_key(ax)
    return ax


def _memory_rows(result: pd.DataFrame) -> pd.DataFrame:
    optional = ("memory_ratio", "predicted_bytes")
    full = result.reindex(columns=list(dict.fromkeys([*result.columns, *_MEMORY, *optional])))
    return full[(full["phase"] == "peak") & full["private_bytes"].notna() & full["claim_id"].isna()]


def _draw_memory_bar(ax: Axes, height: int, row: pd.Series) -> None:
    libraries, weights, mapped = (row[name] for name in ("baseline_bytes", "over_baseline_bytes", "file_mapped_bytes"))
    ax.barh(height, libraries, 0.66, facecolor=style.AXIS, edgecolor=style.AXIS, lw=1.2)
    ax.barh(height, weights, 0.66, left=libraries, facecolor=style.BLUE, edgecolor=style.BLUE, lw=1.2)
    left = libraries + weights
    ax.barh(height, mapped, 0.66, left=left, facecolor=style.PAPER, edgecolor=style.BLUE, hatch=_HATCH, lw=1.2)
    if pd.notna(row["predicted_bytes"]):
        at = libraries + row["predicted_bytes"]
        ax.plot([at, at], [height - 0.45, height + 0.45], color=style.PREDICTED, lw=1.3, solid_capstyle="butt")
    ratio = f", {format_ratio(row['memory_ratio'])}" if pd.notna(row["memory_ratio"]) else ""
    _write(ax, left + mapped, height, f"{format_bytes(weights)}{ratio}")


def _memory_key(ax: Axes) -> None:
    handles = [
        Patch(color=style.AXIS, label="libraries"),
        Patch(color=style.BLUE, label="private"),
        Patch(facecolor=style.PAPER, edgecolor=style.BLUE, hatch=_HATCH, label="mapped"),
        Line2D([], [], color=style.PREDICTED, lw=1.3, label="weights held"),
    ]
    style.key_below(ax, handles, center=0.3, handlelength=1.2, columnspacing=1.2)

"""A verdict as a picture of one line: the claim's band shaded, the measured interval on it.

Small enough to stand in a ledger row, drawn by hand as SVG in the stylesheet's colors.
"""

import html
import math
from collections.abc import Mapping
from typing import Any

from flashstudy.share import numbers

WIDTH, HEIGHT, BASE = 240, 40, 15  # in CSS pixels; BASE is the height of the number line
_SIDE = 14
_LOG_FROM = 4.0  # ratios that spread further than this are drawn on a logarithmic line


def draw(row: Mapping[str, Any]) -> str:
    """The SVG of one row of `verdicts.judge`; "" where there is no interval or no band to draw."""
    values = [row["estimate"], row["low"], row["high"]]
    edges = [edge for edge in (row["band_low"], row["band_high"]) if math.isfinite(edge)]
    if not edges or not all(math.isfinite(value) for value in values):
        return ""
    place = _scale([*values, *edges], logarithmic=row["unit"] == "ratio")
    left = place(row["band_low"]) if math.isfinite(row["band_low"]) else 0
    right = place(row["band_high"]) if math.isfinite(row["band_high"]) else WIDTH
    low, center, high = (place(value) for value in (row["low"], row["estimate"], row["high"]))
    words = f"{numbers.amount_interval(*values, row['unit'])} against the band"
    return (
        f'<svg class="band" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{html.escape(words)}">'
        f'<rect class="zone" x="{left:.1f}" y="{BASE - 9}" width="{max(right - left, 2):.1f}" height="18"/>'
        f'<line class="axis" x1="0" x2="{WIDTH}" y1="{BASE}" y2="{BASE}"/>'
        f'<line class="span" x1="{low:.1f}" x2="{max(high, low + 1):.1f}" y1="{BASE}" y2="{BASE}"/>'
        f'<circle class="dot" cx="{center:.1f}" cy="{BASE}" r="4.5"/>{_edge_labels(edges, place, row["unit"])}</svg>'
    )


def _scale(values: list[float], *, logarithmic: bool):
    """Maps a value to its x; the outermost values stand `_SIDE` pixels from the ends."""
    low, high = min(values), max(values)
    if logarithmic and low > 0 and high / low > _LOG_FROM:
        inner = _scale([math.log(low), math.log(high)], logarithmic=False)
        return lambda value: inner(math.log(value))
    span = (high - low) or abs(high) or 1.0
    return lambda value: _SIDE + (WIDTH - 2 * _SIDE) * (value - low) / span


def _edge_labels(edges: list[float], place, unit: str) -> str:
    """The band's edges as numbers below the line; two that would collide share one label."""
    at = [place(edge) for edge in edges]
    if len(edges) == 2 and at[1] - at[0] < 44:
        both = f"{numbers.edge(edges[0], unit)}–{numbers.edge(edges[1], unit)}"
        return _label(sum(at) / 2, both)
    return "".join(_label(x, numbers.edge(edge, unit)) for x, edge in zip(at, edges, strict=True))


def _label(x: float, words: str) -> str:
    anchor = "start" if x < 40 else "end" if x > WIDTH - 40 else "middle"
    x = {"start": max(x - 8, 0), "end": min(x + 8, WIDTH)}.get(anchor, x)
    return f'<text class="edge" x="{x:.1f}" y="{HEIGHT - 3}" text-anchor="{anchor}">{html.escape(words)}</text>'

"""Tables that can be read: a dozen rows, few digits, units in the headers, an interval beside its number.

The same HTML serves JupyterLab and the offline page. Factors that are the same in every row move into the caption, and
of the rest only those are shown that tell rows apart; `columns` overrides the choice.
"""

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from flashstudy.facts.columns import COLUMNS, label
from flashstudy.share import numbers
from flashstudy.share.progress import progress

__all__ = ["Table", "progress", "render", "show"]

MAX_COLUMNS = 9
BUSY = "machine busy, not counted"
VALUES = (  # most wanted first; the first that a row has is the one that `low` and `high` belong to
    "time_ratio", "crossover_tokens", "delta_nll_nats", "mbu", "kl_nats", "top1_agreement", "sqnr_db", "compression",
    "size_ratio", "predicted_ratio", "bits_per_weight", "stored_bytes", "read_bytes_per_s", "relative_error",
    "part_share", "occupancy", "density", "time_s", "predicted_s", "flop_per_s", "perplexity", "nll_nats", "read_bytes",
)  # fmt: skip
_INTERVALS = {
    "predicted_ratio": ("predicted_ratio_low", "predicted_ratio_high"),
    "predicted_s": ("predicted_low_s", "predicted_high_s"),
}
_ENDS = {"low", "high", *(end for ends in _INTERVALS.values() for end in ends)}
_IN_WORDS = {"contended", "reason", "skipped", "config", "note", "claim_id", "verdict_kind", "estimate"}
_SCALES = {  # unit of the frame: (unit of the table, factor, from this size on), largest last
    "s": (("µs", 1e6, 0), ("ms", 1e3, 1e-3), ("s", 1, 1)),
    "bytes": (("bytes", 1, 0), ("KB", 1e-3, 1e3), ("MB", 1e-6, 1e6), ("GB", 1e-9, 1e9)),
    "bytes/s": (("MB/s", 1e-6, 0), ("GB/s", 1e-9, 1e9)),
    "FLOP/s": (("MFLOP/s", 1e-6, 0), ("GFLOP/s", 1e-9, 1e9), ("TFLOP/s", 1e-12, 1e12)),
    "FLOP": (("MFLOP", 1e-6, 0), ("GFLOP", 1e-9, 1e9), ("TFLOP", 1e-12, 1e12)),
    "of the ceiling": (("% of the ceiling", 100, 0),),
    "of the whole call": (("% of the call", 100, 0),),
}


@dataclass(frozen=True)
class Table:
    """A rendered table: HTML where it is displayed, text where it is printed."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def show(frame: pd.DataFrame, columns: Iterable[str] | None = None, rows: int = 12) -> Table:
    """The frame's first `rows` rows for reading; claim rows are left out, the verdict table has them.

    Raises ValueError for columns that the frame lacks and for fewer than one row.
    """
    if rows < 1:
        raise ValueError(f"a table needs at least one row, got rows={rows}")
    found = frame[frame["claim_id"].isna()] if "claim_id" in frame else frame
    if columns is not None and (unknown := [name for name in columns if name not in frame]):
        raise ValueError(f"no columns {unknown} in this result; it has {', '.join(map(str, frame.columns))}")
    chosen = [name for name in columns if name not in _ENDS] if columns is not None else choose(found)
    part = found.head(rows)
    scales = {name: _scale(part, name) for name in chosen}
    header = [_header(name, scales[name]) for name in chosen]
    cells = [[_cell(row, name, scales[name]) for name in chosen] for _, row in part.iterrows()]
    numeric = [_is_numeric(found, name) for name in chosen]
    notes = [_constants(found, chosen), f"{len(part)} of {len(found)} rows" if len(found) > len(part) else ""]
    return render(header, cells, numeric, " · ".join(filter(None, notes)))


def render(
    header: list[str], cells: list[list[str]], numeric: list[bool], caption: str = "", safe: bool = False
) -> Table:
    """A table of finished strings, numeric columns to the right. `safe` cells hold HTML already."""
    kinds = ["num" if number else "text" for number in numeric]
    head = "".join(_tag("th", name, kind, ' scope="col"') for name, kind in zip(header, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(_tag("td", cell, kind, safe=safe) for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in cells
    )
    title = f'<caption style="caption-side:bottom;text-align:left">{html.escape(caption)}</caption>' if caption else ""
    text = "\n".join("  ".join(row) for row in [header, *cells, *([[caption]] if caption else [])])
    return Table(f'<table class="dataframe">{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>', text)


def choose(frame: pd.DataFrame) -> list[str]:
    """The columns worth showing: factors that tell rows apart, then values in order of interest, at most nine."""
    factors = _telling_factors(frame)
    held = [name for name in VALUES if name in frame and frame[name].notna().any()]
    values = [name for name in held if frame[name].nunique() > 1 or name == held[0]]
    counts = [name for name in ("n_pairs", "n_tokens") if name in frame and frame[name].notna().any()]
    room = max(MAX_COLUMNS - len(factors) - len(counts[:1]), 1)
    chosen = factors + values[:room] + counts[:1]
    if "skipped" in frame and not values:
        chosen.append("skipped")
    return chosen


def _telling_factors(frame: pd.DataFrame) -> list[str]:
    """Factors in the frame's order, each kept only if it splits rows that those before it leave together."""
    names = [name for name in frame.columns if name in COLUMNS and COLUMNS[name].role == "factor"]
    kept: list[str] = []
    n_groups = 1
    for name in names:
        if name in _IN_WORDS or frame[name].isna().all():
            continue
        n_split = frame[[*kept, name]].astype(str).drop_duplicates().shape[0]
        if n_split > n_groups:
            kept, n_groups = [*kept, name], n_split
    return kept


def _cell(row: pd.Series, name: str, scale: tuple[str, float]) -> str:
    value = row[name]
    if _main(row) == name or (name in _INTERVALS and set(_INTERVALS[name]) <= set(row.index)):
        return _interval_cell(row, name, scale[1])
    if pd.isna(value):
        return _why_blank(row, name)
    return _plain_value(value, name, scale[1])


def _why_blank(row: pd.Series, name: str) -> str:
    """The reason why a skipped row has no number, at its first value; "" for every other blank."""
    skipped = row.get("skipped")
    first = next((value for value in VALUES if value in row.index), None)
    return f"not measured: {skipped}" if name == first and pd.notna(skipped) and skipped else ""


def _interval_cell(row: pd.Series, name: str, factor: float) -> str:
    low, high = (row.get(end, math.nan) for end in _INTERVALS.get(name, ("low", "high")))
    value = row[name]
    if pd.isna(value):
        return _why_blank(row, name)
    missing = pd.isna(low) or pd.isna(high)
    shown = (
        _number(value * factor, name) if missing else numbers.interval(*(float(v) * factor for v in (value, low, high)))
    )
    contended = row.get("contended")
    busy = name == _main(row) and pd.notna(contended) and bool(contended)
    return shown.replace(" ", "\u00a0") + (f", {BUSY}" if busy else "")


def _main(row: pd.Series) -> str | None:
    """The value that the row's `low` and `high` belong to."""
    return next((name for name in VALUES if name in row.index and pd.notna(row[name])), None)


def _number(value: float, name: str) -> str:
    role = COLUMNS[name].role if name in COLUMNS else ""
    if math.isinf(value):
        return numbers.plain(value)
    if value == round(value) and (role in ("factor", "quality") or abs(value) >= 1000):
        return f"{value:,.0f}".replace("-", "−")
    return f"{value:g}" if role == "factor" else numbers.plain(value)


def _scale(frame: pd.DataFrame, name: str) -> tuple[str, float]:
    """(unit, factor) that brings the column's median to a readable size."""
    unit = COLUMNS[name].unit if name in COLUMNS else ""
    if unit not in _SCALES or not _is_numeric(frame, name):
        return unit, 1.0
    typical = frame[name].abs().median()
    fitting = [step for step in _SCALES[unit] if not typical < step[2]] or [_SCALES[unit][0]]
    return fitting[-1][0], fitting[-1][1]


def _header(name: str, scale: tuple[str, float]) -> str:
    if name not in COLUMNS:
        return name.replace("_", " ")
    title = label(name).removesuffix(f" ({COLUMNS[name].unit})")
    says_so = scale[0].lower() in title.lower()  # "Tokens scored (tokens)"
    return f"{title} ({scale[0]})" if scale[0] and not says_so else title


def _constants(frame: pd.DataFrame, chosen: list[str]) -> str:
    """The factors that never change, as "model smollm2-135m · device cpu"."""
    names = [
        n for n in frame.columns if n in COLUMNS and COLUMNS[n].role == "factor" and n not in {*chosen, *_IN_WORDS}
    ]
    same = [n for n in names if len(frame) > 1 and frame[n].notna().all() and frame[n].astype(str).nunique() == 1]
    return " · ".join(f"{_header(n, ('', 1.0)).lower()} {_plain_value(frame[n].iloc[0], n)}" for n in same)


def _plain_value(value, name: str, factor: float = 1.0) -> str:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool | np.bool_)
    return _number(float(value) * factor, name) if is_number else str(value)


def _tag(tag: str, text: str, kind: str, extra: str = "", safe: bool = False) -> str:
    align = "right" if kind == "num" else "left"
    return f'<{tag} class="{kind}" style="text-align:{align}"{extra}>{text if safe else html.escape(text)}</{tag}>'


def _is_numeric(frame: pd.DataFrame, name: str) -> bool:
    return pd.api.types.is_numeric_dtype(frame[name]) and not pd.api.types.is_bool_dtype(frame[name])

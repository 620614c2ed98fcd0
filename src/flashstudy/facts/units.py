"""Unit constants and the formatters of labels and tables.

Between functions only base SI units travel (seconds, bytes, FLOP); milliseconds and gigabytes appear in text alone, and
this module writes them. GB is 1e9 bytes, GiB is 2**30.
"""

import math

KILO, MEGA, GIGA, TERA = 1e3, 1e6, 1e9, 1e12
KIB, MIB, GIB = 2**10, 2**20, 2**30

_BYTES = ((1.0, "B"), (KILO, "KB"), (MEGA, "MB"), (GIGA, "GB"), (TERA, "TB"))
_SECONDS = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
_MISSING = "n/a"


def format_bytes(n_bytes: float) -> str:
    """Three significant digits in decimal units: 1_073_741_824 is "1.07 GB"."""
    return _scaled(n_bytes, _BYTES)


def format_seconds(seconds: float) -> str:
    """Three significant digits from ns to s, minutes from 120 s on: 0.0123 is "12.3 ms", 864 is "14.4 min"."""
    if math.isfinite(seconds) and abs(seconds) >= 120:
        return f"{_digits(seconds / 60)} min"
    return _scaled(seconds, _SECONDS)


def format_ratio(ratio: float) -> str:
    """A ratio with its sign: 2.314 is "2.31×"."""
    return f"{_digits(ratio)}×" if math.isfinite(ratio) else _MISSING


def format_interval(estimate: float, low: float, high: float) -> str:
    """Estimate and interval: "2.31 [2.20, 2.40]"; an open end is -∞ or ∞, a missing number n/a."""
    return f"{_digits(estimate)} [{_digits(low)}, {_digits(high)}]"


def busy_note(contended: bool) -> str:
    """What a sentence with a timing from a busy machine ends with; "" where it was quiet."""
    return " (measured on a busy machine: inconclusive)" if contended else ""


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    if not math.isfinite(value):
        return _MISSING
    if value == 0:
        return f"0 {next(unit for factor, unit in units if factor == 1)}"
    rounded = float(f"{value:.3g}")  # before the unit is chosen, or 999.9 ms would read "1000 ms"
    factor, unit = max((u for u in units if u[0] <= abs(rounded)), default=units[0])
    return f"{_digits(value / factor)} {unit}"


def _digits(value: float) -> str:
    if math.isnan(value):
        return _MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.0f}" if 99.95 <= abs(value) < 1e6 else f"{value:#.3g}"

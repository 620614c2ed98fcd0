"""Numbers as a reader meets them: few digits, the unit beside them, an interval with the decimals its width deserves.

The three numbers of an interval share their decimals, so that "2.31 [2.20, 2.45]" lines up and does not pretend to know
more than it does. Minus is the typographic sign.
"""

import math

MISSING = "n/a"
_SUFFIX = {"ratio": "×", "fraction": "%", "min": " min", "dB": " dB", "nats": " nats", "1/step": " per step"}
_MAX_DECIMALS = 6
_SMALLEST = 10.0**-_MAX_DECIMALS


def plain(value: float | None, places: int | None = None) -> str:
    """A number with `places` decimals (default: three significant digits): 0.0456, 2.31, 1234, ∞, "n/a" if missing."""
    if is_missing(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if places is None:
        places = min(max(_places(value, 3), 0), _MAX_DECIMALS)
    tiny = 0 < abs(value) < _SMALLEST * 100 and places == _MAX_DECIMALS
    text = f"{value:.1e}" if tiny else f"{value:.{places}f}"
    return text.removeprefix("-") if float(text) == 0 else text.replace("-", "−")


def interval(estimate: float, low: float, high: float) -> str:
    """Estimate with its interval: "2.31 [2.20, 2.45]"; the estimate alone where the interval has no width."""
    if is_missing(low) or is_missing(high) or low == high:
        return plain(estimate)
    places = _interval_places(estimate, low, high)
    return f"{plain(estimate, places)} [{plain(low, places)}, {plain(high, places)}]"


def amount(value: float | None, unit: str) -> str:
    """A number in a claim's unit: "2.31×", "22.0%" for a fraction of 0.22, "14.4 min"."""
    return MISSING if is_missing(value) else f"{plain(value * scale(unit))}{suffix(unit)}"


def amount_interval(estimate: float, low: float, high: float, unit: str) -> str:
    """An estimate with its interval in a claim's unit: "2.31× [2.20, 2.45]", "22.0% [20.0, 24.0]"."""
    if is_missing(estimate):
        return MISSING
    head, _, tail = interval(*(value * scale(unit) for value in (estimate, low, high))).partition(" ")
    return f"{head}{suffix(unit)} {tail}".rstrip()


def distance(value: float, unit: str) -> str:
    """A margin in a claim's unit: "0.15" for a ratio, "4.0 points" for a fraction of 0.04, "0.50 dB"."""
    if is_missing(value) or math.isinf(value):
        return plain(value)
    text = plain(value * scale(unit), min(max(_places(value * scale(unit), 2), 0), _MAX_DECIMALS))
    return text + {"ratio": "", "fraction": " points"}.get(unit, suffix(unit))


def edge(value: float, unit: str) -> str:
    """A band's edge, which is exact: "2×", "5%", "0.5 nats"."""
    return f"{value * scale(unit):g}{suffix(unit)}".replace("-", "−")


def scale(unit: str) -> float:
    """What a value in a claim's unit is multiplied by before it is shown: 100 for a fraction, else 1."""
    return 100.0 if unit == "fraction" else 1.0


def suffix(unit: str) -> str:
    """What follows a number in a claim's unit."""
    return _SUFFIX.get(unit, "")


def is_missing(value: float | None) -> bool:
    """Whether there is no number: None or NaN."""
    return value is None or math.isnan(value)


def _places(value: float, digits: int) -> int:
    """Decimals that show `digits` significant digits of value."""
    return digits - 1 - math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0


def _interval_places(estimate: float, low: float, high: float) -> int:
    """Two significant digits of the width, or one more where the estimate needs it."""
    width = high - low
    if not math.isfinite(width):
        return min(max(_places(estimate, 3), 0), _MAX_DECIMALS)
    places = max(_places(width, 2), min(_places(estimate, 2), _places(width, 2) + 1))
    return min(max(places, 0), _MAX_DECIMALS)

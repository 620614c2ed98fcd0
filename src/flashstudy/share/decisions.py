"""One verdict: a claim's numbers against its band, with the signed margin and a reason that states them.

Per number, the 95% interval lies inside the band, outside it, or reaches across an edge (touching an edge from outside
counts as across). Several numbers are several configurations: supported if all lie inside, contradicted if all lie
outside, else inconclusive. A claim that *some* configuration does it is a search, and searching has a price: `widen`.
"""

from dataclasses import dataclass, replace
from math import inf, nan

from flashstudy.facts.claims import VERDICTS
from flashstudy.share import numbers

SUPPORTED, CONTRADICTED, INCONCLUSIVE, NOT_TESTABLE = VERDICTS
BATCHES = 12  # measure.timing builds its intervals by Student's t on about 12 batch medians

Band = tuple[float, float]
_UNDECIDED = (
    "contended",
    "unmeasured",
    "without an interval",
    "across",
    "outside",
    "inside",
)  # what a reason names first
_SEARCH_UNDECIDED = ("inside", "across", "contended", "without an interval", "unmeasured", "outside")


@dataclass(frozen=True)
class Judgement:
    """One verdict. `margin` is in the claim's unit: the distance to the nearest edge of the band, positive inside,
    negative outside, 0 where the interval (or one of several) lies on both sides of an edge, NaN where nothing was
    compared."""

    verdict: str
    reason: str
    estimate: float = nan
    low: float = nan
    high: float = nan
    margin: float = nan


@dataclass(frozen=True)
class Number:
    """One configuration's number with its 95% interval. `why` tells why there is none, or who kept the machine busy."""

    config: str
    estimate: float
    low: float
    high: float
    contended: bool = False
    why: str = ""


def decide(rows: list[Number], band: Band, unit: str = "", *, searched: bool = False) -> Judgement:
    """The verdict of a claim's numbers against a band, by the rules of this module's docstring."""
    if all(numbers.is_missing(row.estimate) for row in rows):
        return Judgement(
            NOT_TESTABLE, next((row.why for row in rows if row.why), "the study could not get this number")
        )
    placed = [(row, _place(row, band)) for row in rows]
    return _decide_search(placed, band, unit) if searched else _decide_all(placed, band, unit)


def decide_yes_or_no(rows: list[Number]) -> Judgement:
    """The verdict of a qualitative claim: estimate 1 is a sourced yes, 0 a sourced no."""
    answers = {row.estimate for row in rows}
    source = "; ".join(dict.fromkeys(text for row in rows if (text := row.why or row.config)))
    tail = f": {source}" if source else ""
    if answers == {1.0}:
        return Judgement(SUPPORTED, f"The record says yes{tail}", 1.0)
    if answers == {0.0}:
        return Judgement(CONTRADICTED, f"The record says no{tail}", 0.0)
    return Judgement(INCONCLUSIVE, f"The record does not answer with one yes or no{tail}")


def margin(low: float, high: float, band: Band) -> float:
    """Signed distance of [low, high] to the band's nearest edge: above 0 inside, below 0 outside, else 0."""
    if low >= band[0] and high <= band[1]:
        return min(low - band[0], band[1] - high)
    return min(band[1] - low, high - band[0], 0.0)


def widen(number: Number, n_configurations: int) -> Number:
    """The interval that holds for the best of n configurations: each side stretched to 1 - 0.05 / n (Bonferroni).

    The best of many is partly luck. n is the number of the claim's rows, so a study lists all that it tried, losers
    included; the stretch is that of Student's t with the degrees of freedom of timing's batches.
    """
    factor = search_factor(n_configurations)
    low = number.estimate - factor * (number.estimate - number.low)
    high = number.estimate + factor * (number.high - number.estimate)
    return replace(number, low=low, high=high)


def search_factor(n_configurations: int) -> float:
    """How much wider an interval becomes when the best of n configurations is picked: 1 for one, 1.36 for four."""
    from scipy.special import stdtrit

    return float(stdtrit(BATCHES - 1, 1 - 0.025 / n_configurations) / stdtrit(BATCHES - 1, 0.975))


def band_text(band: Band, unit: str) -> str:
    """A band in words: "the band from 1.05× up", "the band from 12% to 32%"."""
    low, high = (numbers.edge(end, unit) for end in band)
    if band[0] == -inf:
        return f"the band up to {high}"
    return f"the band from {low} up" if band[1] == inf else f"the band from {low} to {high}"


def _place(row: Number, band: Band) -> str:
    if numbers.is_missing(row.estimate):
        return "unmeasured"
    if row.contended:
        return "contended"
    if numbers.is_missing(row.low) or numbers.is_missing(row.high) or row.low > row.high:
        return "without an interval"
    if row.low >= band[0] and row.high <= band[1]:
        return "inside"
    return "outside" if row.high < band[0] or row.low > band[1] else "across"


def _decide_all(placed: list[tuple[Number, str]], band: Band, unit: str) -> Judgement:
    places = {place for _, place in placed}
    if len(places) == 1 and (side := places.pop()) in ("inside", "outside"):
        row = min((row for row, _ in placed), key=lambda row: abs(margin(row.low, row.high, band)))
        reason = _sentence(row, side, band, unit, n_rows=len(placed))
        return _judgement(SUPPORTED if side == "inside" else CONTRADICTED, row, band, reason)
    row, place = min(placed, key=lambda pair: _UNDECIDED.index(pair[1]))
    reason = _open_sentence(row, place, band, unit)
    if len(placed) > 1:
        n_inside, n_outside = (sum(other == side for _, other in placed) for side in ("inside", "outside"))
        reason += f" Of {len(placed)} configurations, {n_inside} inside and {n_outside} outside."
    return _inconclusive(row, reason, 0.0 if place in ("across", "outside") else nan)


def _decide_search(placed: list[tuple[Number, str]], band: Band, unit: str) -> Judgement:
    wide = [widen(row, len(placed)) for row, place in placed if place == "inside"]
    searched = f"widened {search_factor(len(placed)):.2f} times for the search over {len(placed)} configurations"
    if winners := [row for row in wide if _place(row, band) == "inside"]:
        best = max(winners, key=lambda row: margin(row.low, row.high, band))
        return _judgement(SUPPORTED, best, band, _sentence(best, "inside", band, unit, extra=f", {searched},"))
    if {place for _, place in placed} == {"outside"}:  # a limit on all needs no correction
        return _decide_all(placed, band, unit)
    row, place = min(placed, key=lambda pair: _SEARCH_UNDECIDED.index(pair[1]))
    if place != "inside":
        return _inconclusive(row, _open_sentence(row, place, band, unit), 0.0 if place == "across" else nan)
    row = max(wide, key=lambda row: row.estimate - row.low if band[1] == inf else row.low)
    reason = f"{_named(row, unit)}, {searched}, reaches across the edge of {band_text(band, unit)}."
    return _inconclusive(row, reason, 0.0)


def _judgement(verdict: str, row: Number, band: Band, reason: str) -> Judgement:
    return Judgement(verdict, reason, row.estimate, row.low, row.high, margin(row.low, row.high, band))


def _inconclusive(row: Number, reason: str, distance: float) -> Judgement:
    return Judgement(INCONCLUSIVE, reason, row.estimate, row.low, row.high, distance)


def _sentence(row: Number, side: str, band: Band, unit: str, *, n_rows: int = 1, extra: str = "") -> str:
    distance = numbers.distance(abs(margin(row.low, row.high, band)), unit)
    where = f"{_named(row, unit)}{extra} lies {side} {band_text(band, unit)}, {distance} from its edge."
    return f"All {n_rows} configurations lie {side}; the nearest to the edge: {where}" if n_rows > 1 else where


def _open_sentence(row: Number, place: str, band: Band, unit: str) -> str:
    because = f" ({row.why})" if row.why else ""
    match place:
        case "contended":
            return (
                f"The machine was busy while {row.config or 'this'} was timed{because}: such a timing decides nothing."
            )
        case "unmeasured":
            return f"{row.config or 'One configuration'} has no number{because}."
        case "without an interval":
            return f"{_named(row, unit)} comes without a valid interval, and a point decides nothing."
        case "across":
            return f"{_named(row, unit)} reaches across the edge of {band_text(band, unit)}."
    return f"{_named(row, unit)} lies {place} {band_text(band, unit)}."


def _named(row: Number, unit: str) -> str:
    shown = numbers.amount_interval(row.estimate, row.low, row.high, unit)
    return f"{row.config}: {shown}" if row.config else shown

"""At which length (or batch) does Flash start or stop paying? The place where a noisy ratio crosses 1, from few points.

Four points over the range tell the shape; each further one goes where it narrows the crossing most. A curve that
stays on one side is recognized early; one that dips below 1 and comes back has two crossings, and both are reported.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .curve import Draws, draw, quantiles
from .timing import Comparison

FLASH_WINS_BELOW, FLASH_WINS_ABOVE = "flash_wins_below", "flash_wins_above"
FIRST_POINTS = 4
# Enough certainty to say "never crosses" before, and after, all points are used; and to name a crossing.
SURE, SURE_AT_END = 0.975, 0.95
NARROW = 0.04  # half-width of ln n at which more points are not worth their time


@dataclass(frozen=True)
class Point:
    """One evaluation: ratio and 95% interval (nan where the ratio came as a plain number)."""

    n: int
    ratio: float
    low: float
    high: float
    contended: bool

    def row(self) -> dict:
        """The point in the columns of a result."""
        return dict(context=self.n, time_ratio=self.ratio, low=self.low, high=self.high, contended=self.contended)


@dataclass(frozen=True)
class Crossing:
    """One place where both take the same time, with its 95% interval, and the side on which Flash is faster."""

    estimate: float
    low: float
    high: float
    direction: str


@dataclass(frozen=True)
class Crossover:
    """Whether and where the ratio crosses 1. The scalar fields show the first crossing; nan and "" without one."""

    status: str
    estimate: float
    low: float
    high: float
    direction: str
    crossings: tuple[Crossing, ...]
    points: tuple[Point, ...]
    reason: str = ""


def find(
    ratio_at: Callable[[int], Comparison | float],
    start: int,
    stop: int,
    *,
    budget_s: float,
    max_points: int = 12,
    seed: int = 0,
) -> Crossover:
    """Where flash time / standard time crosses 1 between `start` and `stop`, from at most `max_points` evaluations.

    `ratio_at(n)` returns a Comparison or a plain ratio; contended ones are kept as points but not believed.
    `budget_s` is the total: no evaluation begins that would overrun it, judging by the slowest so far, once four are
    made. status: crosses, always_faster (Flash, over the whole range), always_slower or inconclusive.
    """
    _check(start, stop, budget_s, max_points)
    rng, ends, deadline = np.random.default_rng(seed), (math.log(start), math.log(stop)), time.monotonic() + budget_s
    points: list[Point] = []
    slowest_s, draws = 0.0, None
    for n in _first(start, stop):
        slowest_s = max(slowest_s, _evaluate(ratio_at, n, points))
    while True:
        draws = _draw(points, ends, rng)
        over = len(points) >= max_points or time.monotonic() + slowest_s > deadline
        if over or (draws and _settled(draws)):
            return _answer(draws, tuple(points))
        slowest_s = max(slowest_s, _evaluate(ratio_at, _next(draws, points, start, stop), points))


def _check(start: int, stop: int, budget_s: float, max_points: int) -> None:
    """ValueError with the offending values."""
    if not 1 <= start < stop:
        raise ValueError(f"the range must satisfy 1 <= start < stop, not start {start}, stop {stop}")
    if not 0 < budget_s < math.inf:
        raise ValueError(f"budget_s must be a positive number of seconds, not {budget_s}")
    if max_points < FIRST_POINTS:
        raise ValueError(f"max_points must be at least {FIRST_POINTS}, not {max_points}")


def _first(start: int, stop: int) -> list[int]:
    """Four places evenly spaced on the log axis, ends included; fewer in a very short range."""
    return sorted({round(n) for n in np.geomspace(start, stop, FIRST_POINTS)})


def _evaluate(ratio_at: Callable[[int], Comparison | float], n: int, points: list[Point]) -> float:
    """Append one evaluation; seconds it took."""
    began, value = time.monotonic(), ratio_at(n)
    if isinstance(value, Comparison):
        points.append(Point(n, value.ratio, value.low, value.high, value.contended))
    else:
        points.append(Point(n, float(value), math.nan, math.nan, contended=False))
    if not points[-1].contended and not 0 < points[-1].ratio < math.inf:
        raise ValueError(f"ratio_at({n}) must return a positive ratio, not {points[-1].ratio}")
    return time.monotonic() - began


def _draw(points: list[Point], ends: tuple[float, float], rng: np.random.Generator) -> Draws | None:
    """Curves that the believable points allow; None with fewer than three of them."""
    good = [point for point in points if not point.contended]
    if len(good) < 3:
        return None
    x, y = (np.log([getattr(point, name) for point in good]) for name in ("n", "ratio"))
    widths = [math.log(point.high / point.low) if 0 < point.low <= point.high < math.inf else 0.0 for point in good]
    return draw(x, y, np.array(widths) / (2 * 1.96), ends, rng)


def _shares(draws: Draws) -> dict[str, float]:
    """Probability of each answer: never crosses (below or above 1), crosses once, twice or more."""
    counts = np.array([len(roots) for roots in draws.roots()])
    below = draws.curves[:, 0] < 0
    return {
        "always_faster": float(((counts == 0) & below).mean()),
        "always_slower": float(((counts == 0) & ~below).mean()),
        "once": float((counts == 1).mean()),
        "twice": float((counts >= 2).mean()),
    }


def _settled(draws: Draws) -> bool:
    """Whether further points would not change the answer enough to be worth their time."""
    shares = _shares(draws)
    if max(shares["always_faster"], shares["always_slower"]) >= SURE:
        return True
    crossings = _crossings(draws, shares)
    surely = max(shares["once"], shares["twice"]) >= SURE
    return surely and all(math.log(found.high / found.low) / 2 < NARROW for found in crossings)


def _next(draws: Draws | None, points: list[Point], start: int, stop: int) -> int:
    """Where to evaluate next: where the crossing gains most, never twice at the same place."""
    used = {point.n for point in points}
    grid = draws.grid if draws else np.linspace(math.log(start), math.log(stop), 33)
    taken = np.array([round(math.exp(place)) in used for place in grid])
    if taken.all():
        return max(used, key=lambda n: -sum(point.n == n for point in points))
    if draws is None:  # mostly contended so far: the free place farthest from every point
        distance = np.abs(grid[:, None] - np.log([point.n for point in points])).min(axis=1)
        return round(math.exp(grid[int(np.argmax(np.where(taken, -1.0, distance)))]))
    roots = np.concatenate(draws.roots())
    if len(roots) == 0:
        roots = draws.grid[[int(np.argmin(np.abs(draws.curves).min(axis=0)))]]
    return round(math.exp(draws.most_informative(roots, taken)))


def _crossings(draws: Draws, shares: dict[str, float]) -> tuple[Crossing, ...]:
    """The crossings of the more probable number, one or two, each from the curves that have that many."""
    twice = shares["twice"] > shares["once"]
    chosen = [(curve, roots) for curve, roots in zip(draws.curves, draws.roots(), strict=True) if len(roots)]
    chosen = [(curve, roots) for curve, roots in chosen if (len(roots) >= 2) == twice]
    if not chosen:
        return ()
    rising = np.mean([curve[0] < 0 for curve, _ in chosen]) > 0.5
    places = [np.array([roots[0] for _, roots in chosen])]
    if twice:
        places.append(np.array([roots[1] for _, roots in chosen]))
    directions = (FLASH_WINS_BELOW, FLASH_WINS_ABOVE) if rising else (FLASH_WINS_ABOVE, FLASH_WINS_BELOW)
    return tuple(Crossing(*quantiles(found), direction) for found, direction in zip(places, directions, strict=False))


def _answer(draws: Draws | None, points: tuple[Point, ...]) -> Crossover:
    """The answer that the points allow, "inconclusive" with the reason otherwise."""
    if draws is None:
        busy = sum(point.contended for point in points)
        return _no_crossing("inconclusive", points, f"{busy} of {len(points)} points were measured on a busy machine")
    shares = _shares(draws)
    for status in ("always_faster", "always_slower"):
        if shares[status] >= SURE_AT_END:
            return _no_crossing(status, points)
    if shares["once"] + shares["twice"] < SURE_AT_END:
        likely = shares["once"] + shares["twice"]
        return _no_crossing("inconclusive", points, f"a crossing within the range has probability {likely:.2f}")
    crossings = _crossings(draws, shares)
    first = crossings[0]
    return Crossover("crosses", first.estimate, first.low, first.high, first.direction, crossings, points)


def _no_crossing(status: str, points: tuple[Point, ...], reason: str = "") -> Crossover:
    return Crossover(status, math.nan, math.nan, math.nan, "", (), points, reason)

"""Interval of a paired log ratio whose successive values are correlated, and tests on a series of times.

Successive pairs on a shared machine are not independent: a slow tenth of a second is slow for many pairs. The pairs
are cut, in the order they were taken, into about a dozen batches; the batches' medians are nearly independent and
nearly normal, so Student's t on them keeps its promise. Where the correlation outlives a batch, fewer batches are
used and the rest of it widens the interval.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

MOST_BATCHES, FEWEST_BATCHES = 12, 5
# Correlation between batches may raise the variance of their mean by this factor before fewer, longer batches are
# taken.
TOLERATED_INFLATION = 1.3
STRONGEST_CORRELATION = 0.98


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95% interval, in the unit of the samples."""

    estimate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval's length."""
        return (self.high - self.low) / 2


def correlated_interval(samples: np.ndarray) -> Interval:
    """95% interval of the center of samples [n] taken one after the other; infinite with fewer than two."""
    n = len(samples)
    if n < 2:
        return Interval(float(samples[0]) if n else math.nan, -math.inf, math.inf)
    first, persistence = correlation(samples)
    n_batches = min(MOST_BATCHES, n)
    while n_batches > FEWEST_BATCHES and inflation(n, n_batches, first, persistence) > TOLERATED_INFLATION:
        n_batches -= 1
    medians = batch_medians(samples, n_batches)
    inflated = max(1.0, inflation(n, n_batches, first, persistence))
    # Correlated batches also look more alike than they are: their sample variance is low by this factor.
    shrunk = max(0.25, 1 - (inflated - 1) / (n_batches - 1)) if n_batches > 2 else 1.0
    error = medians.std(ddof=1) * math.sqrt(inflated / shrunk / n_batches)
    center, half = float(medians.mean()), float(special.stdtrit(n_batches - 1, 0.975) * error)
    return Interval(center, center - half, center + half)


def batch_medians(samples: np.ndarray, n_batches: int) -> np.ndarray:
    """Medians of `n_batches` consecutive, nearly equal pieces of samples [n]."""
    return np.array([np.median(piece) for piece in np.array_split(np.asarray(samples, dtype=float), n_batches)])


def correlation(samples: np.ndarray, caution: float = 0.8) -> tuple[float, float]:
    """(r, p): neighbors correlate with r, values k apart with r·p^(k − 1). Outliers are clipped, negative values are 0.

    `caution` standard errors (1/√n each) are added to r, because a short series hides its correlation.
    """
    clipped = _clip(np.asarray(samples, dtype=float))
    n, power = len(clipped), float((clipped**2).sum())
    if power == 0 or n < 4:
        return 0.0, 0.0
    lags = [float((clipped[k:] * clipped[:-k]).sum()) / power for k in (1, 2, 3)]
    one, two, three = (value + 3 * max(value, 0.0) / n for value in lags)  # the sample mean hides about this much
    neighbors = min(max(0.0, one + caution / math.sqrt(n)), STRONGEST_CORRELATION)
    persistence = neighbors
    if neighbors > 1.5 / math.sqrt(n) and two > 0:
        persistence = min(STRONGEST_CORRELATION, max(neighbors, (two + three) / (max(one, 0.0) + two)))
    return neighbors, persistence


def _clip(samples: np.ndarray) -> np.ndarray:
    """Deviations from the median, cut at three robust standard deviations, mean removed."""
    deviations = samples - np.median(samples)
    bound = 3 * 1.4826 * np.median(np.abs(deviations))
    clipped = np.clip(deviations, -bound, bound) if bound > 0 else deviations
    return clipped - clipped.mean()


def inflation(n: int, n_batches: int, neighbors: float, persistence: float) -> float:
    """Variance of the mean of n correlated samples, over what independent batches of the same variance would give."""
    length = n // n_batches
    return (_variance_of_sum(n, neighbors, persistence) / n) / (
        _variance_of_sum(length, neighbors, persistence) / length
    )


def _variance_of_sum(n: int, neighbors: float, persistence: float) -> float:
    """Variance of the sum of n unit-variance samples that correlate as in `correlation`."""
    lags = np.arange(1, n)
    return float(n + 2 * ((n - lags) * neighbors * persistence ** (lags - 1.0)).sum())


def pairs_needed(samples: np.ndarray, half_width: float) -> float:
    """Samples that a series like this pilot [n] needs for the half-width; infinite where neighbors clearly correlate.

    Deciding once, from the pilot, keeps the coverage; looking again and again until the interval is narrow does not.
    Source: C. Stein, "A two-sample test for a linear hypothesis whose power is independent of the variance", 1945.
    """
    n = len(samples)
    if correlation(samples, caution=0.0)[0] > 1.5 / math.sqrt(n):
        return math.inf
    return n * (correlated_interval(samples).half_width / half_width) ** 2


def still_falling(times_s: np.ndarray) -> bool:
    """Whether times [n] fall by more than 1% and more surely than chance: Mann and Kendall's trend test at 5%."""
    times_s = np.asarray(times_s, dtype=float)
    n = len(times_s)
    score = float(np.sign(np.subtract.outer(times_s, times_s))[np.tril_indices(n, -1)].sum())
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    drop = 1 - np.median(times_s[n // 2 :]) / np.median(times_s[: n // 2])
    return bool((score + 1) / deviation < -1.645 and drop > 0.01)


def drift(times_s: np.ndarray) -> float:
    """How far the medians of four consecutive quarters lie apart (largest / smallest - 1), less what scatter explains.

    Taken off are three standard errors of the difference of two such medians; 0 with fewer than 12 times.
    """
    times_s = np.asarray(times_s, dtype=float)
    if len(times_s) < 12:
        return 0.0
    quarters = batch_medians(times_s, 4)
    within = np.concatenate([piece - np.median(piece) for piece in np.array_split(times_s, 4)])
    deviation = 1.4826 * np.median(np.abs(within))
    error = 1.2533 * deviation / math.sqrt(len(times_s) / 4) * math.sqrt(2)  # of a median, of a difference of two
    return max(0.0, float((quarters.max() - 3 * error) / quarters.min() - 1))


def waiting_quantum_s(
    times_s: np.ndarray, quanta_s: tuple[float, ...] = (10e-3, 8e-3, 4e-3, 3e-3, 2e-3, 1e-3)
) -> float:
    """The scheduler's quantum, if the times [n] above their floor come in its multiples, else 0.

    Of at least 8 late blocks (30% of all), 80% lie within a tenth of a multiple, where chance puts a fifth (binomial
    test at 0.1%). Finds waits that no account shows, as on macOS or when the host takes the whole core.
    """
    if len(times_s) == 0:
        return 0.0
    excess = np.asarray(times_s, dtype=float) - np.percentile(times_s, 10)
    late = excess[excess > min(quanta_s) / 2]
    if len(late) < max(8, 0.3 * len(excess)):
        return 0.0
    for quantum_s in quanta_s:
        steps = late / quantum_s
        near = int(((np.abs(steps - np.round(steps)) < 0.1) & (steps > 0.5)).sum())
        if near >= 0.8 * len(late) and special.bdtrc(near - 1, len(late), 0.2) < 1e-3:
            return quantum_s
    return 0.0

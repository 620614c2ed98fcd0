"""A smooth curve through few noisy points, and where it may cross zero: a small Gaussian process on a log axis.

The curve is a straight line in ln n (a power law) plus a bend; how strong the bend and how large the noise is, is
learned from the points. Drawing curves from what the points allow answers every question at once: how probable a
crossing is, where, and where to look next.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np

# What ratio curves look like, in ln ratio over ln n: level, slope, and bends over a factor of about ten.
LEVEL, SLOPE, BEND_LENGTH = 1.0, 0.5, 2.3
# Strengths of the bend: none to speak of, a rate that saturates, a dip; and how often each is expected.
BENDS = {0.1: 0.45, 0.3: 0.35, 1.0: 0.2}
# Noise of one point, relative: about 5%, anything from 1% to 20% is believed when the points say so.
NOISES = np.geomspace(0.005, 0.3, 15)
TYPICAL_NOISE, NOISE_SPREAD = 0.05, 0.5
N_GRID, N_DRAWS = 65, 400


@dataclass(frozen=True)
class Draws:
    """Curves [n_draws, n_grid] of ln ratio over the grid [n_grid] of ln n, and what to choose the next point by."""

    grid: np.ndarray
    curves: np.ndarray
    covariance: np.ndarray  # [n_grid, n_grid], at the most probable bend and noise
    noise: float

    def roots(self) -> list[np.ndarray]:
        """ln n of the sign changes of each curve, ascending, by linear interpolation."""
        changes = np.diff(np.sign(self.curves), axis=1) != 0
        left, right = self.curves[:, :-1], self.curves[:, 1:]
        step = self.grid[1] - self.grid[0]
        places = self.grid[:-1] + step * left / np.where(changes, left - right, 1.0)
        return [row[change] for row, change in zip(places, changes, strict=True)]

    def most_informative(self, roots: np.ndarray, forbidden: np.ndarray) -> float:
        """ln n at which one more point narrows the curve most where it may cross, outside the forbidden grid places."""
        at = np.clip(np.searchsorted(self.grid, roots), 0, len(self.grid) - 1)
        gain = (self.covariance[:, at] ** 2).mean(axis=1) / (np.diag(self.covariance) + self.noise**2)
        return float(self.grid[int(np.argmax(np.where(forbidden, -1.0, gain)))])


def draw(
    x: np.ndarray, y: np.ndarray, known_noise: np.ndarray, ends: tuple[float, float], rng: np.random.Generator
) -> Draws:
    """Curves that fit the points (ln n, ln ratio), whose own standard errors are `known_noise` (0 where unknown)."""
    grid, middle = np.linspace(*ends, N_GRID), sum(ends) / 2
    # A point's own error covers what varied while it was measured; what varies between measurements is learned.
    typical = TYPICAL_NOISE if not known_noise.any() else TYPICAL_NOISE / 2
    cases = list(itertools.product(BENDS, NOISES))
    covariances = [_prior(x, x, middle, bend) + np.diag(known_noise**2 + noise**2) for bend, noise in cases]
    weights = _weights(cases, [_log_likelihood(covariance, y) for covariance in covariances], typical)
    posteriors = {}
    for case, n_draws in enumerate(rng.multinomial(N_DRAWS, weights)):
        if n_draws:
            bend = cases[case][0]
            prior = _prior(grid, x, middle, bend), _prior(grid, grid, middle, bend)
            posteriors[case] = (n_draws, *_condition(covariances[case], *prior, y))
    curves = [mean + _root(spread) @ rng.standard_normal((N_GRID, n)) for n, mean, spread in posteriors.values()]
    best = max(posteriors, key=lambda case: weights[case])
    noise = math.sqrt(float((known_noise**2).mean()) + cases[best][1] ** 2)
    return Draws(grid, np.hstack(curves).T, posteriors[best][2], noise)


def _prior(a: np.ndarray, b: np.ndarray, middle: float, bend: float) -> np.ndarray:
    """Covariance [len(a), len(b)] of the curve before any point is seen."""
    line = LEVEL**2 + SLOPE**2 * np.outer(a - middle, b - middle)
    return line + bend**2 * np.exp(-0.5 * (np.subtract.outer(a, b) / BEND_LENGTH) ** 2)


def _log_likelihood(covariance: np.ndarray, y: np.ndarray) -> float:
    """ln probability of the values y under a Gaussian of mean 0, up to a constant."""
    return float(-0.5 * (y @ np.linalg.solve(covariance, y) + np.linalg.slogdet(covariance)[1]))


def _weights(cases: list[tuple[float, float]], log_likelihoods: list[float], typical: float) -> np.ndarray:
    """Probability of each (bend, noise)."""
    bends, noises = np.array(cases).T
    expected = np.log([BENDS[bend] for bend in bends]) - 0.5 * (np.log(noises / typical) / NOISE_SPREAD) ** 2
    log_weights = np.array(log_likelihoods) + expected
    weights = np.exp(log_weights - log_weights.max())
    return weights / weights.sum()


def _condition(points: np.ndarray, cross: np.ndarray, full: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean [n_grid, 1] and covariance [n_grid, n_grid] of the curve given the points."""
    gain = np.linalg.solve(points, cross.T).T
    return (gain @ y)[:, None], full - gain @ cross.T


def _root(covariance: np.ndarray) -> np.ndarray:
    """A matrix whose product with its transpose is the covariance, small negative eigenvalues put to 0."""
    values, vectors = np.linalg.eigh(covariance)
    return vectors * np.sqrt(np.clip(values, 0.0, None))


def quantiles(log_places: np.ndarray) -> tuple[float, float, float]:
    """Median and 95% interval of places given as ln n, in n."""
    low, middle, high = np.quantile(log_places, (0.025, 0.5, 0.975))
    return math.exp(middle), math.exp(low), math.exp(high)

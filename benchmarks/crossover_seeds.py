"""The crossover finder on synthetic curves with 5% noise: accuracy, coverage, evaluations, statuses.

    python benchmarks/crossover_seeds.py --trials 200

To reach: within 15% in at least 90% of 200 seeds with at most 12 evaluations, interval covering 90-99%; always_faster
and always_slower recognized in at most 6; two crossings reported as such.
"""

import argparse
import functools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from flashstudy.measure.crossover import Crossover, find

START, STOP = 128, 16_384
Curve = Callable[[float], float]


def main() -> None:
    """One line a family of curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--noise", type=float, default=0.05)
    options = parser.parse_args()
    for name, family in {"power law": power_law, "saturating": saturating, "bent": bent}.items():
        print(f"{name:<22} {one_crossing(family, options.trials, options.noise)}", flush=True)
    for status, family in {"always_faster": below, "always_slower": above}.items():
        print(f"{status:<22} {never(family, status, options.trials, options.noise)}", flush=True)
    for name, sign in {"dip below 1": 1, "hump above 1": -1}.items():
        print(f"{name:<22} {two_crossings(sign, options.trials, options.noise)}", flush=True)


def run(curve: Curve, rng: np.random.Generator, noise: float) -> tuple[Crossover, int]:
    """The finder's answer and the evaluations it took."""
    answer = find(lambda n: curve(n) * math.exp(noise * rng.standard_normal()), START, STOP, budget_s=60)
    return answer, len(answer.points)


def power_law(rng: np.random.Generator) -> tuple[float, Curve]:
    """(n / crossing) ** slope, slope 0.15-0.5 in size, crossing at 300-8,000."""
    slope = rng.uniform(0.15, 0.5) * rng.choice([-1, 1])
    crossing = math.exp(rng.uniform(math.log(300), math.log(8000)))
    return crossing, lambda n: (n / crossing) ** slope


def saturating(rng: np.random.Generator) -> tuple[float, Curve]:
    """Two costs with a constant and a linear part each, as weights and cache are; same slope at the crossing."""
    while True:
        fixed, growing = rng.uniform(0.3, 3, 2), np.exp(rng.uniform(math.log(1e-5), math.log(1e-2), 2))
        crossing = (fixed[1] - fixed[0]) / (growing[0] - growing[1])
        if not 300 < crossing < 8000:
            continue
        slope = crossing * (growing[0] - growing[1]) / (fixed[0] + growing[0] * crossing)
        if 0.15 <= abs(slope) <= 0.5:
            return crossing, functools.partial(_costs_ratio, fixed, growing)


def bent(rng: np.random.Generator) -> tuple[float, Curve]:
    """A power law whose slope changes over the range but keeps its sign."""
    while True:
        slope, bend = rng.uniform(0.15, 0.5) * rng.choice([-1, 1]), rng.uniform(-0.05, 0.05)
        crossing = math.exp(rng.uniform(math.log(300), math.log(8000)))
        ends = [slope + 2 * bend * math.log(n / crossing) for n in (START, STOP)]
        if min(end * slope for end in ends) > 0:
            return crossing, functools.partial(_bent_ratio, crossing, slope, bend)


def _costs_ratio(fixed: np.ndarray, growing: np.ndarray, n: float) -> float:
    return (fixed[0] + growing[0] * n) / (fixed[1] + growing[1] * n)


def _bent_ratio(crossing: float, slope: float, bend: float, n: float) -> float:
    return math.exp(slope * math.log(n / crossing) + bend * math.log(n / crossing) ** 2)


def _parabola(middle: float, half: float, depth: float, n: float) -> float:
    return math.exp(depth * (((math.log(n) - middle) / half) ** 2 - 1))


def below(rng: np.random.Generator) -> Curve:
    """A power law between 0.4 and 0.85 at its ends: Flash is always faster."""
    start, stop = rng.uniform(0.4, 0.85, 2)
    return lambda n: start * (stop / start) ** (math.log(n / START) / math.log(STOP / START))


def above(rng: np.random.Generator) -> Curve:
    """The reciprocal of `below`."""
    curve = below(rng)
    return lambda n: 1 / curve(n)


def one_crossing(family: Callable, trials: int, noise: float) -> str:
    """Accuracy and coverage over seeds."""
    within = covered = most = 0
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        crossing, curve = family(rng)
        answer, n_points = run(curve, rng, noise)
        within += abs(answer.estimate / crossing - 1) <= 0.15
        covered += answer.low <= crossing <= answer.high
        most = max(most, n_points)
    return f"within 15% {within / trials:.1%}, interval covers {covered / trials:.1%}, at most {most} evaluations"


def never(family: Callable, status: str, trials: int, noise: float) -> str:
    """How often the status is right, and with how many evaluations."""
    answers = []
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        answers.append(run(family(rng), rng, noise))
    right = sum(answer.status == status and n_points <= 6 for answer, n_points in answers)
    statuses = dict(Counter(answer.status for answer, _ in answers))
    return f"recognized in at most 6 evaluations {right / trials:.1%}, statuses {statuses}"


def two_crossings(sign: int, trials: int, noise: float) -> str:
    """How often both crossings are reported, and how far off they are."""
    both = within = 0
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        first = rng.uniform(math.log(300), math.log(1500))
        second = rng.uniform(first + 1.2, math.log(8000))
        middle, half, depth = (first + second) / 2, (second - first) / 2, rng.uniform(0.15, 0.4)
        answer, _ = run(functools.partial(_parabola, middle, half, sign * depth), rng, noise)
        both += len(answer.crossings) == 2
        places = [math.log(found.estimate) for found in answer.crossings]
        within += len(places) == 2 and max(abs(places[0] - first), abs(places[1] - second)) <= math.log(1.2)
    return f"both reported {both / trials:.1%}, both within 20% {within / trials:.1%}"


if __name__ == "__main__":
    main()

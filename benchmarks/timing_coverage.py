"""Coverage of a known ratio under injected, autocorrelated noise, on a synthetic clock: the load does not matter.

    python benchmarks/timing_coverage.py --trials 400

To reach: 92-99% of 400 trials.
"""

import argparse
import itertools
import math
import statistics

from synthetic import SyntheticClock, stopwatch

from flashstudy.measure.timing import compare

RATIO, STANDARD_S = 0.55, 3.5e-3


def main() -> None:
    """One line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--budget-s", type=float, default=1.0)
    parser.add_argument("--ratio", type=float, nargs="*", default=[RATIO, 1.0])
    parser.add_argument("--noise", type=float, nargs="*", default=[0.01, 0.03, 0.08], help="deviation of one call")
    parser.add_argument(
        "--correlation", type=float, nargs="*", default=[0.0, 0.5, 0.8, 0.9], help="of one side's calls"
    )
    options = parser.parse_args()
    for ratio, noise, correlation in itertools.product(options.ratio, options.noise, options.correlation):
        print(f"ratio {ratio:4.2f}  {line(ratio, noise, correlation, options.trials, options.budget_s)}", flush=True)


def line(ratio: float, noise: float, correlation: float, trials: int, budget_s: float) -> str:
    """Coverage, median half-width and median pairs of one case."""
    answers = [one(ratio, noise, correlation, seed, budget_s) for seed in range(trials)]
    covered = sum(answer.low <= ratio <= answer.high for answer in answers) / trials
    half = statistics.median(math.log(answer.high / answer.low) / 2 for answer in answers)
    pairs = statistics.median(answer.n_pairs for answer in answers)
    refused = sum(answer.contended for answer in answers)
    within = "ok" if 0.92 <= covered <= 0.99 else "OUTSIDE 92-99%"
    return (
        f"noise {noise:5.1%} correlation {correlation:.1f}: covered {covered:6.1%} {within}, "
        f"half-width {half:5.2%}, pairs {pairs:.0f}, contended {refused}"
    )


def one(ratio: float, noise: float, correlation: float, seed: int, budget_s: float):
    """One synthetic comparison with a known ratio."""
    clock = SyntheticClock(seed)
    standard = clock.function(STANDARD_S, noise=noise, correlation=correlation)
    flash = clock.function(STANDARD_S * ratio, noise=noise, correlation=correlation)
    return compare(standard, flash, budget_s=budget_s, n_threads=1, seed=seed, stopwatch=stopwatch(clock))


if __name__ == "__main__":
    main()

"""Identical functions: how often the interval contains 1, and how wide it is, beside 0, 1 and 2 busy processes.

    python benchmarks/timing_aa.py --trials 400

To reach: at least 92.5% of the trials that are not contended contain 1, half-width at most 3%.
"""

import argparse
import math
import statistics

from pair import busy_processes, standard_and_flash

from flashstudy.measure.timing import compare


def main() -> None:
    """One summary line a number of busy processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--budget-s", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--busy", type=int, nargs="*", default=[0, 1, 2])
    options = parser.parse_args()
    standard, flash = standard_and_flash()
    for n_busy in options.busy:
        with busy_processes(n_busy, longest_s=4 * options.budget_s * options.trials + 60):
            answers = [
                compare(function, function, budget_s=options.budget_s, n_threads=options.threads)
                for trial in range(options.trials)
                for function in [(standard, flash)[trial % 2]]
            ]
        kept = [answer for answer in answers if not answer.contended]
        halves = sorted(math.log(answer.high / answer.low) / 2 for answer in kept) or [math.nan]
        covered = sum(answer.low <= 1 <= answer.high for answer in kept)
        print(
            f"busy {n_busy}: contains 1 in {covered}/{len(kept)} ({covered / max(1, len(kept)):.1%}), contended "
            f"{len(answers) - len(kept)}, half-width median {statistics.median(halves):.2%} "
            f"90% {halves[int(0.9 * (len(halves) - 1))]:.2%} largest {halves[-1]:.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()

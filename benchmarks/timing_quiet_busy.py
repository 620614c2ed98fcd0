"""The pair beside 0, 1 and 2 busy processes, against its quiet ratio measured before and after in the same process.

    python benchmarks/timing_quiet_busy.py --trials 20                # one thread
    python benchmarks/timing_quiet_busy.py --trials 20 --threads 2    # two threads: quiet reference of 20 s, one busy

To reach on 2 quiet cores. One thread: at least 95% within 5% or contended; not flagged in 90% of the trials beside 0
or 1 busy processes, 50% beside 2. Two threads: 95% flagged beside one; when quiet, 90% of the intervals cover the
reference.
The error of torch.utils.benchmark (two medians, one after the other, the same seconds) is printed beside it.
"""

import argparse
import statistics

from pair import busy_processes, standard_and_flash, torch_benchmark_ratio

from flashstudy.measure.timing import Comparison, compare


def main() -> None:
    """One line a trial, one summary a number of busy processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--budget-s", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--busy", type=int, nargs="*", help="numbers of busy processes (default 0 1 2; 0 1 with two threads)"
    )
    parser.add_argument(
        "--reference-s", type=float, help="seconds a side of a quiet reference (default 2, with two threads 20)"
    )
    options = parser.parse_args()
    options.reference_s = options.reference_s or (2.0 if options.threads == 1 else 20.0)
    pair = standard_and_flash()
    compare(*pair, budget_s=0.5, n_threads=options.threads)
    for n_busy in options.busy or ([0, 1, 2] if options.threads == 1 else [0, 1]):
        one_load(pair, n_busy, options)


def one_load(pair: tuple, n_busy: int, options: argparse.Namespace) -> None:
    """The trials beside `n_busy` processes."""
    long_reference = None
    if options.threads > 1:
        long_reference = quiet_reference(pair, options)
        print(f"two-thread reference {describe(long_reference)}", flush=True)
    answers, errors, peer_errors = [], [], []
    for _ in range(options.trials):
        before = None if long_reference else quiet_reference(pair, options)
        with busy_processes(n_busy):
            answer = compare(*pair, budget_s=options.budget_s, n_threads=options.threads)
            peer = torch_benchmark_ratio(*pair, options.budget_s, options.threads)
        references = [long_reference] if long_reference else [before, quiet_reference(pair, options)]
        truth = statistics.geometric_mean(reference.ratio for reference in references)
        answers.append((answer, truth))
        errors.append(answer.ratio / truth - 1)
        peer_errors.append(peer / truth - 1)
        not_quiet = any(reference.contended for reference in references)
        noisy = " (reference contended: the machine was not quiet)" if not_quiet else ""
        quiet = " ".join(f"{reference.ratio:.4f}" for reference in references)
        print(
            f"  busy {n_busy}: quiet {quiet}  {describe(answer)}  error {errors[-1]:+.1%}"
            f"  torch.utils.benchmark {peer:.4f} error {peer_errors[-1]:+.1%}{noisy}",
            flush=True,
        )
    summarize(n_busy, answers, errors, peer_errors)


def quiet_reference(pair: tuple, options: argparse.Namespace) -> Comparison:
    """The pair with nothing beside it, for the whole of its seconds."""
    return compare(*pair, budget_s=options.reference_s, n_threads=options.threads, precision=1e-6)


def summarize(
    n_busy: int, answers: list[tuple[Comparison, float]], errors: list[float], peer_errors: list[float]
) -> None:
    """Shares that the figures ask for."""
    n = len(answers)
    flagged = sum(answer.contended for answer, _ in answers)
    right = sum(answer.contended or abs(error) <= 0.05 for (answer, _), error in zip(answers, errors, strict=True))
    covered = sum(answer.low <= truth <= answer.high for answer, truth in answers)
    peer_right = sum(abs(error) <= 0.05 for error in peer_errors)
    print(
        f"busy {n_busy}: within 5% or contended {right}/{n}, contended {flagged}/{n}, interval covers {covered}/{n}, "
        f"median |error| {statistics.median(map(abs, errors)):.1%}; torch.utils.benchmark within 5% {peer_right}/{n}, "
        f"errors {min(peer_errors):+.0%} to {max(peer_errors):+.0%}",
        flush=True,
    )


def describe(answer: Comparison) -> str:
    """Ratio, interval, pairs and the flag."""
    flag = f" CONTENDED ({answer.reason})" if answer.contended else ""
    interval = f"[{answer.low:.4f}, {answer.high:.4f}]"
    return f"ratio {answer.ratio:.4f} {interval} {answer.n_pairs}/{answer.n_rounds} pairs{flag}"


if __name__ == "__main__":
    main()

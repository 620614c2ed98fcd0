"""Seconds inside the timed functions over seconds inside `compare`, counted by the functions themselves.

    python benchmarks/duty_cycle.py --trials 5

To reach: at least 0.85.
"""

import argparse
import time
from collections.abc import Callable

import torch
from pair import standard_and_flash

from flashstudy.measure.timing import compare


def main() -> None:
    """One line a pair: the streamed pair, and shorter and longer functions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=1.0)
    options = parser.parse_args()
    small, large = torch.randn(64, 64), torch.randn(1024, 1024)
    pairs = {
        "bf16 and int8 linear, 4096²": standard_and_flash(),
        "matmul 64² (microseconds)": (lambda: small @ small, lambda: small @ small),
        "matmul 1024² (tens of ms)": (lambda: large @ large, lambda: large @ large),
    }
    for name, (standard, flash) in pairs.items():
        shares = [duty_cycle(standard, flash, options.budget_s) for _ in range(options.trials)]
        print(f"{name:<30} duty cycle {min(shares):.3f} to {max(shares):.3f}", flush=True)


def duty_cycle(standard: Callable, flash: Callable, budget_s: float) -> float:
    """Share of the wall time of one `compare` that was spent in the two functions."""
    inside_s = 0.0

    def counted(function: Callable) -> Callable:
        def call() -> object:
            nonlocal inside_s
            start = time.perf_counter()
            result = function()
            inside_s += time.perf_counter() - start
            return result

        return call

    start = time.perf_counter()
    compare(counted(standard), counted(flash), budget_s=budget_s, n_threads=1)
    return inside_s / (time.perf_counter() - start)


if __name__ == "__main__":
    main()

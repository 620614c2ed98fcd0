"""Draws docs/timing.svg: the same pair beside busy processes, timed one after the other and in interleaved pairs.

    python benchmarks/timing_picture.py --trials 12

Takes about 15 s a trial and load. Start it on a quiet machine: the reference is taken before the busy processes start.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from pair import busy_processes, standard_and_flash, torch_benchmark_ratio

from flashstudy.measure.timing import Comparison, compare

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "timing.svg"
BUSY = (0, 1, 2)
CLEAR, REFUSED, PEER = "#0173b2", "#949494", "#de8f05"  # seaborn's colorblind palette


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--budget-s", type=float, default=0.5)
    parser.add_argument("--output", type=Path, default=PICTURE)
    options = parser.parse_args()
    pair = standard_and_flash()
    quiet = compare(*pair, budget_s=3.0, n_threads=1)
    print(f"quiet ratio {quiet.ratio:.4f}{' CONTENDED: ' + quiet.reason if quiet.contended else ''}", flush=True)
    measured = {n_busy: beside(pair, n_busy, options.trials, options.budget_s) for n_busy in BUSY}
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True, layout="constrained")
    sequential({n_busy: [peer for peer, _ in rows] for n_busy, rows in measured.items()}, axes[0])
    interleaved({n_busy: [answer for _, answer in rows] for n_busy, rows in measured.items()}, axes[1])
    for ax in axes:
        frame(ax, quiet.ratio, options.trials)
    axes[0].set_ylabel("INT8 time / bf16 time")
    figure.savefig(options.output, metadata={"Date": None})
    print(f"wrote {options.output}")


def beside(pair: tuple, n_busy: int, trials: int, budget_s: float) -> list[tuple[float, Comparison]]:
    """Both answers, trial after trial."""
    rows = []
    with busy_processes(n_busy):
        for _ in range(trials):
            peer = torch_benchmark_ratio(*pair, budget_s, 1)
            rows.append((peer, compare(*pair, budget_s=budget_s, n_threads=1)))
            answer = rows[-1][1]
            flag = f" contended: {answer.reason}" if answer.contended else ""
            print(f"  busy {n_busy}: one after the other {peer:.3f}, pairs {answer.ratio:.3f}{flag}", flush=True)
    return rows


def sequential(ratios: dict[int, list[float]], ax: Axes) -> Axes:
    """Ratios of two medians, a dot each."""
    for place, values in enumerate(ratios.values()):
        ax.plot([place * len(values) + i for i in range(len(values))], values, "o", color=PEER, markersize=4)
    ax.set_title("one after the other (torch.utils.benchmark)", fontsize=10)
    return ax


def interleaved(answers: dict[int, list[Comparison]], ax: Axes) -> Axes:
    """Paired ratios with 95% intervals; contended ones grey and hollow."""
    for place, row in enumerate(answers.values()):
        for i, answer in enumerate(row):
            spread = [[answer.ratio - answer.low], [answer.high - answer.ratio]]
            color = REFUSED if answer.contended else CLEAR
            face = "none" if answer.contended else color
            style = dict(fmt="o", color=color, markerfacecolor=face, markersize=4, elinewidth=1)
            ax.errorbar([place * len(row) + i], [answer.ratio], yerr=spread, **style)
    ax.set_title("interleaved pairs (hollow: answered contended)", fontsize=10)
    return ax


def frame(ax: Axes, truth: float, trials: int) -> None:
    """The quiet ratio with 5% to either side, and the three loads."""
    ax.axhspan(0.95 * truth, 1.05 * truth, color="#dddddd", zorder=0)
    ax.axhline(truth, color="grey", linestyle="--", linewidth=1)
    ax.annotate("quiet ratio ± 5%", (0, 1.06 * truth), fontsize=8, color="grey")
    for place in range(1, len(BUSY)):
        ax.axvline(place * trials - 0.5, color="#cccccc", linewidth=1)
    ax.set_xticks([(place + 0.5) * trials - 0.5 for place in range(len(BUSY))], [f"{n} busy" for n in BUSY])
    ax.tick_params(axis="x", length=0)


if __name__ == "__main__":
    main()

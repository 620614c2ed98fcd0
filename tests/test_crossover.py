"""The crossover finder on synthetic curves: known crossings with noise, statuses, refusals."""

import math
import time

import numpy as np
import pytest

from flashstudy.measure import curve
from flashstudy.measure.crossover import find
from flashstudy.measure.timing import Comparison

START, STOP = 128, 16_384


def noisy(function, seed, noise=0.05):
    rng = np.random.default_rng(seed)
    return lambda n: function(n) * math.exp(noise * rng.standard_normal())


def comparison(ratio, relative=0.02, contended=False):
    width = math.exp(1.96 * relative)
    return Comparison(ratio, ratio / width, ratio * width, 20, 1.0, ratio, contended, "busy" if contended else "", 1)


def power_laws(n):
    rng = np.random.default_rng(0)
    for seed in range(n):
        slope = rng.uniform(0.15, 0.5) * rng.choice([-1, 1])
        crossing = math.exp(rng.uniform(math.log(300), math.log(8000)))
        yield crossing, slope, find(noisy(lambda n, c=crossing, s=slope: (n / c) ** s, seed), START, STOP, budget_s=60)


def test_noisy_power_laws_cross_where_they_should_with_an_honest_interval():
    found = list(power_laws(40))
    assert np.mean([abs(answer.estimate / crossing - 1) <= 0.15 for crossing, _, answer in found]) >= 0.9
    assert 0.86 <= np.mean([answer.low <= crossing <= answer.high for crossing, _, answer in found]) <= 1.0
    assert max(len(answer.points) for _, _, answer in found) <= 12
    for _, slope, answer in found:
        assert answer.status == "crosses" and len(answer.crossings) == 1
        assert answer.direction == ("flash_wins_below" if slope > 0 else "flash_wins_above")


def test_crossing_of_a_clean_curve_is_exact_and_cheap():
    answer = find(lambda n: (n / 1000) ** 0.5, START, STOP, budget_s=60)
    assert answer.estimate == pytest.approx(1000, rel=0.02)
    assert answer.low < 1000 < answer.high < 1.1 * answer.low
    assert len(answer.points) < 12


def test_points_are_placed_near_the_crossing_and_never_twice():
    answer = find(noisy(lambda n: (n / 2000) ** 0.3, 3), START, STOP, budget_s=60)
    places = [point.n for point in answer.points]
    assert len(set(places)) == len(places) == 12
    later = np.log(np.array(places[4:]) / 2000)
    assert np.abs(later).max() < math.log(STOP / START) / 2
    assert abs(later.mean()) < 1.0


@pytest.mark.parametrize(("level", "status"), [(0.7, "always_faster"), (1.4, "always_slower")])
def test_curves_that_never_cross_are_recognized_in_six(level, status):
    for seed in range(10):
        answer = find(noisy(lambda n: level * (n / 1000) ** 0.05, seed), START, STOP, budget_s=60)
        assert answer.status == status
        assert len(answer.points) <= 6
        assert answer.crossings == () and answer.direction == "" and math.isnan(answer.estimate)


def test_a_dip_below_one_has_two_crossings():
    places = (500, 4000)
    middle, half = sum(map(math.log, places)) / 2, math.log(places[1] / places[0]) / 2
    for seed in range(5):
        dip = noisy(lambda n: math.exp(0.3 * (((math.log(n) - middle) / half) ** 2 - 1)), seed)
        answer = find(dip, START, STOP, budget_s=60)
        assert [found.direction for found in answer.crossings] == ["flash_wins_above", "flash_wins_below"]
        assert [found.estimate for found in answer.crossings] == pytest.approx(places, rel=0.2)
        assert (answer.estimate, answer.direction) == (answer.crossings[0].estimate, "flash_wins_above")


def test_a_ratio_of_one_everywhere_is_inconclusive():
    answer = find(noisy(lambda n: 1.0, 1), START, STOP, budget_s=60)
    assert answer.status == "inconclusive" or answer.high / answer.low > 3


def test_comparisons_are_believed_as_far_as_their_intervals():
    def spread(relative):
        ratio_at = noisy(lambda n: (n / 1000) ** 0.3, 7, noise=relative)
        answer = find(lambda n: comparison(ratio_at(n), relative), START, STOP, budget_s=60)
        assert answer.low < 1000 < answer.high
        assert answer.points[0].low < answer.points[0].ratio < answer.points[0].high
        return math.log(answer.high / answer.low)

    assert spread(0.1) > 2 * spread(0.02)


def test_contended_points_are_kept_but_not_believed():
    rng = np.random.default_rng(0)

    def ratio_at(n):
        busy = rng.random() < 0.3
        return comparison((n / 1000) ** 0.4 * (5.0 if busy else 1.0), contended=busy)

    answer = find(ratio_at, START, STOP, budget_s=60)
    assert answer.estimate == pytest.approx(1000, rel=0.1)
    assert 0 < sum(point.contended for point in answer.points) < 12


def test_only_contended_points_are_inconclusive_and_say_why():
    answer = find(lambda n: comparison(0.5, contended=True), START, STOP, budget_s=60)
    assert answer.status == "inconclusive"
    assert answer.reason == "12 of 12 points were measured on a busy machine"


def test_budget_is_the_total():
    def slow(n):
        time.sleep(0.05)
        return (n / 1000) ** 0.2 * math.exp(0.05 * math.sin(n))

    began = time.monotonic()
    answer = find(slow, START, STOP, budget_s=0.3)
    assert 4 <= len(answer.points) <= 6
    assert time.monotonic() - began < 2.0


def test_short_integer_ranges_work():
    answer = find(lambda n: 0.5 * n, 1, 4, budget_s=60)
    assert answer.status == "crosses" and answer.estimate == pytest.approx(2, rel=0.15)
    assert {point.n for point in answer.points} <= {1, 2, 3, 4}


def test_learned_noise_follows_the_planted_one():
    rng = np.random.default_rng(0)
    x = np.linspace(math.log(START), math.log(STOP), 30)
    ends = (x[0], x[-1])
    found = [
        curve.draw(x, 0.3 * (x - x.mean()) + noise * rng.standard_normal(30), np.zeros(30), ends, rng).noise
        for noise in (0.01, 0.1)
    ]
    assert found == pytest.approx([0.01, 0.1], rel=0.5)


def test_roots_lie_where_a_straight_line_crosses():
    grid = np.linspace(0.0, 1.0, 5)
    draws = curve.Draws(grid, np.array([grid - 0.3, 0.6 - grid, grid + 1.0]), np.eye(5), 0.05)
    assert [list(roots) for roots in draws.roots()] == [pytest.approx([0.3]), pytest.approx([0.6]), []]


@pytest.mark.parametrize(
    ("start", "stop", "options", "message"),
    [
        (0, 10, {}, "start 0, stop 10"),
        (10, 10, {}, "1 <= start < stop"),
        (1, 10, {"budget_s": 0}, "budget_s must be a positive"),
        (1, 10, {"max_points": 3}, "max_points must be at least 4, not 3"),
    ],
)
def test_bad_ranges_are_refused_with_their_values(start, stop, options, message):
    with pytest.raises(ValueError, match=message):
        find(lambda n: 1.0, start, stop, **{"budget_s": 1.0} | options)


def test_a_ratio_that_is_no_ratio_is_refused():
    with pytest.raises(ValueError, match=r"ratio_at\(128\) must return a positive ratio, not 0.0"):
        find(lambda n: 0.0, START, STOP, budget_s=1.0)

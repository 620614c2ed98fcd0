"""The timer on a synthetic clock: known ratios, planted disturbances, refusals. The machine's load does not matter."""

import gc
import math

import numpy as np
import pytest
import torch

from flashstudy.measure import backends, contention, process, selection, statistics, timing, trial
from flashstudy.measure import blocks as blocks_module
from flashstudy.measure.backends import Backend
from flashstudy.measure.blocks import Block, Stopwatch
from flashstudy.measure.contention import Disturbance, Reading, Watch
from flashstudy.measure.timing import compare, compare_many


class World(Watch):
    """A clock that moves when a function made from it is called, and accounts that show what is planted."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.now_s = self.idle_s = self.delay_s = 0.0
        self.faults = 0
        self.calls: list[str] = []
        self.rng = np.random.default_rng(seed)

    def __call__(self) -> float:
        return self.now_s

    def refresh(self) -> None:
        """No threads to look for."""

    def read(self) -> Reading:
        return Reading(self.now_s - self.idle_s, {1: self.delay_s}, 0, 0, self.faults)

    def function(self, call_s, *, noise=0.0, correlation=0.0, name="", before=None):
        """Takes `call_s` × exp(AR(1) noise), and the seconds from `before()` that the thread waits for its core."""
        state = self.rng.standard_normal()

        def call():
            nonlocal state
            state = correlation * state + math.sqrt(1 - correlation**2) * self.rng.standard_normal()
            waited_s = before() if before else 0.0
            self.now_s += call_s * math.exp(noise * state) + waited_s
            self.idle_s += waited_s
            self.delay_s += waited_s
            self.calls.append(name)

        return call

    def stopwatch(self, **options) -> Stopwatch:
        return Stopwatch(clock=self, watch=self, **options)

    def compare(self, standard, flash, **options):
        return compare(standard, flash, **{"n_threads": 1, "seed": 0, "stopwatch": self.stopwatch()} | options)


def ar1(rng, n, correlation, deviation):
    values = [rng.standard_normal()]
    for _ in range(n - 1):
        values.append(correlation * values[-1] + math.sqrt(1 - correlation**2) * rng.standard_normal())
    return deviation * np.array(values)


def coverage(true_ratio, trials, **noise):
    answers = []
    for seed in range(trials):
        world = World(seed)
        standard, flash = (world.function(call_s, **noise) for call_s in (6e-3, 6e-3 * true_ratio))
        answers.append(world.compare(standard, flash, budget_s=0.6))
    assert not any(answer.contended for answer in answers)
    return sum(answer.low <= true_ratio <= answer.high for answer in answers) / trials


def test_without_noise_the_ratio_is_exact():
    world = World()
    answer = world.compare(world.function(4e-3), world.function(1e-3))
    assert answer.ratio == pytest.approx(0.25, rel=1e-9)
    assert (answer.low, answer.high) == pytest.approx((0.25, 0.25), rel=1e-9)
    assert (answer.standard_s, answer.flash_s) == pytest.approx((4e-3, 1e-3), rel=1e-9)
    assert not answer.contended and answer.reason == ""


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_known_ratio_under_autocorrelated_noise_is_covered(correlation):
    assert 0.92 <= coverage(0.55, 75, noise=0.03, correlation=correlation) <= 0.99


def test_identical_functions_have_an_interval_around_one():
    assert coverage(1.0, 75, noise=0.03, correlation=0.5) >= 0.925


@pytest.mark.parametrize(("n", "correlation"), [(60, 0.0), (60, 0.5), (120, 0.8), (300, 0.9)])
def test_interval_keeps_its_promise_for_correlated_samples(n, correlation):
    rng = np.random.default_rng(5)
    intervals = [statistics.correlated_interval(ar1(rng, n, correlation, 0.03)) for _ in range(400)]
    assert 0.92 <= np.mean([interval.low <= 0 <= interval.high for interval in intervals]) <= 0.99


def test_interval_of_two_hand_computed_samples():
    # mean 1, standard error 1 (deviation √2 / √2), t(0.975, 1) = 12.706
    assert statistics.correlated_interval(np.array([0.0, 2.0])).half_width == pytest.approx(12.706, rel=1e-3)


def test_correlation_recovers_the_planted_one():
    neighbors, persistence = statistics.correlation(ar1(np.random.default_rng(0), 20_000, 0.7, 1.0), caution=0.0)
    assert neighbors == pytest.approx(0.7, abs=0.02)
    assert persistence == pytest.approx(0.7, abs=0.02)


def test_pilot_asks_for_four_times_the_pairs_for_half_the_width():
    samples = np.random.default_rng(1).normal(0, 0.02, 60)
    width = statistics.correlated_interval(samples).half_width
    assert statistics.pairs_needed(samples, width / 2) == pytest.approx(4 * 60)
    assert statistics.pairs_needed(ar1(np.random.default_rng(1), 60, 0.9, 0.02), width) == math.inf


def test_quiet_pair_stops_early_and_a_noisy_one_uses_its_budget():
    quiet, noisy = World(1), World(1)
    early = quiet.compare(quiet.function(1e-3, noise=0.01), quiet.function(1e-3, noise=0.01), budget_s=2.0)
    late = noisy.compare(noisy.function(1e-3, noise=0.2), noisy.function(1e-3, noise=0.2), budget_s=2.0)
    assert early.wall_s < 0.6 * 4.0
    assert late.wall_s > 0.95 * 4.0
    assert math.log(early.high / early.low) / 2 < 0.01


def test_slow_side_still_gets_its_pairs_when_the_budget_is_overrun():
    world = World()
    answer = world.compare(world.function(10.0, noise=0.01), world.function(0.1, noise=0.01), budget_s=0.5)
    assert answer.n_pairs == 5
    assert world.now_s > 50.0
    assert answer.low < 0.01 < answer.high


def test_order_within_a_pair_is_random():
    world = World()
    world.compare(world.function(2e-3, noise=0.05, name="a"), world.function(2e-3, noise=0.05, name="b"))
    pairs = ["".join(world.calls[i : i + 2]) for i in range(4, len(world.calls) - 1, 2)]
    assert 0.35 < pairs.count("ab") / len(pairs) < 0.65
    assert set(pairs[20:]) == {"ab", "ba"}


def test_slow_first_calls_do_not_count():
    world = World()
    extra = iter(3.0 * 0.8 ** np.arange(25))  # a cache that fills over 25 calls

    def warming():
        world.now_s += 2e-3 * (1 + next(extra, 0.0))

    answer = world.compare(world.function(4e-3), warming, budget_s=0.5)
    assert answer.ratio == pytest.approx(0.5, rel=2e-3)


def test_falling_times_are_not_yet_stationary():
    assert statistics.still_falling(np.array([8.0, 5.0, 4.0, 3.0, 2.5, 2.2, 2.0, 1.9]))
    assert not statistics.still_falling(np.array([2.0, 2.1, 1.9, 2.0, 2.05, 1.95, 2.0, 2.1]))
    assert not statistics.still_falling(np.array([1.9, 2.0, 2.2, 2.5, 3.0, 4.0, 5.0, 8.0]))


def test_disturbed_pairs_are_left_out_of_the_ratio():
    world = World()
    waits = lambda: 4e-3 * (world.rng.random() < 0.3)  # noqa: E731
    answer = world.compare(world.function(4e-3, before=waits), world.function(2e-3, before=waits))
    assert answer.ratio == pytest.approx(0.5, rel=1e-6)
    assert 0.2 < answer.n_pairs / answer.n_rounds < 0.7
    assert not answer.contended


def test_pairs_that_all_waited_for_their_core_are_answered_contended():
    world = World()
    answer = world.compare(world.function(4e-3, before=lambda: 4e-3), world.function(2e-3))
    assert answer.contended
    assert answer.n_pairs == 0
    assert contention.WAITED in answer.reason


def test_block_just_after_a_wait_is_not_settled():
    world = World()
    stopwatch, function = world.stopwatch(), world.function(2e-3)
    assert [stopwatch.block(function, 1).settled for _ in range(3)] == [False, True, True]
    world.delay_s += 4e-3  # between two blocks
    after_the_wait = stopwatch.block(function, 1)
    assert after_the_wait.clean and not after_the_wait.settled
    assert stopwatch.block(function, 1).settled


def test_pairs_on_a_settled_thread_are_preferred():
    world = World()
    world.cold_s = 0.0

    def returns_cold():  # the thread lost its core between two blocks: the next call is not late, but slow
        if world.rng.random() < 0.3:
            world.delay_s += 4e-3
            world.cold_s = 0.5e-3

    def function(call_s):
        def call():
            world.now_s += call_s + world.cold_s
            world.cold_s = 0.0

        return call

    stopwatch = world.stopwatch()
    block = stopwatch.block
    stopwatch.block = lambda *arguments: (returns_cold(), block(*arguments))[1]
    answer = world.compare(function(4e-3), function(2e-3), stopwatch=stopwatch)
    assert answer.ratio == pytest.approx(0.5, rel=1e-6)
    assert answer.n_pairs < 0.7 * answer.n_rounds


def pair_rounds(*kinds, ratio=0.5):
    """Rounds of standard and flash by kind: s settled, c just after a wait (flash 3% slow), d flash disturbed."""
    blocks = {
        "s": (Block(4.0, 4.0), Block(4.0 * ratio, 2.0)),
        "c": (Block(4.0, 4.0, settled=False), Block(4.12 * ratio, 2.0, settled=False)),
        "d": (Block(4.0, 4.0, settled=False), Block(9.0 * ratio, 2.0, contention.WAITED, settled=False)),
    }
    return [dict(zip(("standard", "flash"), blocks[kind], strict=True)) for kind in "".join(kinds)]


def test_enough_settled_pairs_give_the_ratio_alone():
    pairs = selection.choose(pair_rounds("s" * 20, "c" * 20), "flash", "standard", 5)
    assert len(pairs) == 20 and pairs.allowance == 0.0
    assert math.exp(pairs.interval.estimate) == pytest.approx(0.5)


def test_pairs_just_after_a_wait_stand_in_with_a_wider_interval():
    pairs = selection.choose(pair_rounds("s" * 2, "c" * 20), "flash", "standard", 5)
    assert len(pairs) == 22
    assert pairs.interval.low <= math.log(0.5) + 0.03 - selection.COLD_START
    assert pairs.interval.half_width >= selection.COLD_START


def test_blocks_that_seldom_fit_between_two_waits_are_not_used():
    rounds = pair_rounds("s" * 2, "c" * 10, "d" * 10)
    assert not selection.fits(rounds, "flash") and selection.fits(rounds, "standard")
    assert len(selection.choose(rounds, "flash", "standard", 5)) == 2


def test_a_crowded_thread_gives_way_before_a_block_and_a_calm_one_does_not(monkeypatch):
    yields = []
    monkeypatch.setattr("os.sched_yield", lambda: yields.append(1), raising=False)
    world = World()
    stopwatch, function = world.stopwatch(), world.function(2e-3)
    for _ in range(5):
        stopwatch.block(function, 1)
    assert yields == []
    stopwatch.block(world.function(2e-3, before=lambda: 4e-3), 1)
    for _ in range(50):
        stopwatch.block(function, 1)
    assert len(yields) == blocks_module.CROWDED_BLOCKS


def test_two_threads_that_wait_are_replaced_by_one_and_the_answer_says_so(monkeypatch):
    monkeypatch.setattr(timing, "default_threads", lambda: min(2, len(process.usable_cpus())))

    def run(n_threads):
        world, options = World(), {}
        stopwatch = world.stopwatch()
        waits = lambda: 8e-3 * (stopwatch.n_threads > 1 and world.rng.random() < 0.5)  # noqa: E731
        functions = [world.function(call_s, before=waits) for call_s in (4e-3, 2e-3)]
        return compare(*functions, budget_s=0.5, n_threads=n_threads, seed=0, stopwatch=stopwatch, **options)

    torch.set_num_threads(2)
    insisted, free = run(2), run(None)
    torch.set_num_threads(1)
    assert insisted.contended and insisted.n_threads == 1
    assert "2 threads" in insisted.reason
    if len(process.usable_cpus()) > 1:
        assert not free.contended and free.n_threads == 1
        assert free.ratio == pytest.approx(0.5, rel=1e-6)
        assert "2 threads" in free.reason


def test_a_tenth_of_the_time_waiting_is_too_much_for_two_threads_only():
    def run(n_threads):
        world = World()
        waits = lambda: 40e-3 * (world.rng.random() < 0.01)  # noqa: E731
        return world.compare(
            world.function(4e-3, before=waits), world.function(4e-3, before=waits), n_threads=n_threads, budget_s=2.0
        )

    assert run(2).contended and "with 2 threads a thread waited for its core" in run(2).reason
    assert not run(1).contended


def test_block_reasons():
    calm = dict(cpu_s=1e-3, run_delay_s=0.0, knows_delay=True, involuntary=0, voluntary=0, faults=0)
    assert Disturbance(**calm).reason(1e-3, n_threads=1) == ""
    assert Disturbance(**calm | {"run_delay_s": 50e-6}).reason(1e-3, n_threads=1) == contention.WAITED
    assert Disturbance(**calm | {"run_delay_s": 50e-6}).reason(10e-3, n_threads=4) == ""
    pushed = calm | {"cpu_s": 0.8e-3, "involuntary": 1}
    assert Disturbance(**pushed).reason(1e-3, n_threads=1) == contention.PUSHED_OFF
    assert Disturbance(**pushed).reason(1e-3, n_threads=2) == ""
    slept = calm | {"cpu_s": 0.1e-3, "voluntary": 1}
    assert Disturbance(**slept).reason(1e-3, n_threads=1) == ""
    unknown = calm | {"cpu_s": 0.8e-3, "knows_delay": False}
    assert Disturbance(**unknown).reason(1e-3, n_threads=1) == contention.PUSHED_OFF


def test_run_delay_of_the_worst_thread_counts_and_a_new_thread_starts_at_zero():
    before = Reading(0.0, {1: 5.0, 2: 1.0}, 0, 0, 0)
    after = Reading(0.0, {1: 5.1, 2: 1.4, 3: 9.0}, 0, 0, 0)
    assert contention.between(before, after).run_delay_s == pytest.approx(0.4)


def test_pressure_is_read_in_seconds(tmp_path):
    (tmp_path / "cpu").write_text("some avg10=1.60 avg60=0.98 avg300=0.32 total=5751698\nfull avg10=0.00 total=0\n")
    assert contention.pressure_s(tmp_path / "cpu") == pytest.approx(5.751698)
    assert contention.pressure_s(tmp_path / "absent") == 0.0


def test_waits_in_multiples_of_a_quantum_are_recognized():
    rng = np.random.default_rng(0)
    calm = 3e-3 + rng.normal(0, 20e-6, 60)
    waiting = calm + 8e-3 * rng.integers(0, 3, 60)
    assert statistics.waiting_quantum_s(waiting) == 8e-3
    assert statistics.waiting_quantum_s(calm) == 0.0
    assert statistics.waiting_quantum_s(3e-3 + rng.exponential(5e-3, 60)) == 0.0
    assert statistics.waiting_quantum_s(3e-3 + 0.8e-3 * rng.integers(0, 2, 60)) == 0.0


def test_unexplained_waits_in_multiples_of_a_quantum_are_refused():
    world = World()

    def late():
        world.now_s += 3e-3 + 4e-3 * world.rng.integers(0, 3)

    answer = world.compare(world.function(3e-3), late)
    assert answer.contended and "steps of 4 ms" in answer.reason


def test_standard_that_slows_down_meanwhile_is_refused():
    world = World()

    def slowing():
        world.now_s += 2e-3 * (1 + world.now_s)

    answer = world.compare(slowing, world.function(2e-3, noise=0.1))
    assert answer.contended and "'standard' changed" in answer.reason


def test_block_that_touches_new_memory_is_left_out():
    world = World()

    def growing():
        grows = world.rng.random() < 0.3
        world.faults += 10_000 * grows
        world.now_s += 2e-3 + 5e-3 * grows

    answer = world.compare(world.function(4e-3), growing)
    assert answer.ratio == pytest.approx(0.5, rel=1e-6)
    assert answer.n_pairs < 0.85 * answer.n_rounds


def test_queued_work_is_waited_for():
    world, queued = World(), []

    def wait():
        world.now_s += 0.05 * len(queued)
        queued.clear()

    backend = Backend("stand-in", wait, runs_on_host=False)
    answer = world.compare(
        lambda: queued.append(1), lambda: queued.extend([1, 1]), stopwatch=world.stopwatch(backend=backend)
    )
    assert answer.standard_s >= 0.05
    assert answer.ratio == pytest.approx(2.0, rel=1e-6)


def test_blocks_are_a_hundred_clock_steps_long():
    ticks = iter(np.arange(0, 1, 50e-6))
    coarse = Stopwatch(clock=lambda: next(ticks), watch=World())
    assert coarse.calls_per_block(1e-6) >= 100 * 50e-6 / 1e-6
    assert World().stopwatch().calls_per_block(10e-6) == pytest.approx(100, rel=0.01)
    assert World().stopwatch().calls_per_block(1.0) == 1


def test_several_alternatives_share_the_rounds():
    world = World()
    functions = {name: world.function(call_s) for name, call_s in {"a": 2e-3, "b": 1e-3, "c": 6e-3}.items()}
    answers = compare_many(functions, "a", n_threads=1, budget_s=0.3, stopwatch=world.stopwatch())
    assert {name: answer.ratio for name, answer in answers.items()} == pytest.approx({"a": 1.0, "b": 0.5, "c": 3.0})
    assert (answers["a"].low, answers["a"].high) == (1.0, 1.0)
    assert answers["b"].flash_s / answers["c"].flash_s == pytest.approx(1 / 6)


def test_process_state_is_restored_even_after_an_error():
    torch.set_num_threads(1)
    denormal = torch.tensor([1e-40])
    seen = []

    def fails():
        seen.append((torch.get_num_threads(), gc.isenabled(), (denormal * 1).item()))
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        compare(fails, fails, n_threads=2)
    assert seen == [(2, False, 0.0)]
    assert torch.get_num_threads() == 1 and gc.isenabled()
    assert (denormal * 1).item() != 0.0


def test_host_is_timed_without_waiting_and_results_are_searched_for_tensors():
    assert backends.for_results([torch.ones(1), {"logits": [torch.ones(1)]}]) is backends.HOST
    nested = {"a": [(torch.ones(1), torch.ones(2))]}
    assert len(list(backends._tensors(nested, depth=4))) == 2
    if torch.accelerator.current_accelerator() is None:
        with pytest.raises(RuntimeError, match="no accelerator"):
            backends.accelerator()


def test_real_functions_give_an_ordered_interval():
    values = torch.randn(256, 256)
    answer = compare(lambda: values @ values, lambda: values.relu(), budget_s=0.05, n_threads=1)
    assert 0 < answer.low <= answer.ratio <= answer.high < math.inf
    assert 0.5 < answer.timed_s / answer.wall_s <= 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_s": 0.0}, "budget_s must be a positive"),
        ({"budget_s": math.inf}, "budget_s must be a positive"),
        ({"n_threads": 0}, "n_threads must be at least 1, not 0"),
        ({"min_pairs": 1}, "min_pairs must be at least 2"),
    ],
)
def test_bad_options_are_refused_with_their_value(options, message):
    with pytest.raises(ValueError, match=message):
        compare(lambda: None, lambda: None, **options)


def test_unknown_reference_is_refused():
    with pytest.raises(ValueError, match="reference 'c' is not among"):
        compare_many({"a": lambda: None, "b": lambda: None}, "c")
    with pytest.raises(ValueError, match="at least two functions"):
        compare_many({"a": lambda: None}, "a")


def test_drift_is_told_from_scatter():
    generator = np.random.default_rng(0)
    steady = [np.exp(0.3 * generator.standard_normal(20)) for _ in range(300)]
    flagged = [statistics.drift(times) > trial.MOST_DRIFT for times in steady]
    assert sum(flagged) <= 15  # 20 scattered times of one speed: 5% at most
    moved = np.exp(0.05 * generator.standard_normal(40)) * np.where(np.arange(40) < 20, 1.0, 1.6)
    assert 0.4 < statistics.drift(moved) <= 0.7
    assert statistics.drift(np.ones(11)) == 0 == statistics.drift(np.ones(400))

"""Stages on a synthetic clock: what each takes, what goes from one to the next, and what does not count."""

import weakref

import pytest

from flashstudy.measure import stages
from flashstudy.measure.stages import Staged
from tests.test_timing import World

TOTALS = {"ready": ("load", "convert")}


class Weights:
    """Something that can be watched being let go."""


def staged(world, load_s, convert_s=None, **options):
    own = {"load": lambda _: world.function(load_s, name="load")() or "codes"}
    if convert_s is not None:
        own["convert"] = lambda held: world.function(convert_s, name=f"convert {held}")() or "floats"
    return Staged(own, **options)


def measure(world, alternatives, **options):
    return stages.measure(
        alternatives,
        **dict(totals=TOTALS, n_rounds=4, n_threads=1, seed=0, stopwatch=world.stopwatch()) | options,
    )


def test_a_total_is_the_sum_of_its_stages_and_each_can_be_compared():
    world = World()
    rounds = measure(world, {"plain": staged(world, 2.0), "packed": staged(world, 1.0, 5.0)})
    ready = rounds.compare(("packed", "ready"), ("plain", "ready"))
    assert (ready.ratio, ready.low, ready.high) == pytest.approx((3.0, 3.0, 3.0))
    assert (ready.flash_s, ready.standard_s) == pytest.approx((6.0, 2.0))
    assert rounds.compare(("packed", "convert"), ("packed", "load")).ratio == pytest.approx(5.0)
    itself = rounds.compare(("plain", "ready"), ("plain", "ready"))
    assert (itself.ratio, itself.low, itself.flash_s) == pytest.approx((1.0, 1.0, 2.0)) and not itself.contended


def test_stages_run_in_order_and_get_what_the_one_before_returned():
    world = World()
    measure(world, {"packed": staged(world, 1.0, 1.0), "same": staged(world, 1.0, 1.0)})
    assert world.calls == ["load", "convert codes"] * 2 * (4 + 1)  # four rounds and the one before the clock starts


def test_what_prepares_a_load_takes_no_time():
    world = World()

    def slow():
        world.now_s += 100.0

    rounds = measure(world, {"plain": staged(world, 2.0, prepare=slow), "packed": staged(world, 1.0)})
    assert rounds.compare(("packed", "ready"), ("plain", "ready")).standard_s == pytest.approx(2.0)


def test_what_was_loaded_is_gone_before_the_next_load():
    world = World()
    alive = []

    def load(_):
        assert not any(one() for one in alive)
        weights = Weights()
        weights.circle = weights  # reference counting alone would keep it
        alive.append(weakref.ref(weights))
        return weights

    measure(world, {"one": Staged({"load": load}), "other": Staged({"load": load})})
    assert len(alive) == 10


def test_a_disturbed_third_does_not_spoil_a_comparison_of_two():
    world = World()
    late = Staged({"load": lambda _: world.function(1.0, before=lambda: 1.0)()})
    rounds = measure(world, {"plain": staged(world, 2.0), "packed": staged(world, 1.0), "late": late})
    assert not rounds.compare(("packed", "ready"), ("plain", "ready")).contended
    assert rounds.compare(("late", "ready"), ("plain", "ready")).contended
    assert len(rounds.trial.rounds) == 5  # a quarter as many again were tried


@pytest.mark.parametrize(
    "alternatives, options, message",
    [
        (["plain"], {}, "at least two alternatives, not \\['plain'\\]"),
        (["plain", "packed"], {"n_rounds": 1}, "n_rounds must be at least 2 for an interval, not 1"),
        (["plain", "packed"], {"totals": {"load": ("load",)}}, "stage 'load', which is also the name of a total"),
        (["plain", "packed"], {"totals": {"ready": ("convert",)}}, "no stage of the total 'ready': convert"),
    ],
)
def test_what_gives_no_comparison_is_refused(alternatives, options, message):
    world = World()
    with pytest.raises(ValueError, match=message):
        measure(world, {name: staged(world, 1.0) for name in alternatives}, **options)

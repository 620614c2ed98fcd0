"""Why a decode step takes as long as it does: a rule over measured shares, which names each cause with its share.

The step's time is cut into reading, kernels beyond reading, and what lies between kernels. Reading is cut further by
the bits that need not be read, kernels by the share of weights that are unpacked at every call and by arithmetic at the
machine's own rate. What none of them explains is the remainder: it is told, and is a cause only when nothing else is.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from flashstudy.measure.statistics import Interval

REMAINDER = "remainder"
# A smaller cause is not worth a change: the same times differed by 11% within two minutes on a quiet shared machine.
WORTH = 0.15


@dataclass(frozen=True)
class Symptoms:
    """What the rule goes by. read, kernels, outside: shares of the step that sum to 1.

    stored_bits, read_bits: of a multiplied weight on disk and as read. weight_share: weights' share of the bytes read.
    unpacked: share of the multiplied weights whose kernel unpacks them at every call. arithmetic: the products' FLOP at
    the machine's rate, as a share of the step. outside_name: what `outside` holds, in words.
    """

    read: Interval
    kernels: Interval
    outside: Interval
    stored_bits: float
    read_bits: float
    weight_share: float
    unpacked: float
    arithmetic: float
    dtype: str
    outside_name: str = "Python, small operations and library between the kernels"
    problem: str = ""


@dataclass(frozen=True)
class Cause:
    """One cause and the share of the step that it takes."""

    name: str
    share: Interval
    text: str


def causes(symptoms: Symptoms) -> list[Cause]:
    """Every cause with a share above 0, the largest first."""
    found = [cause for cause in _each(symptoms) if cause.share.estimate > 0]
    return sorted(found, key=lambda cause: -cause.share.estimate)


def likely(symptoms: Symptoms) -> Cause:
    """The cause with the largest share; the remainder, or "nothing", where no cause is worth a change."""
    worthy = [cause for cause in causes(symptoms) if cause.share.estimate >= WORTH]
    worthy.sort(key=lambda cause: cause.name == REMAINDER)
    if worthy:
        return worthy[0]
    return Cause("nothing", symptoms.read, "nothing wrong: most of the step is reading what is stored")


def is_conclusive(symptoms: Symptoms) -> bool:
    """Was the machine quiet, and is the likely cause the largest for sure: no other one's interval reaches its own?"""
    first = likely(symptoms)
    others = [cause for cause in causes(symptoms) if cause.name not in (first.name, REMAINDER)]
    if first.name == "nothing":
        return not symptoms.problem and all(cause.share.low < WORTH for cause in others)
    return not symptoms.problem and all(cause.share.high < first.share.low for cause in others)


def _each(found: Symptoms) -> Iterator[Cause]:
    spare_bits = max(0.0, 1 - found.stored_bits / found.read_bits)
    yield Cause(
        "extra_bits",
        _scaled(found.read, found.weight_share * spare_bits),
        f"reads {found.read_bits:.1f} bits a weight where {found.stored_bits:.1f} are stored",
    )
    yield Cause(
        "unpacking",
        _scaled(found.kernels, found.unpacked),
        f"kernels unpack {found.unpacked:.0%} of the weights at every call",
    )
    arithmetic = _arithmetic_share(found)
    yield Cause(
        "arithmetic",
        _scaled(found.kernels, arithmetic),
        f"bound by arithmetic: products in {found.dtype} take longer than reading their weights",
    )
    yield Cause(
        REMAINDER,
        _scaled(found.kernels, 1 - found.unpacked - arithmetic),
        "kernels take longer than plain reading, why is not told apart",
    )
    yield Cause("overhead", found.outside, found.outside_name)


def _arithmetic_share(found: Symptoms) -> float:
    """Share of the kernels' time beyond reading that arithmetic explains, unpacking aside."""
    beyond = max(0.0, found.arithmetic - found.read.estimate)
    if not beyond or found.kernels.estimate <= 0:
        return 0.0
    return min(beyond / found.kernels.estimate, 1.0) * (1 - found.unpacked)


def _scaled(interval: Interval, factor: float) -> Interval:
    return Interval(interval.estimate * factor, interval.low * factor, interval.high * factor)

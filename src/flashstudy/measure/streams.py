"""What share of the memory's speed each kernel reaches: kernels and plain readers timed in the same rounds.

The ceiling is the fastest reader of those rounds, be it a plain one or a kernel: nothing can then exceed it, and the
machine's mood of the minute is the same for all. Only weights that rotate beyond the cache count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flashstudy.compress.linear import CompressedLinear

from . import rotation, timing


@dataclass(frozen=True)
class Share:
    """Bytes read per second over the ceiling's (MBU), 95% interval."""

    estimate: float
    low: float
    high: float
    contended: bool


@dataclass(frozen=True)
class Streams:
    """The rounds, the bytes that one call of each kernel and reader reads at least, the fastest of them, the dense one.

    What is contended against the dense product or the ceiling is contended for both, so that a page does not differ.
    """

    rounds: timing.Rounds
    read_bytes: dict[str, int]
    ceiling: str
    dense: str

    def row(self, name: str) -> dict[str, Any]:
        """The bytes and the MBU of one kernel, and the ceiling, in the columns of a result."""
        share = self.share(name)
        ceiling_bytes_per_s = self.read_bytes[self.ceiling] / self.rounds.median_s(self.ceiling)
        return dict(
            read_bytes=self.read_bytes[name], mbu=share.estimate, mbu_low=share.low, mbu_high=share.high,
            ceiling=self.ceiling, ceiling_bytes_per_s=ceiling_bytes_per_s,
        )  # fmt: skip

    def share(self, name: str) -> Share:
        """MBU of one kernel, from its time paired with the ceiling's."""
        found = self.rounds.against(self.ceiling)[name]
        relative = self.read_bytes[name] / self.read_bytes[self.ceiling]
        estimate, low, high = (relative / ratio for ratio in (found.ratio, found.high, found.low))
        busy = found.contended or self.rounds.against(self.dense)[name].contended or low > 1
        # the ceiling is the fastest of all, so the interval ends there; one that lies above it is no measurement
        return Share(min(estimate, 1.0), min(low, 1.0), min(high, 1.0), busy)


def measure(
    layers: Mapping[str, Sequence[CompressedLinear]],
    x: Tensor,
    *,
    dense: str,
    beside: Mapping[str, Callable] | None = None,
    budget_s: float,
    n_threads: int | None = None,
    seed: int = 0,
) -> Streams:
    """x [rows, in] through every entry of `layers` (its copies in rotation), timed with plain reads of `dense`'s.

    `beside`: further calls for the same rounds that read nothing countable. budget_s: seconds for each.
    """
    reads = rotation.reads(layers[dense])
    calls = {name: rotation.rotate(copies, x) for name, copies in layers.items()} | dict(beside or {}) | reads
    rounds = timing.measure(calls, budget_s=budget_s, n_threads=n_threads, seed=seed)
    read_bytes = {name: copies[0].read_bytes for name, copies in layers.items()}
    read_bytes |= dict.fromkeys(reads, read_bytes[dense])
    ceiling = max(read_bytes, key=lambda name: read_bytes[name] / rounds.median_s(name))
    return Streams(rounds, read_bytes, ceiling, dense)

"""What the caches buy: a weight that stays there against one from memory, and plain reads by working set."""

from collections.abc import Callable, Iterator

import torch

from flashstudy.compress.linear import make_linear

from . import rotation, timing

SMALL_SETS = (2**18, 2**20, 2**22)  # bytes: inside a core's own caches and just beyond
LEAST_READ = 2**22  # bytes a call, so that calling costs little beside reading


def resident(
    in_features: int, out_features: int, weight_format: str, dtype: torch.dtype, *, llc_bytes: int, **timed
) -> tuple[int, timing.Comparison]:
    """(bytes, comparison) of a dense weight used again and again, over the same weight in copies beyond the cache.

    The weight keeps as many of its rows as a quarter of the last-level cache holds. `timed`: as for timing.compare.
    """
    n_out = max(1, min(out_features, llc_bytes // 4 // (in_features * dtype.itemsize)))
    weight = torch.randn(n_out, in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer = make_linear(weight, weight_format=weight_format, kernel="dense")
    x = torch.ones(1, in_features, dtype=dtype)
    streamed = rotation.rotate(rotation.copies(layer, llc_bytes), x)
    return layer.read_bytes, timing.compare(streamed, rotation.rotate([layer], x), **timed)


def by_size(llc_bytes: int, **timed) -> Iterator[dict]:
    """Plain reads of sets used again and again: seconds a byte over those of one beyond the cache, as columns."""
    beyond = rotation.CACHES_BEYOND * llc_bytes
    times = {size: max(1, LEAST_READ // size) for size in (*SMALL_SETS, llc_bytes // 4, llc_bytes, beyond)}
    calls = {str(size): _again(rotation.plain_read(size, 0), n) for size, n in sorted(times.items())}
    found = timing.compare_many(calls, str(beyond), **timed)
    for size, n in sorted(times.items()):
        one, scale = found[str(size)], beyond / (size * n)
        yield dict(
            working_set_bytes=size, read_bytes=size * n, read_bytes_per_s=size * n / one.flash_s, part="time a byte",
            part_share=one.ratio * scale, low=one.low * scale, high=one.high * scale, contended=one.contended,
            reason=one.reason, n_pairs=one.n_pairs,
        )  # fmt: skip


def _again(read: Callable[[], object], times: int) -> Callable[[], None]:
    """The read that many times in one call."""

    def reads() -> None:
        for _ in range(times):
            read()

    return reads

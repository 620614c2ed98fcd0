"""What one start costs in a process of its own: private memory by phase, and page faults under a memory limit.

These functions run inside `memory.peak`: they get what pickles, mark their phases and return plain numbers. Private
memory has to fit; what is mapped from a file can be dropped and read again, so it is told apart and not compared.
"""

import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from flashstudy.compress import loading
from flashstudy.compress.variants import Variant

from . import memory, memory_limit, steps

DECODE_STEPS = 4
MOST_AT_ONCE = 4
LIBRARIES_BYTES = 10**9  # more than what torch and transformers take, 0.4 GB in private and mapped memory here
UNCOUNTED = ("start", "import")
# By how much a way's private peak over the libraries' differs between processes. Source: four processes each on two
# cores beside other work, smollm2-135m: 0.3% at most, but 2.8% where tiles of weights come and go with every product.
PEAK_SCATTER, TILED_SCATTER = 0.005, 0.03


@dataclass(frozen=True)
class Start:
    """One way to load, as a process of its own can be told: the files, the dtype, the prompt's ids, the threads."""

    way: str
    files: loading.Files
    dtype: str
    ids: list[list[int]]
    n_threads: int


def peaks(starts: list[Start], expected_bytes: int) -> list[memory.Peak]:
    """The peak of each start, a new process each; up to four at once where so many times `expected_bytes` fit.

    What a process holds does not depend on what else runs, and most of its time goes into importing libraries.
    """
    fitting = memory.allowed_bytes() // (expected_bytes + LIBRARIES_BYTES)
    with ThreadPoolExecutor(max(1, min(fitting, MOST_AT_ONCE))) as pool:
        return list(pool.map(lambda start: memory.peak(hold, start, expected_bytes=expected_bytes), starts))


def hold(mark: memory.Mark, start: Start) -> dict[str, int]:
    """Load in one way and write a few tokens; bytes of the libraries alone, private and mapped, of weights and file.

    `mark` is told when the phases import, load, convert, prefill and decode begin.
    """
    mark("import")
    torch.set_num_threads(start.n_threads)
    loading.import_libraries(start.way, start.files)
    private, mapped = _resident_bytes()
    variant = _loaded(mark, start)
    mark("prefill")
    steps.prefill(variant, torch.tensor(start.ids))()
    mark("decode")
    step = steps.decode(variant, context=len(start.ids[0]))
    for _ in range(DECODE_STEPS):
        step()
    weights = 0 if start.way == "mapped" else variant.stored_bytes  # those of a mapped file are not private
    file_bytes = start.files.stored_bytes(start.way)
    return {"libraries": private, "mapped_libraries": mapped, "weights": weights, "file": file_bytes}


def faults(mark: memory.Mark, start: Start, group: str, n_steps: int) -> list[int]:
    """Major page faults of each of `n_steps` decode steps, loaded and run inside the control group `group`."""
    memory_limit.join(Path(group))
    torch.set_num_threads(start.n_threads)
    variant = _loaded(mark, start)
    mark("decode")
    step = steps.decode(variant, context=len(start.ids[0]))
    step()  # what a first call reads from the disk is no swapping
    counts = [memory_limit.major_faults()]
    for _ in range(n_steps):
        step()
        counts.append(memory_limit.major_faults())
    return [after - before for before, after in zip(counts, counts[1:], strict=False)]


def _loaded(mark: memory.Mark, start: Start) -> Variant:
    found = None
    for name, step in loading.steps(start.way, start.files, start.dtype).items():
        mark(name)
        found = step(found)
    return found


def counted(peak: memory.Peak) -> list[memory.PhasePeak]:
    """The phases of a peak of `hold` in which there are weights."""
    return [phase for phase in peak.phases if phase.phase not in UNCOUNTED]


def over_libraries(peak: memory.Peak) -> int:
    """Private bytes of a peak of `hold` beyond those of the imported libraries, at the highest point.

    While a file is read its mapped part grows faster than it is sampled, and the private part looks larger by up to the
    file. So loading counts only where it holds more than that beyond all later phases, which keep what it loaded.
    """
    first, *later = (phase.private_bytes for phase in counted(peak))
    highest = max(later, default=first)
    return max(highest, first if first - peak.value["file"] > highest else 0) - peak.value["libraries"]


def ratio(way: str, peaks: list[memory.Peak], standard: list[memory.Peak]) -> tuple[float, float, float]:
    """(estimate, low, high) of one way's private memory over the standard's, the libraries' taken off both.

    The interval spans what the processes gave, and beyond it the scatter known of both, which is all there is to it
    with one process each.
    """
    mine, theirs = ([over_libraries(peak) for peak in found] for found in (peaks, standard))
    low, high = min(mine) / max(theirs), max(mine) / min(theirs)
    estimate = statistics.median(mine) / statistics.median(theirs)
    scatter = PEAK_SCATTER + (TILED_SCATTER if way in ("quantize", "prequantized") else PEAK_SCATTER)
    return estimate, low * (1 - scatter), high * (1 + scatter)


def _resident_bytes() -> tuple[int, int]:
    """(private, mapped from files) bytes in memory of this process; all private where the system does not tell."""
    found = psutil.Process().memory_info()
    mapped = getattr(found, "shared", 0)
    return found.rss - mapped, mapped

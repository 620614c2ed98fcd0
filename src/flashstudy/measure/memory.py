"""Peak memory of a function in a process of its own, phase by phase, split by what it is made of.

Private memory (heap, tensors) has to fit; file-mapped memory (weights mapped from a safetensors file) can be dropped
and read again; device memory is counted by torch's allocator. The kernel keeps the exact peak of the sum, the split
is sampled from outside every 2 ms. A function that will not fit is refused before it starts, or stopped before the
machine swaps.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil

from flashstudy.facts.units import MIB, format_bytes

from . import cgroups

SAMPLE_S = 2e-3
# Left to the rest of the machine; below it a system starts to drop caches that others need, then swaps.
RESERVE_SHARE, LEAST_RESERVE_BYTES = 0.05, 256 * MIB

Mark = Callable[[str], None]


class DoesNotFitError(MemoryError):
    """The function needs, or came to use, more memory than this process may take."""


@dataclass(frozen=True)
class PhasePeak:
    """Peaks within one phase, bytes; each kind has its own moment, so the parts may sum to more than the total."""

    phase: str
    wall_s: float
    total_bytes: int
    private_bytes: int
    file_mapped_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class Peak:
    """Peaks over all phases, what the process held before the function began, and the function's own result."""

    phases: tuple[PhasePeak, ...]
    total_bytes: int
    private_bytes: int
    file_mapped_bytes: int
    device_bytes: int
    baseline_bytes: int
    value: Any = None


def peak(
    function: Callable[..., Any],
    *arguments: Any,
    expected_bytes: int = 0,
    limit_bytes: int | None = None,
    timeout_s: float = 600.0,
) -> Peak:
    """Run `function(mark, *arguments)` in a new process and return its peaks. `mark(name)` begins a phase.

    The function, its arguments and its result must pickle: it comes from a module, not from a notebook. What runs
    before the first `mark` is the phase "start". `limit_bytes` bounds the private memory (default: what is free, less
    a reserve). DoesNotFitError when `expected_bytes` exceeds the bound, or as soon as the process does; RuntimeError
    with the child's traceback when the function raises, TimeoutError after `timeout_s`.
    """
    allowed = min(limit_bytes or 2**63, allowed_bytes())
    if expected_bytes > allowed:
        raise DoesNotFitError(f"needs {format_bytes(expected_bytes)}, only {format_bytes(allowed)} may be used here")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_child, args=(there, function, arguments), daemon=True)
    process.start()
    there.close()
    try:
        return _follow(_Log(process, here, allowed), timeout_s)
    finally:
        process.kill()
        process.join()
        here.close()


def available_bytes() -> int:
    """Bytes that this process may still take: free memory of the machine or of its control group, whichever is less."""
    limits, free = cgroups.limits(), psutil.virtual_memory().available
    if limits.memory_bytes is None:
        return free
    return max(0, min(free, limits.memory_bytes - (limits.memory_used_bytes or 0)))


def allowed_bytes() -> int:
    """`available_bytes` less a reserve for the rest of the machine."""
    total = cgroups.limits().memory_bytes or psutil.virtual_memory().total
    reserve = max(LEAST_RESERVE_BYTES, RESERVE_SHARE * min(total, psutil.virtual_memory().total))
    return int(max(0, available_bytes() - reserve))


def _child(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Run the function and report ("phase", next name, seconds and peaks of the last one) …, then how it ended."""
    began = time.monotonic()

    def mark(name: str) -> None:
        nonlocal began
        pipe.send(("phase", name, time.monotonic() - began, _own_peak_bytes(), _device_peak_bytes()))
        pipe.recv()  # the parent looks once more while nothing changes, so no sample falls into the wrong phase
        _reset_peaks()
        began = time.monotonic()

    try:
        mark("start")
        value = function(mark, *arguments)
        mark("end")
        pipe.send(("done", value))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


def _own_peak_bytes() -> int:
    """The kernel's exact peak of resident memory since the last reset; 0 where it keeps none."""
    return _status("self").get("VmHWM", 0)


def _device_peak_bytes() -> int:
    """Peak of the CUDA allocator since the last reset; 0 when torch has not touched a device."""
    cuda = _used_cuda()
    return cuda.max_memory_allocated() if cuda else 0


def _reset_peaks() -> None:
    """Start both peaks anew. Source: proc(5), writing 5 to clear_refs resets VmHWM."""
    if cuda := _used_cuda():
        cuda.reset_peak_memory_stats()
    try:
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
    except OSError:
        return


def _used_cuda() -> Any:
    """torch.cuda if this process has used a device; torch is not imported for the question."""
    import sys

    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _status(process: int | str) -> dict[str, int]:
    """Memory lines of /proc/PID/status in bytes; elsewhere psutil's resident size as private; {} once it ended."""
    try:
        if not os.path.exists("/proc/self/status"):
            return {"RssAnon": psutil.Process(None if process == "self" else int(process)).memory_info().rss}
        with open(f"/proc/{process}/status") as status:
            rows = (line.split() for line in status if line.startswith(("Rss", "VmHWM", "VmRSS")))
            return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}
    except (OSError, psutil.Error):
        return {}


class _Log:
    """What the parent knows of the child: samples of the running phase, peaks of the finished ones."""

    def __init__(self, process: Any, pipe: Connection, allowed: int) -> None:
        self.process, self.pipe, self.allowed = process, pipe, allowed
        self.phase, self.baseline = "", 0
        self.private = self.mapped = self.total = 0
        self.finished: list[PhasePeak] = []

    def sample(self) -> None:
        """Look at the child once; DoesNotFitError when it takes more than it may."""
        status = _status(self.process.pid)
        private = status.get("RssAnon", 0) + status.get("RssShmem", 0)
        mapped = status.get("RssFile", 0)
        self.private, self.mapped = max(self.private, private), max(self.mapped, mapped)
        self.total = max(self.total, private + mapped)
        if private > self.allowed or available_bytes() < LEAST_RESERVE_BYTES / 2:
            raise DoesNotFitError(
                f"stopped in phase {self.phase!r} at {format_bytes(private)}: "
                f"only {format_bytes(self.allowed)} may be used here"
            )

    def turn(self, phase: str, wall_s: float, own_peak: int, device_peak: int) -> None:
        """Close the running phase with the child's own peaks and begin the next."""
        self.sample()
        if self.phase:
            total = max(own_peak, self.total)
            private = max(self.private, total - self.mapped)
            self.finished.append(PhasePeak(self.phase, wall_s, total, private, self.mapped, device_peak))
        else:
            self.baseline = self.total
        self.phase = phase
        self.private = self.mapped = self.total = 0
        self.pipe.send("go on")

    def peak(self, value: Any) -> Peak:
        """The peaks over all phases; an empty "start" is left out."""
        phases = tuple(
            p for p in self.finished if p.phase != "start" or p.wall_s > 10 * SAMPLE_S or len(self.finished) == 1
        )
        names = ("total_bytes", "private_bytes", "file_mapped_bytes", "device_bytes")
        largest = {name: max(getattr(phase, name) for phase in phases) for name in names}
        return Peak(phases, **largest, baseline_bytes=self.baseline, value=value)


def _follow(log: _Log, timeout_s: float) -> Peak:
    """Sample the child until it reports its end."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            message = log.pipe.recv() if log.pipe.poll(SAMPLE_S) else None
        except EOFError:
            log.process.join()
            code = log.process.exitcode
            why = "killed, probably for memory" if code == -9 else f"exit code {code}"
            raise RuntimeError(f"the process ended in phase {log.phase or 'start'!r} ({why})") from None
        if message is None:
            log.sample()
        elif message[0] == "phase":
            log.turn(*message[1:])
        elif message[0] == "done":
            return log.peak(message[1])
        else:
            raise RuntimeError(f"the function failed in phase {log.phase!r}:\n{message[1]}")
    raise TimeoutError(f"not done after {timeout_s:g} s, in phase {log.phase or 'start'!r}")

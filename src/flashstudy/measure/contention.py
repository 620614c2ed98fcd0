"""Was the machine ours while a block ran? What the kernel's own accounts say, before and after it.

A thread that waits for its core shows in the scheduler's run delay (Linux, `/proc/self/task/*/schedstat`, every
thread of the process) and in involuntary context switches; where there is no run delay to read, in wall time that the
thread did not spend computing. Each block gets a reason in plain words, or "" when nothing disturbed it.
"""

import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

TASKS = Path("/proc/self/task")
PRESSURE = Path("/proc/pressure/cpu")
# A block is kept when at most 1% of it, plus a timer tick and its bookkeeping, was spent waiting for a core.
DELAY_SHARE = 0.01
# Wall time may exceed the thread's CPU time by 5% before a switch counts; tried on a shared two-core machine.
GAP_SHARE = 0.05
TOLERANCE_S = 20e-6

WAITED = "a thread waited for its core"
PUSHED_OFF = "the thread was pushed off its core"


@dataclass(frozen=True)
class Reading:
    """The accounts at one moment; run delay in seconds by thread id, empty where the kernel keeps none."""

    cpu_s: float
    run_delay_s: dict[int, float]
    involuntary: int
    voluntary: int
    faults: int


@dataclass(frozen=True)
class Disturbance:
    """What happened to this process between two readings; run delay is that of the thread worst off."""

    cpu_s: float
    run_delay_s: float
    knows_delay: bool
    involuntary: int
    voluntary: int
    faults: int

    def reason(self, wall_s: float, n_threads: int, runs_on_host: bool = True) -> str:
        """Plain words for what spoiled a block of `wall_s` seconds, or "".

        CPU time is held against wall time for one computing thread only: with several, the caller may sleep while the
        others work. A thread that slept by its own will (a voluntary switch) was not disturbed.
        """
        if self.run_delay_s > DELAY_SHARE * wall_s + TOLERANCE_S:
            return WAITED
        gap = wall_s - self.cpu_s > GAP_SHARE * wall_s + TOLERANCE_S
        unexplained = self.involuntary or not (self.knows_delay or self.voluntary)
        return PUSHED_OFF if gap and unexplained and runs_on_host and n_threads == 1 else ""


def between(before: Reading, after: Reading) -> Disturbance:
    """The difference of two readings. A thread that is new in the second has no delay yet."""
    delays = [delay - before.run_delay_s.get(thread, delay) for thread, delay in after.run_delay_s.items()]
    return Disturbance(
        cpu_s=after.cpu_s - before.cpu_s,
        run_delay_s=max(delays, default=0.0),
        knows_delay=bool(delays),
        involuntary=after.involuntary - before.involuntary,
        voluntary=after.voluntary - before.voluntary,
        faults=after.faults - before.faults,
    )


class Watch:
    """Reads the accounts of the calling thread and of the native worker threads of this process."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def refresh(self) -> None:
        """Look for new worker threads. Other Python threads (a notebook's input and output) are left out."""
        if not TASKS.exists():
            return
        others = {thread.native_id for thread in threading.enumerate()} - {threading.get_native_id()}
        for name in os.listdir(TASKS):
            if int(name) not in others and int(name) not in self._files:
                self._open(int(name))

    def _open(self, thread: int) -> None:
        """Keep the thread's account open; a thread that has just ended has none."""
        try:
            self._files[thread] = os.open(TASKS / str(thread) / "schedstat", os.O_RDONLY)
        except OSError:
            return

    def close(self) -> None:
        """Release the open accounts."""
        while self._files:
            os.close(self._files.popitem()[1])

    def read(self) -> Reading:
        """The accounts now; costs a few microseconds a thread."""
        delays = {}
        for thread, file in list(self._files.items()):
            try:
                delays[thread] = int(os.pread(file, 96, 0).split()[1]) * 1e-9
            except (OSError, IndexError):
                os.close(self._files.pop(thread))
        usage = resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))
        return Reading(time.thread_time(), delays, usage.ru_nivcsw, usage.ru_nvcsw, usage.ru_minflt)


def pressure_s(path: Path = PRESSURE) -> float:
    """Seconds since boot in which some task of the machine waited for a CPU; 0 where the kernel does not say."""
    try:
        first = path.read_text().splitlines()[0]
    except (OSError, IndexError):
        return 0.0
    return int(first.rsplit("total=", 1)[1]) * 1e-6

"""A run's processes: papermill, its kernel and whatever the kernel started. They live and end together.

jupyter_client gives every kernel a session of its own, so killing papermill's process group leaves the kernel running.
Members are therefore found twice over: as descendants, and by FLASHSTUDY_RUN_DIR in their environment, which also
finds those whose parent has gone.
"""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from flashstudy.runs.records import RUN_DIR

POLITE_S = 3.0  # between SIGTERM and SIGKILL
LAST_WAIT_S = 5.0  # for SIGKILL to be carried out
STEP_S = 0.05


@dataclass(frozen=True)
class Ended:
    """exit_code as Python counts it (minus the signal's number); peak_memory_bytes of the largest process."""

    exit_code: int
    peak_memory_bytes: int


def start(command: list[str], *, cwd: Path, environment: dict[str, str], log: Path) -> subprocess.Popen:
    """The process, in its own session so that a terminal's Ctrl-C does not reach it; output goes to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def poll(process: subprocess.Popen) -> Ended | None:
    """How the process ended, None while it runs. To be called until it returns an ending, then no more."""
    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    if pid == 0:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen knows it need not wait
    unit = 1 if os.uname().sysname == "Darwin" else 1024  # macOS counts bytes, Linux KiB
    return Ended(process.returncode, usage.ru_maxrss * unit)


def end(process: subprocess.Popen, run_dir: Path) -> Ended:
    """End a running process and all its family: SIGTERM, then SIGKILL. Returns within about 10 s."""
    family = members(run_dir, process.pid)
    _signal(family, signal.SIGTERM)
    ended = _wait(process, family, POLITE_S)
    sweep(run_dir, family)
    return ended or _wait(process, [], LAST_WAIT_S) or Ended(-signal.SIGKILL, 0)


def sweep(run_dir: Path, family: list[psutil.Process] | None = None) -> list[int]:
    """Kill what is left of a run's family; the pids that outlived even that."""
    deadline = time.monotonic() + LAST_WAIT_S
    left = _running(family or []) + members(run_dir)
    while left and time.monotonic() < deadline:
        _signal(left, signal.SIGKILL)
        time.sleep(STEP_S)
        left = _running(left) + members(run_dir)  # asked anew: a dying parent may just have started another child
    return sorted({process.pid for process in left})


def members(run_dir: Path, root_pid: int | None = None) -> list[psutil.Process]:
    """The running processes of the run in `run_dir`, those below `root_pid` included."""
    found = {process.pid: process for process in psutil.process_iter() if _carries(process, run_dir)}
    if root_pid is not None:
        try:
            root = psutil.Process(root_pid)
            found |= {process.pid: process for process in [root, *root.children(recursive=True)]}
        except psutil.NoSuchProcess:
            pass
    found.pop(os.getpid(), None)
    return _running(list(found.values()))


def _carries(process: psutil.Process, run_dir: Path) -> bool:
    try:
        return process.environ().get(RUN_DIR) == str(run_dir)
    except (psutil.Error, OSError):  # gone meanwhile, or another user's
        return False


def _running(processes: list[psutil.Process]) -> list[psutil.Process]:
    alive = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except psutil.Error:
            continue
    return alive


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue


def _wait(process: subprocess.Popen, family: list[psutil.Process], limit_s: float) -> Ended | None:
    """Wait until process and family have ended, `limit_s` at most; how the process ended, if it did."""
    deadline, ended = time.monotonic() + limit_s, None
    while time.monotonic() < deadline:
        ended = ended or poll(process)
        if ended and not _running(family):
            break
        time.sleep(STEP_S)
    return ended

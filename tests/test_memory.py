"""Peak memory in a process of its own: planted sizes by kind and phase, refusals."""

import mmap
import os
import time

import pytest

from flashstudy.facts.units import MIB
from flashstudy.measure import memory


def touched(n_bytes):
    block = bytearray(n_bytes)
    block[::4096] = b"x" * len(block[::4096])
    return block


def phases(mark, path, n_bytes):
    mark("load")
    loaded = touched(n_bytes)
    del loaded
    mark("map")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        total = sum(mapped[i] for i in range(0, len(mapped), 4096))
        time.sleep(0.05)
    mark("decode")
    kept = touched(n_bytes // 4)
    return total + len(kept) - n_bytes // 4


def raises(mark):
    mark("convert")
    raise ValueError("planted")


def dies(mark):
    mark("load")
    os._exit(7)


def hangs(mark):
    mark("decode")
    time.sleep(60)


def grows(mark):
    mark("load")
    return len([touched(8 * MIB) for _ in range(64)])


linux_only = pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="the split needs Linux's accounts")


@linux_only
def test_planted_sizes_are_found_in_their_phase_and_kind(tmp_path):
    (tmp_path / "weights").write_bytes(b"\1" * (64 * MIB))
    peak = memory.peak(phases, str(tmp_path / "weights"), 200 * MIB)
    load, mapped, decode = peak.phases
    assert [phase.phase for phase in peak.phases] == ["load", "map", "decode"]
    floor = peak.baseline_bytes
    assert load.private_bytes == pytest.approx(200 * MIB + floor, abs=24 * MIB)
    assert decode.private_bytes == pytest.approx(50 * MIB + floor, abs=24 * MIB)
    assert mapped.file_mapped_bytes - load.file_mapped_bytes == pytest.approx(64 * MIB, abs=8 * MIB)
    assert mapped.private_bytes < 60 * MIB
    assert peak.private_bytes == load.private_bytes and peak.total_bytes == load.total_bytes
    assert peak.device_bytes == 0
    assert peak.value == 64 * MIB // 4096
    assert mapped.wall_s >= 0.05


def test_what_would_not_fit_is_refused_before_it_starts():
    with pytest.raises(memory.DoesNotFitError, match="needs 1.13e.3 TB|needs 1126 TB"):
        memory.peak(raises, expected_bytes=2**50)


@linux_only
def test_what_grows_past_the_limit_is_stopped_there():
    with pytest.raises(memory.DoesNotFitError, match=r"stopped in phase 'load' at \d+ MB: only 126 MB may be used"):
        memory.peak(grows, limit_bytes=120 * MIB)


def test_an_error_in_the_function_names_the_phase_and_shows_its_traceback():
    with pytest.raises(RuntimeError, match=r"(?s)phase 'convert'.*ValueError: planted"):
        memory.peak(raises)


def test_a_process_that_dies_is_reported():
    with pytest.raises(RuntimeError, match=r"ended in phase 'load' \(exit code 7\)"):
        memory.peak(dies)


def test_a_hang_ends_at_the_timeout():
    with pytest.raises(TimeoutError, match="in phase 'decode'"):
        memory.peak(hangs, timeout_s=4.0)


def test_allowance_keeps_a_reserve_and_respects_the_control_group(monkeypatch):
    limits = memory.cgroups.Limits(cpus=None, memory_bytes=1000 * MIB, memory_used_bytes=400 * MIB)
    monkeypatch.setattr(memory.cgroups, "limits", lambda: limits)
    assert memory.available_bytes() == 600 * MIB
    assert memory.allowed_bytes() == (600 - 256) * MIB

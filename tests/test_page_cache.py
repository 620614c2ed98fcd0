"""The page cache: what is dropped is gone, what is mapped stays, and where it cannot be done the reason says so."""

import mmap
import os

import psutil
import pytest

from flashstudy.measure import page_cache

N_PAGES = 2048


@pytest.fixture
def file(tmp_path):
    """A file of 2,048 pages on a disk."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    on = next((mounts[str(p)] for p in (tmp_path, *tmp_path.parents) if str(p) in mounts), "")
    if on in ("tmpfs", "ramfs") or not hasattr(os, "posix_fadvise"):
        pytest.skip(f"files of {on or 'this system'} are always in memory")
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(N_PAGES * mmap.PAGESIZE))
    return path


def test_a_dropped_file_is_not_in_memory_and_a_file_that_was_read_is(file):
    assert page_cache.resident_share(file) == 1.0  # just written
    assert page_cache.drop(file) == page_cache.Dropped(0.0, "")
    assert page_cache.resident_share(file) == 0.0
    page_cache.fill(file)
    assert page_cache.resident_share(file) == 1.0


def test_the_share_is_the_pages_that_were_read(file):
    assert page_cache.drop(file).is_gone
    with file.open("rb", buffering=0) as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        handle.read(mmap.PAGESIZE * N_PAGES // 4)
    assert page_cache.resident_share(file) == 0.25


def test_pages_that_a_process_has_mapped_stay_and_the_reason_says_so(file):
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[i] for i in range(0, len(mapped), mmap.PAGESIZE)) > 0
        dropped = page_cache.drop(file)
    assert not dropped.is_gone and dropped.resident > 0.9
    assert "of the pages of weights stayed in memory: a process has mapped them" in dropped.reason
    assert page_cache.drop(file).is_gone


def test_an_empty_file_has_no_page_in_memory(tmp_path):
    (tmp_path / "empty").touch()
    assert page_cache.resident_share(tmp_path / "empty") == 0.0


def test_a_system_without_the_call_is_named_and_counts_as_warm(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    dropped = page_cache.drop(tmp_path / "any")
    assert dropped.resident == 1.0 and "no posix_fadvise" in dropped.reason and not dropped.is_gone


def test_what_cannot_be_seen_does_not_count_as_gone(file, monkeypatch):
    monkeypatch.setattr(page_cache, "resident_share", lambda path: (_ for _ in ()).throw(OSError(1, "not permitted")))
    dropped = page_cache.drop(file)
    assert not dropped.is_gone and "cannot be seen: not permitted" in dropped.reason

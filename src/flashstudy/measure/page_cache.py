"""Is a file in the page cache, and can it be put out of it?

A second load of a file reads memory, not the disk, so a cold start must be arranged. `drop` writes the file out, asks
the kernel to forget its pages (posix_fadvise), and looks afterward whether it did (mincore): pages that a process has
mapped stay, and so does everything on a file system that lives in memory. What lies below, the disk's own cache or
that of a virtual machine's host, is out of reach.
"""

import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

TRIES = 3
CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Dropped:
    """Share of a file's pages still in memory after the attempt, and why, "" when all are gone."""

    resident: float
    reason: str

    @property
    def is_gone(self) -> bool:
        """Would the next read come from the disk?"""
        return not self.reason


def drop(path: Path) -> Dropped:
    """Put the file's pages out of the page cache, and look. Never raises because the system cannot: the reason says so.

    Costs writing the file out where it is new. The share is 1 where nothing could be done or seen.
    """
    if not hasattr(os, "posix_fadvise"):
        return Dropped(1.0, "this system cannot drop a file's pages (it has no posix_fadvise)")
    share = 1.0
    with path.open("rb") as file:
        for _ in range(TRIES):
            os.fsync(file.fileno())  # a page that is not written out yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            try:
                share = resident_share(path)
            except OSError as error:
                return Dropped(1.0, f"whether the pages of {path.name} are gone cannot be seen: {error.strerror}")
            if share == 0:
                return Dropped(0.0, "")
    why = "a process has mapped them, or its file system keeps files in memory"
    return Dropped(share, f"{share:.0%} of the pages of {path.name} stayed in memory: {why}")


def fill(path: Path) -> None:
    """Read the file once, so that the next read comes from memory where it fits."""
    buffer = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def resident_share(path: Path) -> float:
    """Share of the file's pages that are in the page cache, 0 to 1; an empty file has none.

    A file that this user may not write reads as all there (Linux tells only its owner). OSError where the system
    cannot be asked.
    """
    size = path.stat().st_size
    if not size:
        return 0.0
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)  # the only way to learn the address; the pages are not touched
        try:
            failed = _mincore()(ctypes.addressof(first), size, pages)
        finally:
            del first
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return sum(page & 1 for page in bytes(pages)) / len(pages)


def _mincore():
    """The C library's mincore(address, length, one byte a page). Source: mincore(2)."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "mincore"):
        raise OSError(0, "this system has no mincore")
    library.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    library.mincore.restype = ctypes.c_int
    return library.mincore

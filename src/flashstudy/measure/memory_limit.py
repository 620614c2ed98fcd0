"""A memory limit of our own for one process, where the system lets us set it, and the page faults that it brings.

A major fault reads a page from the disk that was in memory before: without a swap area only pages of mapped files can
be put out, with one all can. The limit is a control group (version 2) below the one this process is in, or beside it,
made for the measurement and removed after it. Mostly only the system's manager may make one; then the reason is given.
"""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

MOUNT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class NoLimitError(RuntimeError):
    """A memory limit cannot be set here; one line with the reason."""


@contextlib.contextmanager
def limited_group(limit_bytes: int, *, mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> Iterator[Path]:
    """The folder of a new control group that allows `limit_bytes`, page cache included; removed when the block ends.

    Processes enter it by `join`. NoLimitError where none can be made.
    """
    group = _parent(mount, membership) / f"flashstudy-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise NoLimitError(f"no control group can be made here ({error.strerror})") from None
    try:
        try:
            (group / "memory.max").write_text(str(limit_bytes))
        except OSError as error:
            raise NoLimitError(f"a new control group takes no memory limit ({error.strerror})") from None
        yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def join(group: Path) -> None:
    """Move this process into the group. OSError where it may not."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


def major_faults() -> int:
    """Pages that this process has had to read from the disk so far, all threads together."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _parent(mount: Path, membership: Path) -> Path:
    """The own control group or the one above it, whichever hands memory on to its children and may be written."""
    if not (mount / "cgroup.controllers").exists():
        raise NoLimitError("memory limits of one's own need control groups of version 2, which are not in use here")
    rows = [line.partition("::")[2] for line in membership.read_text().splitlines() if line.startswith("0::")]
    own = mount / (rows[0].strip("/") if rows else "")
    for group in (own, own.parent):
        handed_on = group / "cgroup.subtree_control"
        if not group.is_relative_to(mount) or not handed_on.exists():
            continue
        if "memory" in handed_on.read_text().split() and os.access(group, os.W_OK):
            return group
    raise NoLimitError("no control group at hand hands memory limits on to groups of its own")

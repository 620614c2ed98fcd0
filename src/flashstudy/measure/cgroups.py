"""What a container may use: the CPU quota and the memory limit of this process's control groups, version 1 or 2.

A limit holds for the whole subtree below it, so the tightest one on the way from the process's group to the root
counts. Inside a container the path that the kernel reports may not exist under the mount; the mount's root is then
the own group.
"""

from dataclasses import dataclass
from pathlib import Path

# Version 1 writes "no limit" as the largest page-aligned signed 64-bit number.
UNLIMITED_BYTES = 2**62


@dataclass(frozen=True)
class Limits:
    """CPU seconds a second, bytes allowed, and bytes used by the group that sets that limit; None without a limit."""

    cpus: float | None
    memory_bytes: int | None
    memory_used_bytes: int | None


def limits(mount: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> Limits:
    """The limits on this process; all None on systems without control groups."""
    paths = _paths(membership)
    unified = _levels(mount, paths.get("", "/")) if (mount / "cgroup.controllers").exists() else []
    cpu = unified or _levels(mount / "cpu", paths.get("cpu", "/"))
    memory = unified or _levels(mount / "memory", paths.get("memory", "/"))
    quotas = [quota for level in cpu if (quota := _quota(level)) is not None]
    bounds = [bound for level in memory if (bound := _memory(level)) is not None]
    limit, used = min(bounds, key=lambda bound: bound[0] - bound[1], default=(None, None))
    return Limits(min(quotas, default=None), limit, used)


def _paths(membership: Path) -> dict[str, str]:
    """Group path by controller; the unified hierarchy is ""."""
    if not membership.exists():
        return {}
    rows = [line.split(":", 2) for line in membership.read_text().splitlines() if line.count(":") >= 2]
    return {controller: path for _, controllers, path in rows for controller in controllers.split(",")}


def _levels(mount: Path, path: str) -> list[Path]:
    """The group's folder and its parents up to the mount."""
    own = mount / path.strip("/")
    if not own.exists():
        own = mount
    return [own, *[parent for parent in own.parents if parent.is_relative_to(mount)]]


def _quota(level: Path) -> float | None:
    """CPUs allowed at this level."""
    if (unified := level / "cpu.max").exists():
        quota, period = unified.read_text().split()
    elif (level / "cpu.cfs_quota_us").exists():
        quota, period = ((level / name).read_text().strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    else:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _memory(level: Path) -> tuple[int, int] | None:
    """Bytes allowed and used at this level; page cache that the kernel can drop at once is not counted as used."""
    for limit_name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        if (level / limit_name).exists() and (level / used_name).exists():
            text = (level / limit_name).read_text().strip()
            if text == "max" or int(text) >= UNLIMITED_BYTES:
                return None
            used = int((level / used_name).read_text())
            return int(text), max(0, used - _droppable(level))
    return None


def _droppable(level: Path) -> int:
    """Bytes of inactive file pages, which are dropped before anything is killed."""
    if not (level / "memory.stat").exists():
        return 0
    stat = dict(line.split() for line in (level / "memory.stat").read_text().splitlines())
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))

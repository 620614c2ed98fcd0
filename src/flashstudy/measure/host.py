"""What this host is, read from the operating system: CPU, cores, caches, NUMA nodes, limits. Nothing is measured."""

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from flashstudy.facts.units import MIB

from . import cgroups
from .process import usable_cpus

CPUS = Path("/sys/devices/system/cpu")
NODES = Path("/sys/devices/system/node")
# Instruction sets that decide which low-bit kernels are fast, by their names in Linux /proc/cpuinfo.
SIMD = (
    "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "amx_fp16", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve",
    "sve2", "sme",
)  # fmt: skip


@dataclass(frozen=True)
class Host:
    """The machine as the operating system describes it to this process; cpu_quota in CPUs, None without one."""

    cpu_model: str
    arch: str
    simd: list[str]
    physical_cores: int
    usable_cpus: int
    usable_cores: int
    cpu_quota: float | None
    numa_nodes: int
    memory_limit_bytes: int
    llc_bytes: int


def read() -> Host:
    """This host. Where a figure cannot be read a careful default stands: one NUMA node, a 32 MiB last-level cache."""
    cpus, limits = usable_cpus(), cgroups.limits()
    total = psutil.virtual_memory().total
    return Host(
        cpu_model=_cpu_model(),
        arch=platform.machine(),
        simd=_simd(),
        physical_cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        usable_cpus=len(cpus),
        usable_cores=_cores(cpus),
        cpu_quota=limits.cpus,
        numa_nodes=len(list(NODES.glob("node[0-9]*"))) or 1,
        memory_limit_bytes=min(total, limits.memory_bytes or total),
        llc_bytes=_llc_bytes(cpus),
    )


def choose_threads(host: Host) -> tuple[int, str]:
    """How many threads kernels should use while they are timed, and why.

    On up to four cores one is left to the notebook, its server and the system: threads that wait for each other are as
    slow as the one that is disturbed, and on two cores hardly a pair of blocks stayed clean.
    """
    cores = f"{host.usable_cores} physical cores that this process may use"
    if 1 < host.usable_cores <= 4:
        bounds = {f"{cores}, one of them left to the notebook and the system": host.usable_cores - 1}
    else:
        bounds = {cores: host.usable_cores}
    if host.cpu_quota is not None:
        bounds[f"a quota of {host.cpu_quota:g} CPUs"] = max(1, int(host.cpu_quota))
    reason = min(bounds, key=bounds.__getitem__)
    return bounds[reason], reason


def _cores(cpus: list[int]) -> int:
    """Physical cores among the CPUs: two hardware threads of one core count once."""
    siblings = [CPUS / f"cpu{cpu}/topology/thread_siblings_list" for cpu in cpus]
    if all(path.exists() for path in siblings):
        return len({path.read_text().strip() for path in siblings})
    return min(len(cpus), psutil.cpu_count(logical=False) or len(cpus))


def _llc_bytes(cpus: list[int]) -> int:
    """Bytes of the last-level caches that these CPUs reach, each counted once."""
    found: dict[int, dict[str, int]] = {}
    for cpu in cpus:
        for index in (CPUS / f"cpu{cpu}/cache").glob("index[0-9]*"):
            level, size, shared = (_text(index / name) for name in ("level", "size", "shared_cpu_list"))
            if level and size.endswith("K"):
                found.setdefault(int(level), {})[shared] = int(size[:-1]) * 1024
    if found:
        return sum(found[max(found)].values())
    return _sysctl_number("hw.l3cachesize") or _sysctl_number("hw.perflevel0.l2cachesize") or 32 * MIB


def _cpu_model() -> str:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def _simd() -> list[str]:
    """The flags of SIMD that this CPU has, in that order."""
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith(("flags", "Features")):
            present = set(line.split(":", 1)[1].split())
            return [flag for flag in SIMD if flag in present]
    return ["asimd"] if platform.machine() == "arm64" else []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _sysctl(name: str) -> str:
    """A macOS kernel value, "" elsewhere."""
    if platform.system() != "Darwin":
        return ""
    return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False).stdout.strip()


def _sysctl_number(name: str) -> int:
    text = _sysctl(name)
    return int(text) if text.isdigit() else 0

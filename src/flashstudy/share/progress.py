"""One line that says how far a study is: in JupyterLab, under papermill, in a terminal, and in the run's progress.json.

No widget: a line of plain HTML that is updated in place, so an executed notebook holds its last state and no more.
"""

import html
import sys
import time
from collections.abc import Callable
from pathlib import Path

MARK = {"flashstudy": "progress"}  # metadata of the display: pages leave it out
_SECONDS_BETWEEN_UPDATES = 0.2


def progress() -> Callable[[int, int, str], None]:
    """A callable (done, total, label) for a study's `progress`; it raises ValueError for done outside 0 to total."""
    from flashstudy.runs import records

    return _Line(_shell(), records.run_dir())


class _Line:
    """The line's state: when it started, when it was last drawn, and where."""

    def __init__(self, shell, folder: Path | None) -> None:
        self.shell, self.folder = shell, folder
        self.start_s, self.drawn_s = time.monotonic(), -1.0
        self.handle = None

    def __call__(self, done: int, total: int, label: str) -> None:
        if not 0 <= done <= total or total < 1:
            raise ValueError(f"progress needs 0 <= done <= total and total > 0, got done {done} of {total}")
        now_s = time.monotonic()
        if 0 < done < total and now_s - self.drawn_s < _SECONDS_BETWEEN_UPDATES:
            return
        self.drawn_s = now_s
        self._draw(done, total, label, now_s - self.start_s)
        if self.folder is not None:
            _write(self.folder, done, total, label, now_s - self.start_s)

    def _draw(self, done: int, total: int, label: str, elapsed_s: float) -> None:
        if self.shell is None:
            _draw_in_terminal(text(done, total, label, elapsed_s), last=done == total)
            return
        from IPython.display import display

        shown = {"text/plain": text(done, total, label, elapsed_s), "text/html": _html(done, total, label, elapsed_s)}
        if self.handle is None:
            self.handle = display(shown, raw=True, metadata=MARK, display_id=True)
        else:
            self.handle.update(shown, raw=True, metadata=MARK)


def text(done: int, total: int, label: str, elapsed_s: float) -> str:
    """The line in words: "[####------] 2 of 5 · decode · 3.1 s"."""
    filled = round(10 * done / total)
    return f"[{'#' * filled}{'-' * (10 - filled)}] {done} of {total} · {label} · {elapsed_s:.1f} s"


def _html(done: int, total: int, label: str, elapsed_s: float) -> str:
    words = f"{done} of {total} · {html.escape(label)} · {elapsed_s:.1f} s"
    return f'<p><progress value="{done}" max="{total}"></progress> {words}</p>'


def _draw_in_terminal(line: str, *, last: bool) -> None:
    stream = sys.stderr
    if stream.isatty():
        stream.write(f"\r\x1b[K{line}" + "\n" * last)
        stream.flush()
    elif last:  # a log file wants one line, not a hundred
        stream.write(line + "\n")


def _write(folder: Path, done: int, total: int, label: str, elapsed_s: float) -> None:
    """progress.json, whole or not at all; a folder that cannot be written must not end a measurement."""
    from flashstudy.runs import folders

    state = {
        "done": done,
        "total": total,
        "label": label,
        "elapsed_s": round(elapsed_s, 1),
        "time": folders.timestamp(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folders.write_json(folder / folders.PROGRESS, state)
    except OSError:
        return


def _shell():
    """The kernel's shell where output is displayed rather than printed, else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell if shell is not None and hasattr(shell, "kernel") else None

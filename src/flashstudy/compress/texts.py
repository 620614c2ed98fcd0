"""Text to measure on: Python's own language reference by default, split so that quality is never judged on text that
calibration or training has seen.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from flashstudy.compress.cache import InputError

TRAIN_SHARE = 0.7


@dataclass(frozen=True)
class Text:
    """A text in two parts by characters: the first 70% to calibrate and train on, the last 30% to judge on."""

    name: str
    train: str
    evaluation: str
    sha256: str


def load_text(spec: str = "pydoc") -> Text:
    """The running CPython's documentation topics in the order of their names ("pydoc"), or any UTF-8 text file."""
    name, content = ("pydoc", _pydoc_topics()) if spec == "pydoc" else _read_text(spec)
    cut = int(len(content) * TRAIN_SHARE)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return Text(name=name, train=content[:cut], evaluation=content[cut:], sha256=digest)


def windows(text_part: str, tokenizer, n_windows: int, window_tokens: int):
    """Token ids [n_windows, window_tokens] (int64), the starts evenly spaced over the text; windows never overlap.

    Tokenized in one piece, without special tokens. Raises InputError when the text is too short.
    """
    import torch

    if n_windows < 1 or window_tokens < 2:
        raise ValueError(f"n_windows {n_windows} and window_tokens {window_tokens} must be at least 1 and 2")
    ids = tokenizer(text_part, add_special_tokens=False, verbose=False)["input_ids"]
    stride = len(ids) // n_windows
    if stride < window_tokens:
        raise InputError(
            f"the text gives {len(ids)} tokens, too few for {n_windows} windows of {window_tokens}: "
            f"at most {len(ids) // window_tokens} windows, or windows of {stride}"
        )
    return torch.stack([torch.tensor(ids[i * stride : i * stride + window_tokens]) for i in range(n_windows)])


def _pydoc_topics() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key].strip() for key in sorted(topics))


def _read_text(spec: str) -> tuple[str, str]:
    if not isinstance(spec, str | Path):
        raise InputError(f"text must be 'pydoc' or a file's path, got {type(spec).__name__} {spec!r}")
    path = Path(spec).expanduser()
    if not path.is_file():
        raise InputError(f"text {str(spec)!r} is neither 'pydoc' nor a file")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"text file {path.name} is not UTF-8: byte {error.start} cannot be read") from None
    if not content.strip():
        raise InputError(f"text file {path.name} is empty")
    return path.name, content

"""Loading without noise: progress bars off, and exactly the known messages of torchao's import dropped.

torchao tries shared objects built for other devices and torch warns about torchao's enums; neither says anything
about the models here, and both would stand in every notebook.
"""

import contextlib
import logging
from collections.abc import Iterator

KNOWN_NOISE = ("Failed to load ", " is an Enum subclass and is now natively supported by torch.compile")
NOISY_LOGGERS = ("torchao", "torch.utils._pytree")


def _is_news(record: logging.LogRecord) -> bool:
    return not any(noise in record.getMessage() for noise in KNOWN_NOISE)


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Drops the messages of KNOWN_NOISE inside the block; everything else passes."""
    for name in NOISY_LOGGERS:
        logging.getLogger(name).addFilter(_is_news)
    try:
        yield
    finally:
        for name in NOISY_LOGGERS:
            logging.getLogger(name).removeFilter(_is_news)


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """`quiet_import`, and transformers without progress bars and below errors silent; its settings come back."""
    from transformers.utils import logging as transformers_logging

    verbosity, had_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with quiet_import():
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def quiet_gguf() -> Iterator[None]:
    """transformers' converter without its progress bar: a widget in a notebook, slow, and without a switch."""
    from transformers import modeling_gguf_pytorch_utils as converter

    bar = converter.tqdm
    converter.tqdm = lambda items, **options: items
    try:
        yield
    finally:
        converter.tqdm = bar

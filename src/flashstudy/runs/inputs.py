"""What a run names outside itself, looked at before it starts: refusing in a kernel takes ten seconds and a folder."""

from collections.abc import Mapping
from typing import Any

from flashstudy.compress.cache import InputError
from flashstudy.runs.schema import RefusedError


def check(values: Mapping[str, Any]) -> None:
    """RefusedError in one line when the model, text or device among these parameters is not to be had here."""
    for name, look in {"model": _model, "text": _text, "device": _device}.items():
        if isinstance(values.get(name), str):
            try:
                look(values[name])
            except InputError as error:
                raise RefusedError(f"parameter {name}: {error}") from None


def _model(spec: str) -> None:
    from flashstudy.compress import checkpoints

    checkpoints.check_spec(spec)


def _text(spec: str) -> None:
    from flashstudy.compress import texts

    texts.load_text(spec)


def _device(device: str) -> None:
    import torch

    kind, _, index = device.partition(":")
    here = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if int(index or 0) >= here.get(kind, 0):
        allowed = ", ".join(name for name, count in here.items() if count)
        raise InputError(f"device {device!r} is not here; allowed: {allowed}")

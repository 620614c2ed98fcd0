"""Ways to bring the same weights from disk into memory, each as the steps that a study times apart.

`write` puts a model, cut to its first layers, on disk as safetensors, as INT8 codes and, where it came as GGUF, as GGUF
again. `steps` gives one way's functions: "load" reads, "convert" is what the weights need before they can multiply;
the last of them returns a Variant. A GGUF file's reading and converting are one call of transformers.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from flashstudy.compress import gguf_cut, prequantized, rewrite, variants
from flashstudy.compress.checkpoints import LoadedModel, in_own_memory
from flashstudy.compress.kernel_table import FLOAT_DTYPES, available_kernels
from flashstudy.compress.kv_cache import make_cache
from flashstudy.compress.linear import CompressedLinear
from flashstudy.compress.quiet import quiet_gguf, quiet_loading
from flashstudy.compress.variants import Variant
from flashstudy.facts.recipes import Recipe, standard

Way = Literal["safetensors", "mapped", "gguf", "quantize", "prequantized", "dequantize"]
WAYS: tuple[str, ...] = get_args(Way)
# Tiles that stay in the cache: the one INT8 path that runs on every CPU and never writes a whole float copy.
INT8 = Recipe("INT8", weight_format="int8", kernel_path="dequantize_then_matmul", kernel="tiled")

NO_POOL = "HF_DEACTIVATE_ASYNC_LOAD"  # Source: transformers 5.24, core_model_loading.py

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class Files:
    """One model in its forms on disk. gguf None: there is none, and why_no_gguf says so."""

    standard: Path
    prequantized: Path
    gguf: Path | None
    why_no_gguf: str = ""

    def of(self, way: str) -> list[Path]:
        """The files that hold the weights which this way reads."""
        if way == "gguf":
            return [self.gguf] if self.gguf else []
        if way in ("prequantized", "dequantize"):
            return prequantized.files(self.prequantized)
        return sorted(self.standard.glob("*.safetensors"))

    def stored_bytes(self, way: str) -> int:
        """Bytes of these files."""
        return sum(path.stat().st_size for path in self.of(way))


def write(loaded: LoadedModel, source: Path, folder: Path, *, n_layers: int) -> Files:
    """The first `n_layers` decoder layers of a loaded model, embedding and head included, in every form.

    `source` is what the model was loaded from; only a GGUF file can become one again, its layers copied as they are.
    Raises ValueError for a model without a language head and for more layers than there are.
    """
    if not loaded.is_causal:
        raise ValueError(f"{loaded.name} has no language head and gives no first token")
    cut = rewrite.first_layers(loaded.model, n_layers)
    with quiet_loading():
        cut.save_pretrained(folder / "standard")
    variant = variants.build(dataclasses.replace(loaded, model=cut), INT8)
    prequantized.save(variant, folder / "prequantized")
    files = Files(folder / "standard", folder / "prequantized", None, f"{loaded.name} did not come as a GGUF file")
    if not source.is_file():
        return files
    (folder / "gguf").mkdir()
    gguf_cut.cut(source, folder / "gguf" / "model.gguf", n_layers=n_layers)
    return Files(files.standard, files.prequantized, folder / "gguf" / "model.gguf")


def steps(way: str, files: Files, dtype: str) -> dict[str, Step]:
    """The steps of one way by name, each given what the one before returned; the last one's result is a Variant.

    Weights end in this process's own memory, as a model's that is used again and again; only "mapped" leaves them in
    the file, to be read when they are first multiplied. "dequantize" keeps the codes beside the floats made of them,
    as a layer does that dequantizes once and goes on holding what it was loaded with.
    """
    match way:
        case "safetensors":
            return {"load": lambda _: dense(in_own_memory(from_safetensors(files.standard, dtype)))}
        case "mapped":
            return {"load": lambda _: dense(from_safetensors(files.standard, dtype))}
        case "gguf":
            return {"load": lambda _: dense(_from_gguf(files.gguf, dtype))}
        case "quantize":
            return {"load": lambda _: from_safetensors(files.standard, dtype), "convert": _quantize}
        case "prequantized":
            return {"load": lambda _: prequantized.load(files.prequantized)}
        case "dequantize":
            return {"load": lambda _: prequantized.load(files.prequantized), "convert": _dequantize}
    raise ValueError(f"way {way!r} is not one of {', '.join(WAYS)}")


def import_libraries(way: str, files: Files) -> None:
    """Import what the steps of a way import late, so that what comes after measures weights and not libraries."""
    with quiet_loading(), torch.device("meta"):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(files.standard, trust_remote_code=False, local_files_only=True)
        AutoModelForCausalLM.from_config(config)
    if way == "gguf":
        import gguf  # noqa: F401
    elif way in ("quantize", "prequantized", "dequantize"):
        available_kernels(INT8.weight_format)  # asks torchao once whether it can run


def from_safetensors(folder: Path, dtype: str) -> nn.Module:
    """The model of a folder as transformers loads it: tensors of the file's own dtype lie in the mapped file."""
    return _from_pretrained(folder, dtype, use_safetensors=True)


def _from_gguf(path: Path, dtype: str) -> nn.Module:
    with quiet_gguf():
        return _from_pretrained(path.parent, dtype, gguf_file=path.name)


def _from_pretrained(folder: Path, dtype: str, **options: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with quiet_loading(), _one_reader():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), trust_remote_code=False, local_files_only=True, **options
        )
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def _one_reader() -> Iterator[None]:
    """transformers without its pool of reading threads, which push each other off the cores of a small machine.

    On one mapped file they gain nothing, and every other step here runs on as many threads as it was told.
    """
    before = os.environ.get(NO_POOL)
    os.environ[NO_POOL] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_POOL]
        else:
            os.environ[NO_POOL] = before


def dense(model: nn.Module) -> Variant:
    """A float model as a Variant."""
    weight_format = next(name for name, dtype in FLOAT_DTYPES.items() if dtype == model.dtype)
    new_cache = functools.partial(make_cache, "none", "dense", model.config)
    return Variant(model, standard(weight_format), new_cache, variants.stored_bytes(model), 1.0)


def _quantize(model: nn.Module) -> Variant:
    """The model with INT8 codes in its projections, their float weights left in the file that they are mapped from."""
    variant = variants.of_model(model, INT8)
    in_own_memory(variant.model)
    return variant


def _dequantize(variant: Variant) -> Variant:
    """The variant's own model with float weights beside the codes they were made of; its products use the floats."""
    model, dtype = variant.model, variant.model.dtype
    for name in [name for name, module in model.named_modules() if isinstance(module, CompressedLinear)]:
        codes = model.get_submodule(name)
        weight = codes.product.store.rows(0, codes.out_features, dtype)
        linear = nn.Linear(codes.in_features, codes.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if codes.bias is not None:
            linear.bias = nn.Parameter(codes.bias, requires_grad=False)
        linear.codes = codes
        model.set_submodule(name, linear)
    return dense(model)

"""Is a model folder whole and sound? Asked before anything is loaded from it, because transformers fills what is
missing with random numbers and a single non-finite weight turns every later figure into NaN.
"""

import hashlib
import json
import math
import struct
from pathlib import Path

from flashstudy.compress.cache import InputError, remembered, sha256_of

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
INDEX_NAME = "model.safetensors.index.json"


def check_folder(folder: Path) -> str:
    """SHA-256 over the folder's weights, after they were checked: complete, readable, finite. Slow only the first time.

    Raises InputError (one line) for: no config.json, weights quantized by a method that cannot be run here, pickled
    weights only, a shard that is listed but missing or cut short, a tensor with NaN or infinity (by name).
    """
    config = read_json(folder / "config.json")
    refuse_quantized(config, folder)
    shards = weight_files(folder)
    for shard in shards:
        check_complete(shard)
    return remembered("finite and sha256", shards, lambda: _finite_digest(shards))


def read_json(path: Path) -> dict:
    """Parsed JSON object of `path`."""
    if not path.is_file():
        raise InputError(f"folder {path.parent} has no {path.name}: a model folder has config.json and *.safetensors")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def refuse_quantized(config: dict, folder: Path) -> None:
    """Raise InputError naming the method when config.json says that the stored weights are quantized."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise InputError(
            f"model {folder.name} is stored quantized by {method!r}, which cannot be taken apart here: "
            "use the unquantized safetensors or a GGUF file; flashstudy quantizes it itself"
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, all present; in the order of their names."""
    index_path = folder / INDEX_NAME
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{index_path} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise InputError(
                f"model {folder.name} lacks {len(missing)} of {len(names)} shards: {', '.join(missing[:3])}"
            )
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    pickled = sorted(path.name for path in folder.glob("*.bin")) or sorted(path.name for path in folder.glob("*.pt*"))
    hint = f" (only {pickled[0]}: pickled weights are not read, because they can run code)" if pickled else ""
    raise InputError(f"folder {folder} has no model.safetensors{hint}")


def check_complete(path: Path) -> None:
    """Raise InputError when a safetensors file is shorter or longer than its own header says."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        (header_bytes,) = struct.unpack("<Q", handle.read(8)) if size >= 8 else (0,)
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
            raise InputError(f"{path.name} is no safetensors file, or cut short ({size} bytes)")
        try:
            header = json.loads(handle.read(header_bytes))
        except ValueError:
            raise InputError(f"{path.name} has no readable safetensors header") from None
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + header_bytes + max(ends, default=0)
    if size != expected:
        raise InputError(f"{path.name} is not whole: {size} bytes, its header says {expected}")


def _finite_digest(shards: list[Path]) -> str:
    from safetensors import safe_open

    for shard in shards:
        with safe_open(shard, framework="pt") as tensors:
            for name in tuple(tensors.keys()):
                _refuse_non_finite(name, tensors.get_tensor(name), shard)
    digests = [sha256_of(shard) for shard in shards]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _refuse_non_finite(name: str, tensor, shard: Path) -> None:
    if not tensor.is_floating_point() or not tensor.numel():
        return
    if tensor.element_size() == 1:  # fp8 has no min and max of its own
        tensor = tensor.float()
    low, high = (value.item() for value in tensor.aminmax())  # NaN wins over every number
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InputError(f"tensor {name} in {shard.name} holds NaN or infinity: the checkpoint is damaged")

"""What a checkpoint holds on disk, told from headers alone: number formats, bytes, and which share is quantized.

Nothing is loaded. A GGUF file names a block type for each tensor, a safetensors file a dtype; where that is a container
of narrower codes (I32, U8), `quantization_config` in config.json says how wide these are. Scales, zero points and
indices count as bytes, not as weights.
"""

import json
import math
import mmap
import re
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashstudy.compress import gguf_header
from flashstudy.compress.cache import InputError
from flashstudy.compress.folders import check_complete, read_json, weight_files

PLAIN_GGUF = ("F16", "F32", "F64", "BF16")  # all other GGUF types are quantized or indices
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
CONTAINERS = ("U8", "I16", "U16", "I32", "U32", "I64", "U64")  # hold several codes; I8, F8 and F4 are codes themselves
SCALES = "scales, zero points, indices"
# Names that gptq, awq, bitsandbytes, compressed-tensors, fp8, mxfp4, hqq and torchao give to what is no weight.
SCALE_NAME = re.compile(
    r"(scales?|scale_inv|scale_2|scale_and_zero|zeros|zero_point|g_idx|absmax|quant_map|SCB|weight_shape|"
    r"weight_format|quant_state\.\w+)$"
)
WIDTH_NAMES = ("bits", "w_bit", "nbits", "num_bits", "weight_bits")
NOT_OF_WEIGHTS = ("input_activations", "output_activations", "kv_cache_scheme")
TOKEN_TABLE = re.compile(r"token_embd|embed_tokens|word_embeddings|\bwte\b|embed_in")
OTHER_TABLE = re.compile(r"position|token_type|\bwpe\b")
HEAD = re.compile(r"^output\.weight$|lm_head|embed_out")


@dataclass(frozen=True)
class StoredFormat:
    """One number format on disk; n_weights counts values, 0 for scales and indices."""

    name: str
    quantized: bool
    n_tensors: int
    n_weights: int
    n_bytes: int


@dataclass(frozen=True)
class Stored:
    """A checkpoint's tensors by format, most bytes first. method: quant_method of the config, "" without one.

    multiplied_bits: bits a weight, scales included, of what takes part in products; a token table only when it is
    also the head.
    """

    container: str
    method: str
    formats: tuple[StoredFormat, ...]
    multiplied_bits: float

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.n_bytes for one in self.formats)

    @property
    def n_weights(self) -> int:
        """Values of all tensors, scales and indices left out."""
        return sum(one.n_weights for one in self.formats)

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight over the whole checkpoint, scales included."""
        return 8 * self.n_bytes / max(self.n_weights, 1)

    @property
    def quantized_share(self) -> float:
        """Share of the weights that is stored quantized."""
        return sum(one.n_weights for one in self.formats if one.quantized) / max(self.n_weights, 1)


@dataclass(frozen=True)
class _Tensor:
    name: str
    format: str
    quantized: bool
    n_weights: int
    n_bytes: int
    n_dims: int


def inspect(path: Path) -> Stored:
    """What is stored in a GGUF file or a folder of safetensors. InputError for files that are not whole."""
    if path.is_file():
        return _summary("GGUF", "", _gguf_tensors(path), is_tied=False)
    config = read_json(path / "config.json")
    quantization = config.get("quantization_config") or config.get("compression_config") or {}
    method, bits = _method(quantization), _code_bits(quantization)
    tensors = [
        _from_header(name, entry, method, bits)
        for shard in weight_files(path)
        for name, entry in _header(shard).items()
        if name != "__metadata__"
    ]
    return _summary("safetensors", method, tensors, is_tied=bool(config.get("tie_word_embeddings")))


def _summary(container: str, method: str, tensors: list[_Tensor], *, is_tied: bool) -> Stored:
    groups = defaultdict(list)
    for tensor in tensors:
        groups[tensor.format, tensor.quantized].append(tensor)
    formats = [
        StoredFormat(*key, len(group), sum(t.n_weights for t in group), sum(t.n_bytes for t in group))
        for key, group in groups.items()
    ]
    if not any(one.n_weights for one in formats):
        raise InputError(f"this {container} checkpoint holds no weights")
    table_is_head = is_tied or not any(HEAD.search(tensor.name) for tensor in tensors)
    multiplied = [tensor for tensor in tensors if _is_multiplied(tensor, table_is_head)]
    bits = 8 * sum(t.n_bytes for t in multiplied) / max(sum(t.n_weights for t in multiplied), 1)
    ordered = sorted(formats, key=lambda one: one.n_bytes, reverse=True)
    return Stored(container, method, tuple(ordered), bits)


def _is_multiplied(tensor: _Tensor, table_is_head: bool) -> bool:
    if OTHER_TABLE.search(tensor.name):
        return False
    if TOKEN_TABLE.search(tensor.name):
        return table_is_head
    return tensor.n_dims > 1 or tensor.quantized


def _gguf_tensors(path: Path) -> list[_Tensor]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
            header, n_bytes = gguf_header.read(blob, path.name), len(blob)
        found = [(_from_gguf(one), header.data_start + one.offset) for one in header.tensors]
    except ValueError as error:  # an empty file and a type that the package does not know are among them
        raise InputError(f"file {path.name} is no whole GGUF file: {error}") from None
    for tensor, start in found:
        if start + tensor.n_bytes > n_bytes:
            raise InputError(f"file {path.name} is no whole GGUF file: it ends inside {tensor.name}")
    return [tensor for tensor, _ in found]


def _from_gguf(one: gguf_header.Tensor) -> _Tensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType(one.type_number)
    n_values, (block, block_bytes) = math.prod(one.shape), GGML_QUANT_SIZES[kind]
    is_index = kind.name in ("I16", "I32", "I64")
    quantized = kind.name not in PLAIN_GGUF and not is_index
    return _Tensor(
        name=one.name.decode(errors="replace"),
        format=kind.name,
        quantized=quantized,
        n_weights=0 if is_index else n_values,
        n_bytes=n_values // block * block_bytes,
        n_dims=len(one.shape),
    )


def _header(path: Path) -> dict[str, dict]:
    """The entries of a safetensors file that was checked to be whole."""
    check_complete(path)
    with path.open("rb") as handle:
        (header_bytes,) = struct.unpack("<Q", handle.read(8))
        return json.loads(handle.read(header_bytes))


def _from_header(name: str, entry: dict, method: str, bits: int) -> _Tensor:
    dtype, shape = entry["dtype"], entry["shape"]
    start, stop = entry["data_offsets"]
    n_bytes, n_values = stop - start, math.prod(shape)
    if method and SCALE_NAME.search(name):
        return _Tensor(name, SCALES, True, 0, n_bytes, len(shape))
    if dtype in PLAIN_DTYPES:
        return _Tensor(name, dtype, False, n_values, n_bytes, len(shape))
    if dtype in CONTAINERS and method and bits:
        return _Tensor(name, f"{bits}-bit in {dtype}", True, 8 * n_bytes // bits, n_bytes, len(shape))
    if dtype in (*CONTAINERS, "BOOL") and not (method or dtype == "U8"):
        return _Tensor(name, dtype, False, 0, n_bytes, len(shape))  # positions and other tables of integers
    return _Tensor(name, dtype, True, n_values, n_bytes, len(shape))


def _method(quantization: Any) -> str:
    if not isinstance(quantization, dict):
        return str(quantization)
    return str(quantization.get("quant_method", "unnamed")) if quantization else ""


def _code_bits(quantization: Any) -> int:
    """Width of a stored code as the config states it; 0 where it does not."""
    if not isinstance(quantization, dict):
        return 0
    if stated := _stated_width(quantization):
        return stated
    if quantization.get("load_in_8bit"):
        return 8
    text = json.dumps(quantization).lower()
    return 4 if quantization.get("load_in_4bit") or re.search(r"mxfp4|nvfp4|int4|uint4|\bw4a", text) else 0


def _stated_width(quantization: dict) -> int:
    """The first width named anywhere in the config, that of activations left out."""
    for name in WIDTH_NAMES:
        if isinstance(quantization.get(name), int):
            return quantization[name]
    inner = (value for key, value in quantization.items() if key not in NOT_OF_WEIGHTS and isinstance(value, dict))
    return next((width for width in map(_stated_width, inner) if width), 0)

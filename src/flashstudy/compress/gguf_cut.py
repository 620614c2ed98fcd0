"""A GGUF file with fewer layers: the header rewritten, every kept tensor's blocks copied as they are.

The `gguf` package would do it too, but walks through the tokenizer's hundred thousand strings in Python objects, which
takes longer than everything else here. Source of the format: docs/gguf.md of ggml, versions 2 and 3.
"""

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path

MAGIC, VERSIONS = b"GGUF", (2, 3)
DEFAULT_ALIGNMENT = 32
UINT32, STRING, ARRAY = 4, 8, 9
WIDTHS = {0: 1, 1: 1, 7: 1, 2: 2, 3: 2, UINT32: 4, 5: 4, 6: 4, 10: 8, 11: 8, 12: 8}
LAYER = re.compile(rb"blk\.(\d+)\.")


@dataclass(frozen=True)
class _Field:
    """One entry of the metadata: its name, its kind, and where it and its value lie."""

    name: bytes
    kind: int
    start: int
    value: int
    end: int


@dataclass(frozen=True)
class _Tensor:
    """One tensor: its name, its description up to the offset, and where its blocks begin in the data."""

    name: bytes
    described: bytes
    offset: int


def cut(source: Path, target: Path, *, n_layers: int) -> None:
    """Copy the first `n_layers` layers of a GGUF file, and all that is outside layers, without touching the values.

    The tokenizer's lists stay behind: a loader of weights needs none of them, and transformers parses them in seconds.
    Raises ValueError for a file that is no GGUF file of a known version or does not count its layers.
    """
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
        if blob[:4] != MAGIC or struct.unpack_from("<I", blob, 4)[0] not in VERSIONS:
            raise ValueError(f"{source.name} is no GGUF file of version {' or '.join(map(str, VERSIONS))}")
        version, n_tensors, n_fields = struct.unpack_from("<IQQ", blob, 4)
        fields, end = _fields(blob, n_fields)
        tensors, end = _tensors(blob, end, n_tensors)
        alignment = _alignment(blob, fields)
        ends = _ends(tensors, len(blob) - _padded(end, alignment))
        kept = [tensor for tensor in tensors if _layer(tensor) < n_layers]
        metadata = _metadata(blob, fields, n_layers, source.name)
        infos, offset = [], 0
        for tensor in kept:
            infos.append(tensor.described + struct.pack("<Q", offset))
            offset = _padded(offset + ends[tensor.offset] - tensor.offset, alignment)
        header = MAGIC + struct.pack("<IQQ", version, len(kept), len(metadata)) + b"".join([*metadata, *infos])
        with target.open("wb") as written:
            _write_padded(written, header, alignment)
            for tensor in kept:
                start = _padded(end, alignment)
                _write_padded(written, blob[start + tensor.offset : start + ends[tensor.offset]], alignment)


def _fields(blob: mmap.mmap, n_fields: int) -> tuple[list[_Field], int]:
    """Every entry of the metadata, and where they end."""
    fields, position = [], 24
    for _ in range(n_fields):
        name, after = _string(blob, position)
        (kind,) = struct.unpack_from("<I", blob, after)
        end = _end_of(blob, after + 4, kind)
        fields.append(_Field(name, kind, position, after + 4, end))
        position = end
    return fields, position


def _tensors(blob: mmap.mmap, position: int, n_tensors: int) -> tuple[list[_Tensor], int]:
    """Every tensor's description in the order of the file, and where they end."""
    tensors = []
    for _ in range(n_tensors):
        name, after = _string(blob, position)
        (n_dimensions,) = struct.unpack_from("<I", blob, after)
        offset_at = after + 4 + 8 * n_dimensions + 4  # the sizes, then the type
        (offset,) = struct.unpack_from("<Q", blob, offset_at)
        tensors.append(_Tensor(name, blob[position:offset_at], offset))
        position = offset_at + 8
    return tensors, position


def _metadata(blob: mmap.mmap, fields: list[_Field], n_layers: int, file_name: str) -> list[bytes]:
    """The entries as they are written again: as they were, with the new number of layers, without tokenizer lists."""
    counts = [field for field in fields if field.name.endswith(b".block_count") and field.kind == UINT32]
    if len(counts) != 1:
        raise ValueError(f"{file_name} does not say how many layers it has")
    return [
        blob[field.start : field.value] + struct.pack("<I", n_layers)
        if field is counts[0]
        else blob[field.start : field.end]
        for field in fields
        if not (field.kind == ARRAY and field.name.startswith(b"tokenizer."))
    ]


def _alignment(blob: mmap.mmap, fields: list[_Field]) -> int:
    found = [field for field in fields if field.name == b"general.alignment" and field.kind == UINT32]
    return struct.unpack_from("<I", blob, found[0].value)[0] if found else DEFAULT_ALIGNMENT


def _ends(tensors: list[_Tensor], data_bytes: int) -> dict[int, int]:
    """Where the blocks that begin at an offset end: at the next tensor's, or with the file; padding included."""
    starts = sorted(tensor.offset for tensor in tensors)
    return dict(zip(starts, [*starts[1:], data_bytes], strict=True))


def _layer(tensor: _Tensor) -> int:
    """The layer a tensor belongs to, -1 outside layers."""
    found = LAYER.match(tensor.name)
    return int(found[1]) if found else -1


def _string(blob: mmap.mmap, position: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", blob, position)
    return blob[position + 8 : position + 8 + length], position + 8 + length


def _end_of(blob: mmap.mmap, position: int, kind: int) -> int:
    """Where a value of this kind that begins at `position` ends."""
    if kind in WIDTHS:
        return position + WIDTHS[kind]
    if kind == STRING:
        return position + 8 + struct.unpack_from("<Q", blob, position)[0]
    if kind != ARRAY:
        raise ValueError(f"a GGUF value of kind {kind} is unknown")
    element, count = struct.unpack_from("<IQ", blob, position)
    position += 12
    if element in WIDTHS:
        return position + count * WIDTHS[element]
    for _ in range(count):
        position = _end_of(blob, position, element)
    return position


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment


def _write_padded(file, content: bytes, alignment: int) -> None:
    file.write(content)
    file.write(bytes(_padded(file.tell(), alignment) - file.tell()))

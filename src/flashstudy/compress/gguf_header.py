"""The header of a GGUF file: its metadata entries and its tensors, told where they lie, no value read.

The `gguf` package's reader walks through the tokenizer's hundred thousand strings in Python objects, which takes
seconds; this takes a tenth of one. Source of the format: docs/gguf.md of ggml, versions 2 and 3.
"""

import mmap
import struct
from dataclasses import dataclass

MAGIC, VERSIONS = b"GGUF", (2, 3)
DEFAULT_ALIGNMENT = 32
UINT32, STRING, ARRAY = 4, 8, 9
WIDTHS = {0: 1, 1: 1, 7: 1, 2: 2, 3: 2, UINT32: 4, 5: 4, 6: 4, 10: 8, 11: 8, 12: 8}


@dataclass(frozen=True)
class Field:
    """One entry of the metadata: its name, its kind, and where it and its value lie."""

    name: bytes
    kind: int
    start: int
    value: int
    end: int


@dataclass(frozen=True)
class Tensor:
    """One tensor: name, sizes, number of its type, description up to the offset, where its blocks begin in the data."""

    name: bytes
    shape: tuple[int, ...]
    type_number: int
    described: bytes
    offset: int


@dataclass(frozen=True)
class Header:
    """Everything before the data, which begins at `data_start`."""

    version: int
    fields: list[Field]
    tensors: list[Tensor]
    alignment: int
    data_start: int


def read(blob: mmap.mmap, file_name: str) -> Header:
    """The header of a mapped file. ValueError where it is no GGUF file of a known version, or ends too early."""
    try:
        if blob[:4] != MAGIC or struct.unpack_from("<I", blob, 4)[0] not in VERSIONS:
            raise ValueError(f"{file_name} is no GGUF file of version {' or '.join(map(str, VERSIONS))}")
        version, n_tensors, n_fields = struct.unpack_from("<IQQ", blob, 4)
        fields, end = _fields(blob, n_fields)
        tensors, end = _tensors(blob, end, n_tensors)
        alignment = _alignment(blob, fields)
    except (struct.error, IndexError) as error:
        raise ValueError(f"{file_name} ends inside its header") from error
    return Header(version, fields, tensors, alignment, padded(end, alignment))


def padded(n_bytes: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return -(-n_bytes // alignment) * alignment


def _fields(blob: mmap.mmap, n_fields: int) -> tuple[list[Field], int]:
    """Every entry of the metadata, and where they end."""
    fields, position = [], 24
    for _ in range(n_fields):
        name, after = _string(blob, position)
        (kind,) = struct.unpack_from("<I", blob, after)
        end = _end_of(blob, after + 4, kind)
        fields.append(Field(name, kind, position, after + 4, end))
        position = end
    return fields, position


def _tensors(blob: mmap.mmap, position: int, n_tensors: int) -> tuple[list[Tensor], int]:
    """Every tensor's description in the order of the file, and where they end."""
    tensors = []
    for _ in range(n_tensors):
        name, after = _string(blob, position)
        (n_dimensions,) = struct.unpack_from("<I", blob, after)
        shape = struct.unpack_from(f"<{n_dimensions}Q", blob, after + 4)
        type_number, offset = struct.unpack_from("<IQ", blob, after + 4 + 8 * n_dimensions)
        offset_at = after + 4 + 8 * n_dimensions + 4
        tensors.append(Tensor(name, shape, type_number, blob[position:offset_at], offset))
        position = offset_at + 8
    return tensors, position


def _alignment(blob: mmap.mmap, fields: list[Field]) -> int:
    found = [field for field in fields if field.name == b"general.alignment" and field.kind == UINT32]
    return struct.unpack_from("<I", blob, found[0].value)[0] if found else DEFAULT_ALIGNMENT


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

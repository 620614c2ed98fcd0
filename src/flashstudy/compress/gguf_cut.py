"""A GGUF file with fewer layers: the header rewritten, every kept tensor's blocks copied as they are."""

import mmap
import re
import struct
from pathlib import Path

from flashstudy.compress import gguf_header
from flashstudy.compress.gguf_header import ARRAY, MAGIC, UINT32, Field, Tensor, padded

LAYER = re.compile(rb"blk\.(\d+)\.")


def cut(source: Path, target: Path, *, n_layers: int) -> None:
    """Copy the first `n_layers` layers of a GGUF file, and all that is outside layers, without touching the values.

    The tokenizer's lists stay behind: a loader of weights needs none of them, and transformers parses them in seconds.
    Raises ValueError for a file that is no GGUF file of a known version or does not count its layers.
    """
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
        header = gguf_header.read(blob, source.name)
        alignment, start = header.alignment, header.data_start
        ends = _ends(header.tensors, len(blob) - start)
        kept = [tensor for tensor in header.tensors if _layer(tensor) < n_layers]
        metadata = _metadata(blob, header.fields, n_layers, source.name)
        infos, offset = [], 0
        for tensor in kept:
            infos.append(tensor.described + struct.pack("<Q", offset))
            offset = padded(offset + ends[tensor.offset] - tensor.offset, alignment)
        counts = struct.pack("<IQQ", header.version, len(kept), len(metadata))
        with target.open("wb") as written:
            _write_padded(written, MAGIC + counts + b"".join([*metadata, *infos]), alignment)
            for tensor in kept:
                _write_padded(written, blob[start + tensor.offset : start + ends[tensor.offset]], alignment)


def _metadata(blob: mmap.mmap, fields: list[Field], n_layers: int, file_name: str) -> list[bytes]:
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


def _ends(tensors: list[Tensor], data_bytes: int) -> dict[int, int]:
    """Where the blocks that begin at an offset end: at the next tensor's, or with the file; padding included."""
    starts = sorted(tensor.offset for tensor in tensors)
    return dict(zip(starts, [*starts[1:], data_bytes], strict=True))


def _layer(tensor: Tensor) -> int:
    """The layer a tensor belongs to, -1 outside layers."""
    found = LAYER.match(tensor.name)
    return int(found[1]) if found else -1


def _write_padded(file, content: bytes, alignment: int) -> None:
    file.write(content)
    file.write(bytes(padded(file.tell(), alignment) - file.tell()))

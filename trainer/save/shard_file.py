"""A safetensors file that is hashed while it is written, and memory for the copies of what is written.

    8 bytes: length of the header │ header: JSON, spaces to a multiple of 8 │ tensors, widest dtype first, then by name

The digest is of the bytes that were meant, not of the file read again: a disk that keeps other bytes is found by
whoever reads it. The file equals that of the safetensors library byte for byte, which hashes nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import blake3
import torch
from torch import Tensor

from common import durable
from common.weights import FileInfo
from model import devices

Bytes = bytes | memoryview
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class HostCopies:
    """Copies of tensors in memory that is used again for the next version: fresh pages cost more than the copy itself.

    Those of a GPU's tensors are pinned, so that all are on their way at once; `wait` until they are there.
    """

    def __init__(self) -> None:
        self._of: dict[str, Tensor] = {}
        self._is_pinned = False

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Overwrites the copy of this name."""
        on_gpu, into = devices.is_accelerator(tensor.device), self._of.get(name)
        self._is_pinned |= on_gpu
        if into is None or (into.shape, into.dtype) != (tensor.shape, tensor.dtype):
            into = self._of[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        return into.copy_(tensor.detach(), non_blocking=on_gpu)

    def wait(self) -> None:
        if self._is_pinned:
            devices.synchronize()


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> FileInfo:
    """Writes contiguous CPU tensors, to the disk. Raises OSError."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    parts: list[Bytes] = [_header({name: tensors[name] for name in names})]
    parts += [_bytes_of(tensors[name]) for name in names]
    with ThreadPoolExecutor(1) as pool, open(path, "wb") as file:
        digest = pool.submit(_digest, parts)
        for part in parts:
            file.write(part)
        file.flush()
        durable.file_operation("fsync", path)
        os.fsync(file.fileno())
    return FileInfo(sum(len(part) for part in parts), digest.result())


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _digest(parts: Sequence[Bytes]) -> str:
    hasher = blake3.blake3()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()

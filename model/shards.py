"""The tensors of a safetensors file in a mapping that somebody else has read already, without a second one.

The library maps a file anew each time it opens it, and mapping a gigabyte of pages takes 0.1 to 0.2 s.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from common.verified_copy import map_privately
from common.weights import BadWeights, tensor_places

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}


def tensors_of(path: Path, mapped: mmap.mmap | None = None) -> dict[str, Tensor]:
    """Views of the file's mapping, which live as long as one of them. Raises BadWeights if it is no such file."""
    places = tensor_places(path)
    if mapped is None:
        with open(path, "rb") as file:
            mapped = map_privately(file)
    octets = torch.frombuffer(mapped, dtype=torch.uint8)
    if unknown := sorted({info.dtype for info, _ in places.values()} - DTYPES.keys()):
        raise BadWeights(f"{path.name} has numbers of the dtype {unknown[0]}, which no policy has")
    return {name: octets[where].view(DTYPES[info.dtype]).view(info.shape) for name, (info, where) in places.items()}

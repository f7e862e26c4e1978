"""The difference of two files of the same size: their XOR, compressed with zstd, piece by piece.

    for each 8 MiB of both files: bytes that follow (4) │ zstd(old XOR new)

A step of 1e-6 changes few bfloat16 weights: the rest of the XOR is zeros. The result is not verified: its tensors have
checksums (weights.py).
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

SUFFIX = ".delta"
_PIECE = 8 << 20


def _codec() -> Any:
    import pyarrow

    return pyarrow.Codec("zstd", compression_level=1)


def pack(old: memoryview, new: memoryview) -> Iterator[bytes]:
    assert len(old) == len(new), f"files of {len(old)} and {len(new)} bytes have no difference"
    codec = _codec()
    for start in range(0, len(new), _PIECE):
        before, after = (np.frombuffer(data[start : start + _PIECE], np.uint8) for data in (old, new))
        packed = codec.compress(before ^ after, asbytes=True)
        yield len(packed).to_bytes(4, "little") + packed


def unpack(deltas: Sequence[Path], old: BinaryIO) -> Iterator[bytes]:
    """Yields `old` with all deltas applied, in pieces. Raises ValueError unless each is whole and fits its size."""
    position = 0
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(path, "rb")) for path in deltas]
        while piece := os.pread(old.fileno(), _PIECE, position):
            position += len(piece)
            for file in files:
                packed = file.read(size := int.from_bytes(file.read(4), "little"))
                try:
                    if len(packed) < size:
                        raise OSError(f"{len(packed)} bytes of {size}")
                    xor = _codec().decompress(packed, len(piece))
                except OSError as error:
                    raise ValueError(f"{file.name} is damaged or cut off: {error}") from None
                piece = (np.frombuffer(piece, np.uint8) ^ np.frombuffer(xor, np.uint8)).tobytes()
            yield piece
        if longer := [file.name for file in files if file.read(1)]:
            raise ValueError(f"{longer[0]} is of a longer file")

"""Conversion of a group of rollouts to the header and arrays that common/wire/wire.py sends, and back.

In the header each array of a Group is its dtype and shape, ["<i4", [5]]. Its bytes are in the frame of arrays, in the
order of the header, little-endian and without gaps. Reading copies nothing but the PNGs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.types import Group

Frame = bytes | memoryview

_DTYPES = {"i": "<i4", "f": "<f4"}  # as signed integers and floats are sent; unsigned integers keep their size
_SENT_DTYPES = ("<i4", "<f4", "|u1", "<u2")
_Shape = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=1)]


class GroupBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="group"):
    """A group as it is sent: its PNGs are beside it, because msgspec writes `bytes` into the header."""

    group: Group
    pngs: tuple[NDArray[np.uint8], ...] = ()

    @classmethod
    def of(cls, group: Group) -> GroupBody:
        bare = tuple(replace(image, png=b"") for image in group.images)
        return cls(replace(group, images=bare), tuple(np.frombuffer(image.png, np.uint8) for image in group.images))

    def whole(self) -> Group:
        """Returns the group with its PNGs. Raises ValueError if there are not as many as images."""
        images = zip(self.group.images, self.pngs, strict=True)
        return replace(self.group, images=tuple(replace(image, png=png.tobytes()) for image, png in images))


def array_writer(parts: list[bytes]) -> Callable[[Any], Any]:
    """Returns msgspec's hook for numpy's numbers and arrays; it appends the bytes of arrays to `parts`."""

    def write(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return float(value)
        array = value.astype(_DTYPES.get(value.dtype.kind, f"<u{value.itemsize}"), copy=False)
        parts.append(array.tobytes())
        return array.dtype.str, array.shape

    return write


class ArrayReader:
    """msgspec's hook that reads arrays in the order of the header; `num_bytes` counts those that it has read."""

    def __init__(self, arrays: Frame) -> None:
        self._arrays, self.num_bytes = arrays, 0

    def __call__(self, kind: Any, given: Any) -> NDArray[Any]:
        """Returns the array. Raises ValueError or OverflowError for what is not of this kind or not in the frame."""
        name, shape = msgspec.convert(given, tuple[str, _Shape])
        [wanted] = get_args(get_args(kind)[1])  # NDArray[np.int32] is np.ndarray[shape, np.dtype[np.int32]]
        if name not in _SENT_DTYPES or not np.issubdtype(name, wanted):
            raise ValueError(f"an array of {name}, expected {wanted.__name__}")
        start, count, dtype = self.num_bytes, math.prod(shape), np.dtype(name)
        self.num_bytes += count * dtype.itemsize
        return np.frombuffer(self._arrays, dtype, count, start).reshape(shape)

"""Checksums of tensors, computed on a tensor's own device, that prove that an engine holds the weights of a version.

    c(x) = ( Σ_k g_k Σ_i a_i · w_ki ,  Σ_k g_k Σ_i a_i · (w_ki >> 32) )      both modulo 2^64, 32 hexadecimal digits

w are the raw bits of x as 64-bit words, chunk k of 2^15 words after chunk k − 1, zeros at the end; a_i and g_k are odd
numbers of 64 bits that splitmix64 makes of the position. All sums are of integers, and independent of order: CPU and
GPU, one thread or many, agree. Every word has a weight of its own, so swapped rows or halves change the sum.

Reliability: two tensors differ in the upper half of some word, or nowhere but in lower halves. In the first case the
second sum, in the other the first one, adds numbers a_i · d_i with 0 < |d_i| < 2^32: one of them alone is never zero
modulo 2^64, because a_i is odd, and several cancel for one in 2^32 choices of the weights. The first sum alone would
not do: sign bits that flip at the top of two words add 2^63 twice. The sums detect mistakes; the mode of the folder
(0700) and the SHA-256 of the manifest protect against intent.
"""

import contextlib
from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from common.files.weights import TensorInfo
from model import devices

ZEROS = "0" * 32  # the checksum of zeros
_CHUNK = 1 << 15  # words, 256 KiB
_DEVICE_CHUNKS = 1 << 8  # summed at once on a GPU, in 128 MiB
_HOST_CHUNKS = 1 << 3  # summed at once on a CPU, where 2 MiB stay in its caches: five times as fast


def describe(tensor: Tensor) -> TensorInfo:
    sums = Checksums()
    sums.add("", tensor)
    return sums.infos()[""]


def checksum(tensor: Tensor) -> str:
    """Returns 32 hexadecimal digits. Views of the same bits in any shape and dtype have the same checksum."""
    return describe(tensor).checksum


def unlike(expected: Iterable[tuple[str, Tensor, str]], device: torch.device | None = None) -> set[str]:
    """Returns the names of tensors that have another checksum, after one wait. expected: (name, tensor, checksum)."""
    sums, wanted = Checksums(device), dict[str, str]()
    for name, tensor, digits in expected:
        sums.add(name, tensor)
        wanted[name] = digits
    return {name for name, info in sums.infos().items() if info.checksum != wanted[name]}


class Checksums:
    """The checksums of named tensors, for which an accelerator is waited for once: when they are read.

    Tensors of any device are copied behind one another, each from a chunk on, into one buffer, which is summed when it
    is full. An accelerator so runs one operator for most tensors and a dozen for each buffer, in 128 MiB.
    If the accelerator's memory runs out, the CPU makes the sums.
    """

    def __init__(self, device: torch.device | None = None, with_finite: bool = False):
        """device: the one that sums, by default the first tensor's. with_finite: looks for NaN and infinite numbers."""
        self._device, self._with_finite = device, with_finite
        self._forms: dict[str, tuple[str, list[int], int]] = {}  # dtype, shape, number of chunks
        self._sums: list[Tensor] = []  # [chunks, 3]: the two inner sums of each chunk, and whether it is finite
        self._buffer = torch.empty(0, _CHUNK, dtype=torch.int64)  # [chunks, _CHUNK] int64, zeros from chunk `_used` on
        self._used, self._dtype = 0, torch.uint8
        self.not_finite: list[str] = []  # names of tensors, once the infos are read

    def add(self, name: str, tensor: Tensor) -> None:
        assert name not in self._forms, f"{name} was added before"
        if not len(self._buffer):
            self._buffer = _empty_buffer(self._device or tensor.device)
        if tensor.dtype != self._dtype and self._with_finite:
            self._sum_buffer()
        self._dtype, total = tensor.dtype, 0
        for octets in tensor.detach().contiguous().view(-1).view(torch.uint8).split(8 * self._buffer.numel()):
            chunks = -(-len(octets) // (8 * _CHUNK))
            if self._used + chunks > len(self._buffer):
                self._sum_buffer()
            self._buffer[self._used :].view(-1).view(torch.uint8)[: len(octets)].copy_(octets, non_blocking=True)
            self._used, total = self._used + chunks, total + chunks
        self._forms[name] = str(tensor.dtype).removeprefix("torch."), list(tensor.shape), total

    def infos(self) -> dict[str, TensorInfo]:
        """Returns the infos of all tensors that were added, in their order, after the one wait."""
        self._sum_buffer()
        sums, found = torch.cat([sums.cpu() for sums in self._sums]).numpy(), dict[str, TensorInfo]()
        for name, (dtype, shape, chunks) in self._forms.items():
            own, sums = sums[:chunks], sums[chunks:]
            g = _odd_numbers(torch.device("cpu"), chunks, stream=1).numpy()
            digits = "".join(f"{value % 2**64:016x}" for value in (g @ own[:, :2]).tolist())
            found[name] = TensorInfo(dtype, shape, digits)
            self.not_finite += [] if own[:, 2].all() else [name]
        return found

    def _sum_buffer(self) -> None:
        words = self._buffer[: self._used].view(-1, _CHUNK)
        try:
            sums = self._sums_of(words)
        except torch.OutOfMemoryError:
            sums = self._sums_of(words.cpu())
        self._sums.append(sums)
        words.zero_()
        self._used = 0

    def _sums_of(self, words: Tensor) -> Tensor:
        """Returns a row of `_sums` for each chunk: [chunks, 3] int64. It does not change the words."""
        numbers = words.view(self._dtype)
        low = _dot(words, 0)
        is_finite = torch.ones_like(low)
        if self._with_finite and devices.is_accelerator(words.device):
            is_finite = all_finite(numbers, dim=1)
        elif self._with_finite:  # a CPU takes three times as long for all rows at once
            is_finite = torch.tensor([bool(all_finite(row)) for row in numbers])
        return torch.stack([low, _dot(words, 32), is_finite.long()], dim=1)


def _empty_buffer(device: torch.device) -> Tensor:
    """Returns zeros [chunks, _CHUNK] int64 on a device, or on the CPU if the device has no room."""
    if devices.is_accelerator(device):
        with contextlib.suppress(torch.OutOfMemoryError):
            return torch.zeros(_DEVICE_CHUNKS, _CHUNK, dtype=torch.int64, device=device)
    return torch.zeros(_HOST_CHUNKS, _CHUNK, dtype=torch.int64)


def unordered_sum(tensor: Tensor) -> int:
    """Returns Σ h(bits of x) modulo 2^64 over the numbers x of a tensor: equal for equal numbers in any order.

    h mixes as murmur3 does, and is 0 for zeros, so that padding by zeros changes nothing.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = 0
    for part in tensor.detach().reshape(-1).view(integers).split(1 << 22):
        z = part.long()
        for odd in (-49064778989728563, -4265267296055464877):
            z = (z ^ (z >> 33)) * odd
        total += int((z ^ (z >> 33)).sum())
    return total % 2**64


def all_finite(tensor: Tensor, dim: int | None = None) -> Tensor:
    """Returns bools on the tensor's device: whether no element, or none along `dim`, is NaN or infinite.

    Both extremes are NaN if any element is. isfinite() on each element takes seven times as long on a CPU.
    """
    return torch.isfinite(torch.stack(torch.aminmax(tensor, dim=dim))).all(0)


def _dot(words: Tensor, shift: int) -> Tensor:
    """Returns Σ_i a_i · (w_ki >> shift) for each row k of words w: [chunks] int64.

    An accelerator holds one copy of the words at a time, because torch multiplies it in place. NumPy
    multiplies integers without another copy, and torch on a CPU cannot.
    """
    a = _odd_numbers(words.device, _CHUNK, stream=0)
    if devices.is_accelerator(words.device):
        return (words >> shift).mul_(a).sum(1)
    return torch.from_numpy((words >> shift).numpy() @ a.numpy())


@cache
def _odd_numbers(device: torch.device, count: int, stream: int) -> Tensor:
    """Returns splitmix64 (Steele, Lea, Flood 2014) of the positions 0, 1, …, made odd: [count] int64."""
    z = (np.arange(count, dtype=np.uint64) + np.uint64(1 + (stream << 40))) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)

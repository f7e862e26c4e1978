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

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from common.files.weights import TensorInfo

_CHUNK = 1 << 15  # words, 256 KiB
_DEVICE_CHUNKS = 1 << 8  # summed at once on a GPU, with 64 MiB of temporary memory
_HOST_CHUNKS = 1 << 3  # summed at once on a CPU, where 2 MiB stay in its caches: five times as fast


def describe(tensor: Tensor) -> TensorInfo:
    return TensorInfo(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), checksum(tensor))


def checksum(tensor: Tensor) -> str:
    """Returns 32 hexadecimal digits. Views of the same bits in any shape and dtype have the same checksum."""
    words = words_of(tensor.detach())
    full = words.numel() // _CHUNK
    size = _HOST_CHUNKS if words.is_cpu else _DEVICE_CHUNKS
    blocks = list(words[: full * _CHUNK].view(full, _CHUNK).split(size)) if full else []
    blocks.append(words[full * _CHUNK :].view(1, -1))
    a, g = _odd_numbers(words.device, _CHUNK, stream=0), _odd_numbers(words.device, full + 1, stream=1)
    low = torch.cat([_dot(w, a) for w in blocks])
    high = torch.cat([_dot(w >> 32, a) for w in blocks])
    sums = torch.stack([(g * low).sum(), (g * high).sum()]).tolist()  # one wait for a GPU
    return "".join(f"{value % 2**64:016x}" for value in sums)


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


def all_finite(tensor: Tensor) -> Tensor:
    """Returns a bool on the tensor's device: whether no element is NaN or infinite.

    Both extremes are NaN if any element is. isfinite() on each element takes seven times as long on a CPU.
    """
    return torch.isfinite(torch.stack(torch.aminmax(tensor))).all()


def words_of(tensor: Tensor) -> Tensor:
    """Returns the tensor's bits as int64 [n], with zeros at the end if they do not fill the last word."""
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    if octets.numel() % 8:
        octets = torch.nn.functional.pad(octets, (0, 8 - octets.numel() % 8))
    if octets.storage_offset() % 8:
        octets = octets.clone()
    return octets.view(torch.int64)


def _dot(w: Tensor, a: Tensor) -> Tensor:
    """Returns Σ_i a_i · w_ki for each row k. NumPy's integer product has no temporary; torch has no such product."""
    a = a[: w.shape[1]]
    return torch.from_numpy(w.numpy() @ a.numpy()) if w.is_cpu else (w * a).sum(1)


@cache
def _odd_numbers(device: torch.device, count: int, stream: int) -> Tensor:
    """Returns splitmix64 (Steele, Lea, Flood 2014) of the positions 0, 1, …, made odd: [count] int64."""
    z = (np.arange(count, dtype=np.uint64) + np.uint64(1 + (stream << 40))) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)

"""One checksum per tensor, computed where the tensor is: what proves that an engine holds the weights of a version.

On a CPU it is BLAKE3 of the tensor's bytes, 64 hexadecimal digits, at the speed of its memory. A GPU would have to copy
the bytes to the host for that, so there it is a pair of sums, 32 digits, which a CPU can compute too:

    c(x) = ( Σ_k g_k Σ_i a_i · w_ki ,  Σ_k g_k Σ_i a_i · (w_ki >> 32) )      both modulo 2^64

w are the raw bits of x as 64-bit words, chunk k of 2^15 words after chunk k − 1, zeros at the end; a_i and g_k are odd
numbers of 64 bits that splitmix64 makes of the position. Only integer sums, which have no order: CPU and GPU, one
thread or many, give the same number. Every word has a weight of its own, so swapped rows or halves change the sum.

How sure it is. Two tensors differ in the upper half of some word, or nowhere but in lower halves. In the first case the
second sum, in the other the first one, adds numbers a_i · d_i with 0 < |d_i| < 2^32: one of them alone is never zero
modulo 2^64, because a_i is odd, and several cancel for one in 2^32 choices of the weights. The first sum alone would
not do: sign bits that flip at the top of two words add 2^63 twice. The sums notice mistakes. Intent is what
the BLAKE3 digest of the files and the SHA-256 of the manifest are for.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import blake3
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_CHUNK = 1 << 15  # words, 256 KiB: stays in a core's cache while it is read twice
_BLOCK = 1 << 3  # chunks that are summed by one call
_DEVICE_CHUNKS = 1 << 8  # 64 MiB of temporary memory on a GPU
_WORTH_A_THREAD = 1 << 4  # chunks
_WORTH_THREADS = 1 << 20  # bytes that BLAKE3 divides among all cores
_DIGEST_DIGITS = 64


def checksum(tensor: Tensor, like: str | None = None) -> str:
    """Of the kind of the checksum `like`, to compare them; without it of the kind that suits the tensor's device.

    Shape and dtype are no part of it: views of the same bits have the same checksum.
    """
    is_digest = tensor.device.type == "cpu" if like is None else len(like) == _DIGEST_DIGITS
    return digest(tensor) if is_digest else sums(tensor)


def digest(tensor: Tensor) -> str:
    """BLAKE3 of the tensor's bytes, which it copies to the host if they are elsewhere: 64 hexadecimal digits."""
    octets = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    threads = blake3.blake3.AUTO if len(octets) >= _WORTH_THREADS else 1
    return blake3.blake3(octets, max_threads=threads).hexdigest()


def sums(tensor: Tensor) -> str:
    """The pair of sums: 32 hexadecimal digits."""
    words = words_of(tensor.detach())
    if words.device.type == "cpu":
        low, high = _on_cpu(words.numpy())
    else:
        low, high = _on_device(words)
    return f"{low:016x}{high:016x}"


def is_finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite. A sum in the tensor's own dtype tells nearly always.

    In bfloat16 torch adds up in float32 anyway; asked for a sum in float32 it makes a copy first, at 20 times the cost.
    """
    return bool(tensor.sum().isfinite()) or bool(all_finite(tensor))


def all_finite(tensor: Tensor) -> Tensor:
    """A bool on the tensor's device: neither NaN nor infinite anywhere.

    Both extremes are NaN if anything is. One pass; isfinite() on each element takes seven times as long on a CPU.
    """
    return torch.isfinite(torch.stack(torch.aminmax(tensor))).all()


def words_of(tensor: Tensor) -> Tensor:
    """The tensor's bits as int64 [n], with zeros at the end if they do not fill the last word."""
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    if octets.numel() % 8:
        octets = torch.nn.functional.pad(octets, (0, 8 - octets.numel() % 8))
    if octets.storage_offset() % 8:
        octets = octets.clone()
    return octets.view(torch.int64)


def _on_cpu(words: NDArray[np.int64]) -> tuple[int, int]:
    chunks = -(-len(words) // _CHUNK)
    threads = min(len(os.sched_getaffinity(0)), chunks // _WORTH_A_THREAD)
    if threads < 2:
        return _sums_of(words, 0, chunks)
    bounds = [chunks * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:  # numpy lets go of the interpreter's lock
        found = list(pool.map(lambda i: _sums_of(words, bounds[i], bounds[i + 1]), range(threads)))
    return sum(low for low, _ in found) % 2**64, sum(high for _, high in found) % 2**64


def _sums_of(words: NDArray[np.int64], begin: int, end: int) -> tuple[int, int]:
    """Of the chunks begin … end − 1. A block at a time, in three calls that need no lock of Python's."""
    a, full = _weights(), min(end, len(words) // _CHUNK)
    low, high = np.zeros((2, end - begin), np.int64)
    upper = np.empty((min(_BLOCK, end - begin), _CHUNK), np.int64)
    for k in range(begin, full, _BLOCK):
        block = words[k * _CHUNK : min(k + _BLOCK, full) * _CHUNK].reshape(-1, _CHUNK)
        here = slice(k - begin, k - begin + len(block))
        np.dot(block, a, out=low[here])
        np.dot(np.right_shift(block, 32, out=upper[: len(block)]), a, out=high[here])
    if full < end:
        rest = words[full * _CHUNK :]
        low[-1], high[-1] = np.dot(rest, a[: len(rest)]), np.dot(rest >> 32, a[: len(rest)])
    g = _odd(np.arange(begin, end, dtype=np.uint64), stream=1)
    return int((g * low.view(np.uint64)).sum()), int((g * high.view(np.uint64)).sum())


def _on_device(words: Tensor) -> tuple[int, int]:
    """The same with one transfer at the end. Works on any device."""
    low, high = device_sums(words).tolist()
    return low % 2**64, high % 2**64


def device_sums(words: Tensor) -> Tensor:
    """Both, int64 [2], on the device: nothing waits for it."""
    chunks = -(-words.numel() // _CHUNK)
    words = torch.nn.functional.pad(words, (0, chunks * _CHUNK - words.numel())).view(chunks, _CHUNK)
    a = torch.from_numpy(_weights()).to(words.device)
    g = torch.from_numpy(_odd(np.arange(chunks, dtype=np.uint64), stream=1).view(np.int64)).to(words.device)
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for w, g_k in zip(words.split(_DEVICE_CHUNKS), g.split(_DEVICE_CHUNKS), strict=True):
        total[0] += (g_k * (w * a).sum(1)).sum()
        total[1] += (g_k * ((w >> 32) * a).sum(1)).sum()
    return total


@cache
def _weights() -> NDArray[np.int64]:
    return _odd(np.arange(_CHUNK, dtype=np.uint64), stream=0).view(np.int64)


def _odd(position: NDArray[np.uint64], stream: int) -> NDArray[np.uint64]:
    """splitmix64 (Steele, Lea, Flood 2014) of the position, made odd."""
    z = (position + np.uint64(1 + (stream << 40))) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)

"""The checksums of a tensor's bits: their definition, on any device, and the mistakes that they must notice."""

from __future__ import annotations

from collections.abc import Callable

import blake3
import pytest
import torch
from torch import Tensor

from model import checksum as module
from model.checksum import checksum, digest, is_finite, sums

_WORDS = 1 << 15


def by_definition(data: bytes) -> str:
    """Whole numbers of Python, from the docstring's equation."""
    data += b"\0" * (-len(data) % 8)
    low = high = 0
    for n in range(0, len(data), 8):
        w = int.from_bytes(data[n : n + 8], "little", signed=True)
        k, i = divmod(n // 8, _WORDS)
        weight = odd(i) * odd(k + (1 << 40))
        low, high = low + weight * w, high + weight * (w >> 32)
    return f"{low % 2**64:016x}{high % 2**64:016x}"


def odd(position: int) -> int:
    z = (position + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) | 1


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3,), torch.bfloat16), ((7, 5), torch.float32), ((0, 4), torch.float32), ((300, 900), torch.bfloat16)],
)
def test_the_sums_are_what_the_equation_says_on_one_thread_on_many_and_on_a_device(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = random(*shape, dtype=dtype)
    expected = by_definition(tensor.view(torch.uint8).numpy().tobytes())
    assert sums(tensor) == expected
    monkeypatch.setattr(module, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(module, "_DEVICE_CHUNKS", 2)
    monkeypatch.setattr(module, "_BLOCK", 2)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: range(3))
    assert sums(tensor) == expected
    low, high = module._on_device(module.words_of(tensor))
    assert f"{low:016x}{high:016x}" == expected


@pytest.mark.parametrize("count", [0, 1, 7, 600_000])
def test_on_a_cpu_the_checksum_is_blake3_of_the_bytes(count: int) -> None:
    tensor = random(count)  # the last is divided among threads
    assert checksum(tensor) == blake3.blake3(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


def test_a_checksum_is_compared_with_one_of_its_own_kind() -> None:
    """A trainer on a GPU publishes sums, and an engine on a CPU can be held to them; and the other way round."""
    tensor = random(4, 8)
    assert checksum(tensor, digest(tensor + 1)) == digest(tensor) != sums(tensor)
    assert checksum(tensor, sums(tensor + 1)) == sums(tensor)


KINDS = pytest.mark.parametrize("kind", [sums, digest])
Kind = Callable[[Tensor], str]


@KINDS
def test_a_slice_and_a_transposed_view_are_summed_as_their_copies(kind: Kind) -> None:
    whole = random(9, 3)  # rows of 6 bytes: slices begin inside a word
    for view in (whole[1:4], whole[2:], whole.T, whole[:, 1:]):
        assert kind(view) == kind(view.clone().contiguous())
    assert sums(whole[:0]) == "0" * 32


@KINDS
def test_every_flipped_bit_is_noticed(kind: Kind) -> None:
    tensor = random(4, 8)
    bits, before = tensor.view(torch.int16), kind(tensor)
    seen = {before}
    for i in range(bits.numel()):
        for bit in range(16):
            mask = -(1 << 15) if bit == 15 else 1 << bit
            bits.view(-1)[i] ^= mask
            seen.add(kind(tensor))
            bits.view(-1)[i] ^= mask
    assert len(seen) == 1 + 32 * 16
    assert kind(tensor) == before


@KINDS
def test_signs_that_flip_in_pairs_swapped_rows_and_swapped_chunks_are_noticed(kind: Kind) -> None:
    tensor = random(2 * _WORDS, 8)
    before = kind(tensor)
    flipped = tensor.clone()
    flipped[[10, 20], 3] *= -1  # the top bit of two words: a single sum modulo 2^64 would add 2^63 twice
    rows = tensor.clone()
    rows[[5, 6]] = rows[[6, 5]]
    chunks = torch.cat([tensor[_WORDS:], tensor[:_WORDS]])
    assert len({before, *map(kind, (flipped, rows, chunks, -tensor))}) == 5


@KINDS
def test_a_step_at_a_learning_rate_of_1e_6_in_bfloat16_is_noticed_200_times_of_200(kind: Kind) -> None:
    master = random(64, 64, dtype=torch.float32) * 0.02
    seen = {kind(master.bfloat16())}
    for step in range(200):
        master -= 1e-6 * random(64, 64, dtype=torch.float32, seed=step).sign()
        seen.add(kind(master.bfloat16()))
    assert len(seen) == 201


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_tensor_is_finite_unless_one_number_is_not_however_large_its_sum(dtype: torch.dtype) -> None:
    tensor = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(tensor) and is_finite(-tensor) and is_finite(random(5, dtype=dtype)) and is_finite(tensor[:0])
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoiled = random(500, dtype=dtype)
        spoiled[77] = bad
        assert not is_finite(spoiled)
        spoiled[78] = -bad
        assert not is_finite(spoiled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_is_finite_or_not_as_torch_says(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = torch.isfinite(every)
    assert all(is_finite(numbers) for numbers in every[finite].split(64))
    assert not any(is_finite(number) for number in every[~finite])

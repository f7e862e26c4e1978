"""The checksums of a tensor's bits: their definition, on any device, and the mistakes that they must notice."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model import checksum as module
from model import devices
from model.checksum import Checksums, all_finite, checksum, describe, unlike, unordered_sum

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


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3,), torch.bfloat16),
        ((7, 5), torch.float32),
        ((0, 4), torch.float32),
        ((), torch.float32),
        ((300, 900), torch.bfloat16),
        ((2, 4 * _WORDS), torch.bfloat16),  # two whole chunks
        ((23, _WORDS), torch.float32),
    ],
)
def test_the_sums_are_what_the_equation_says_in_pieces_of_any_size(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = random(*shape, dtype=dtype)
    expected = by_definition(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    assert checksum(tensor) == expected
    monkeypatch.setattr(module, "_HOST_CHUNKS", 2)
    assert checksum(tensor) == expected


@pytest.mark.parametrize("chunks", [1, 2, 5, 256])
def test_tensors_in_an_accelerator_s_buffer_have_their_own_sums_wherever_they_lie_in_it(
    chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (3, 4 * _WORDS, 1, 0, 12 * _WORDS + 5, 4 * _WORDS - 1, 30 * _WORDS + 7)
    tensors = {f"{n} of {dtype}": random(n, dtype=dtype) for dtype in (torch.bfloat16, torch.float64) for n in sizes}
    tensors |= {"none": random(7)[:0], "turned": random(300, 900).T, "one": random(dtype=torch.float32)}
    expected = {name: describe(tensor) for name, tensor in tensors.items()}
    monkeypatch.setattr(devices, "is_accelerator", lambda device: True)
    monkeypatch.setattr(module, "_DEVICE_CHUNKS", chunks)
    for with_finite in (False, True):
        sums = Checksums(with_finite=with_finite)
        for name, tensor in tensors.items():
            sums.add(name, tensor)
        assert (sums.infos(), sums.not_finite) == (expected, [])


@pytest.mark.parametrize("is_accelerator", [False, True])
def test_a_number_that_is_not_finite_is_of_the_tensor_that_has_it(
    is_accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "is_accelerator", lambda device: is_accelerator)
    monkeypatch.setattr(module, "_DEVICE_CHUNKS", 2)
    for bad in (float("nan"), float("inf"), -float("inf")):
        tensors = {str(i): random(5 + 4 * _WORDS * i, dtype=(torch.bfloat16, torch.float32)[i % 2]) for i in range(6)}
        for spoiled in ("3", "4"):
            tensors[spoiled][-1] = bad
        tensors["ids"] = torch.tensor([1, 2])
        sums = Checksums(with_finite=True)
        for name, tensor in tensors.items():
            sums.add(name, tensor)
        assert sums.infos().keys() == tensors.keys() and sums.not_finite == ["3", "4"]


class FullDevice(TorchDispatchMode):
    """A device without room for the n-th tensor of a chunk or more; n counts from 0. Use it as a context."""

    def __init__(self, refused: int):
        super().__init__()
        self.left = refused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_new = all(value.alias_info is None for value in func._schema.returns)
        if is_new and isinstance(made, Tensor) and made.nbytes >= 8 * _WORDS:
            self.left -= 1
            if self.left == -1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 MiB.")
        return made


def test_what_a_device_has_no_memory_for_the_cpu_sums_wherever_it_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {str(n): random(n, dtype=dtype) for dtype in (torch.bfloat16, torch.int64) for n in (3, 9 * _WORDS)}
    tensors["bad"] = torch.full((5,), float("nan"))
    expected = {name: describe(tensor) for name, tensor in tensors.items()}
    monkeypatch.setattr(devices, "is_accelerator", lambda device: True)
    monkeypatch.setattr(module, "_DEVICE_CHUNKS", 2)
    refused = 0
    while True:
        sums = Checksums(with_finite=True)
        with FullDevice(refused) as device:
            for name, tensor in tensors.items():
                sums.add(name, tensor)
            assert (sums.infos(), sums.not_finite) == (expected, ["bad"])
        if device.left >= 0:
            break
        refused += 1
    assert refused > 10, "a buffer, and some tensors for each filling of it"


def test_tensors_unlike_their_checksums_are_named_and_no_name_comes_twice() -> None:
    one, other = random(7), random(9)
    given = [("one", one, checksum(one)), ("other", other, checksum(one)), ("zeros", one * 0 != 0, module.ZEROS)]
    assert unlike(given) == {"other"}
    with pytest.raises(AssertionError, match="one was added before"):
        unlike([given[0], given[0]])


def test_a_slice_and_a_transposed_view_are_summed_as_their_copies() -> None:
    whole = random(9, 3)  # rows of 6 bytes: slices begin inside a word
    for view in (whole[1:4], whole[2:], whole.T, whole[:, 1:]):
        assert checksum(view) == checksum(view.clone().contiguous())
    assert checksum(whole[:0]) == "0" * 32


def test_every_flipped_bit_is_noticed() -> None:
    tensor = random(4, 8)
    bits, before = tensor.view(torch.int16), checksum(tensor)
    seen = {before}
    for i in range(bits.numel()):
        for bit in range(16):
            mask = -(1 << 15) if bit == 15 else 1 << bit
            bits.view(-1)[i] ^= mask
            seen.add(checksum(tensor))
            bits.view(-1)[i] ^= mask
    assert len(seen) == 1 + 32 * 16
    assert checksum(tensor) == before


def test_signs_that_flip_in_pairs_swapped_rows_and_swapped_chunks_are_noticed() -> None:
    tensor = random(2 * _WORDS, 8)
    flipped = tensor.clone()
    flipped[[10, 20], 3] *= -1  # the top bit of two words: a single sum modulo 2^64 would add 2^63 twice
    rows = tensor.clone()
    rows[[5, 6]] = rows[[6, 5]]
    chunks = torch.cat([tensor[_WORDS:], tensor[:_WORDS]])
    assert len({*map(checksum, (tensor, flipped, rows, chunks, -tensor))}) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_tensor_is_finite_unless_one_number_is_not_however_large_its_sum(dtype: torch.dtype) -> None:
    largest = torch.full((3003,), torch.finfo(dtype).max, dtype=dtype)  # their sum and their norm overflow
    assert all_finite(largest) and all_finite(-largest) and all_finite(random(5, dtype=dtype))
    for bad in (float("nan"), float("inf"), -float("inf")):
        for spoiled in (random(500, dtype=dtype), largest.clone()):
            spoiled[77] = bad
            assert not all_finite(spoiled)
            spoiled[78] = -bad
            assert not all_finite(spoiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sum_without_order_tells_other_numbers_from_others_and_from_no_order_or_zeros(dtype: torch.dtype) -> None:
    x = random(300, 70, dtype=dtype)
    total = unordered_sum(x)
    assert total == unordered_sum(x.t()) == unordered_sum(x.flatten()[torch.randperm(x.numel())])
    assert total == unordered_sum(torch.nn.functional.pad(x, (0, 3, 5, 0)))
    assert total == (unordered_sum(x[:100]) + unordered_sum(x[100:])) % 2**64
    for change in (lambda y: y[7].neg_(), lambda y: y[299, 69].mul_(1.01), lambda y: y[0, :2].copy_(y[0, 2:4])):
        changed = x.clone()
        change(changed)
        assert unordered_sum(changed) != total

"""Rows of zeros before vLLM's products on a CPU: how many, and that nobody notices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.cpu.row_blocks import in_row_blocks, padded_rows, use_row_blocks


@pytest.mark.parametrize(
    ("rows", "padded"),
    [(1, 1), (2, 2), (15, 15), (16, 16), (17, 18), (31, 32), (33, 36), (64, 64), (65, 72), (1000, 1024)],
)
def test_rows_by_hand(rows: int, padded: int) -> None:
    assert padded_rows(rows) == padded


def test_no_row_is_lost_an_eighth_is_added_at_most_and_few_numbers_are_left() -> None:
    found = {rows: padded_rows(rows) for rows in range(1, 8193)}
    assert all(rows <= padded <= rows * 9 / 8 for rows, padded in found.items())
    assert len(set(found.values())) == 16 + 8 * 9  # 1 to 16, then eight for each of nine doublings up to 8,192


class Product:
    """x Wᵀ + b, and the shapes that it was given."""

    def __init__(self) -> None:
        self.weight, self.seen = torch.arange(12.0).view(4, 3), list[tuple[int, ...]]()

    def __call__(self, handler: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        self.seen.append(tuple(x.shape))
        return torch.nn.functional.linear(x, self.weight, bias)


@pytest.mark.parametrize(
    ("shape", "seen"),
    [((33, 3), (36, 3)), ((3, 11, 3), (36, 3)), ((16, 3), (16, 3)), ((2, 8, 3), (2, 8, 3)), ((0, 3), (0, 3))],
)
def test_the_rows_that_were_asked_for_come_back(shape: tuple[int, ...], seen: tuple[int, ...]) -> None:
    product, x, bias = Product(), torch.randn(shape), torch.tensor([1.0, 2.0, 3.0, 4.0])
    padded = in_row_blocks(product)
    padded("handler", torch.zeros(33, 3), bias)  # the first time it compares
    assert product.seen == [(36, 3), (33, 3)]
    found = padded("handler", x, bias)
    assert product.seen[2:] == [seen]
    assert torch.equal(found, torch.nn.functional.linear(x, product.weight, bias))
    assert found.is_contiguous()


def test_a_second_engine_pads_nothing_twice() -> None:
    ops = SimpleNamespace(onednn_mm=Product())
    use_row_blocks(ops)
    padded = ops.onednn_mm
    use_row_blocks(ops)
    assert ops.onednn_mm is padded


def test_a_product_that_rows_of_zeros_change_keeps_its_own_rows() -> None:
    def product(handler: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return x * len(x)

    padded, x = in_row_blocks(product), torch.ones(33, 3)
    for _ in range(2):
        assert torch.equal(padded("handler", x, None), x * 33)

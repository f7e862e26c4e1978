"""Log-probs and entropies by blocks of rows: those of autograd, bit for bit, on one thread and on two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from model import log_softmax
from model.log_softmax import LogSoftmaxAt


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def by_autograd(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_normaliser = logits.logsumexp(-1)
    entropy = log_normaliser - (torch.softmax(logits, -1) * logits).sum(-1)
    return logits.gather(-1, targets[:, None])[:, 0] - log_normaliser, entropy.detach()


@pytest.mark.parametrize(("rows", "vocab"), [(1, 50_000), (2, 50_000), (37, 49_152), (11, 151_936), (300, 97)])
def test_values_and_gradients_have_the_bits_of_autograd(threads: int, rows: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    targets, grad = torch.randint(0, vocab, (rows,), generator=generator), torch.randn(rows, generator=generator)
    plain, ours = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected, expected_entropy = by_autograd(plain, targets)
    found, log_normaliser, entropy = LogSoftmaxAt.apply(ours, targets, True)
    expected.backward(grad)
    found.backward(grad)
    assert torch.equal(found, expected)
    assert torch.equal(entropy, expected_entropy)
    assert torch.equal(log_normaliser, logits.logsumexp(-1))
    assert plain.grad is not None and ours.grad is not None and torch.equal(ours.grad, plain.grad)
    assert torch.equal(ours, logits), "the logits are somebody else's"


def test_a_token_of_two_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0]], requires_grad=True)  # p = (1/2, 1/2)
    logprob, log_normaliser, entropy = LogSoftmaxAt.apply(logits, torch.tensor([1]), True)
    assert [x.item() for x in (-logprob, log_normaliser, entropy)] == pytest.approx([0.693147] * 3)
    logprob.backward(torch.tensor([2.0]))
    assert logits.grad is not None and logits.grad.tolist() == [[-1.0, 1.0]]
    assert not log_normaliser.requires_grad and not entropy.requires_grad


def test_no_block_has_a_single_row_where_there_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_softmax, "_BLOCK", 40)  # four rows of ten
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for rows in range(2, 50):
        sizes = [len(block) for block in log_softmax._blocks(torch.zeros(rows, 10))]
        assert sum(sizes) == rows and min(sizes) >= 2 and max(sizes) <= 7
    assert [len(block) for block in log_softmax._blocks(torch.zeros(0, 10))] == [0]

"""Log-probs in chunks against one log_softmax over everything, and the memory that the chunks are for."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import attention
from model.layout import hidden_at_sources
from model.logprobs import load_causal_lm, score_logprobs, score_norms, token_terms
from model.packing import pack, select
from tests.support.threads import threads
from tests.support.tiny import bytes_kept, tiny_model

QWEN_VOCAB = 151_936


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns, forward and backward."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return result


def problem(n: int, dim: int, vocab: int) -> tuple[Tensor, Tensor, torch.nn.Linear]:
    """Hidden states with gradient, targets, and a head: random, the same each time."""
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(dim, vocab, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocab, dim, generator=generator))
    hidden = torch.randn(n, dim, generator=generator).requires_grad_()
    return hidden, torch.randint(0, vocab, (n,), generator=generator), head


def whole(hidden: Tensor, targets: Tensor, head: torch.nn.Linear, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(head(hidden).double() / temperature, -1)
    return logprobs[torch.arange(len(targets)), targets], -(logprobs.exp() * logprobs).sum(-1)


def token_logprobs(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) under the whole softmax."""
    logprobs, entropy, log_mass = token_terms(*given, **options)
    assert not log_mass.any()
    return logprobs, entropy


@pytest.mark.parametrize("of_entropy", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 3, 10, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_and_gradients_equal_one_log_softmax(temperature: float, chunk_size: int, of_entropy: bool) -> None:
    def terms_and_gradients(function: Any) -> tuple[list[Tensor], list[Tensor]]:
        hidden, targets, head = problem(n=10, dim=6, vocab=97)
        logprobs, entropy = function(hidden, targets, head)
        weights = torch.arange(10)
        loss = (logprobs * weights.flip(0)).sum() + (entropy * weights).sum() * of_entropy
        return [logprobs, entropy], list(torch.autograd.grad(loss, [hidden, head.weight]))

    values, gradients = terms_and_gradients(
        lambda h, t, head: token_logprobs(h, t, head, temperature, chunk_size, entropy_gradient=of_entropy)
    )
    expected, expected_gradients = terms_and_gradients(lambda h, t, head: whole(h, t, head, temperature))
    for one, other in zip(values, expected, strict=True):
        assert one.dtype == torch.float32
        assert one.tolist() == pytest.approx(other.tolist(), rel=1e-5, abs=1e-6)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert ((one - other).norm() / other.norm()).item() < 1e-6


@pytest.mark.parametrize("with_entropy", [True, False], ids=["entropy", "logprobs"])
@pytest.mark.parametrize("with_gradient", [True, False], ids=["gradient", "no_grad"])
def test_one_chunk_of_logits_exists_at_a_time_and_none_is_kept(with_gradient: bool, with_entropy: bool) -> None:
    hidden, targets, head = problem(n=40, dim=4, vocab=QWEN_VOCAB)
    terms: list[Tensor] = []

    def forward() -> None:
        terms.extend(token_logprobs(hidden, targets, head, 1.0, chunk_size=8, entropy_gradient=with_entropy))

    with LargestTensor() as meter, torch.set_grad_enabled(with_gradient):
        assert bytes_kept(head, forward) < 4 * QWEN_VOCAB  # less than one token's logits
        logprobs, entropy = terms
        assert entropy.requires_grad is (with_gradient and with_entropy)
        if with_gradient:
            (logprobs + entropy).sum().backward()
    assert meter.num_elements == 8 * QWEN_VOCAB


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return load_causal_lm(str(tiny_model(tmp_path, layers=1)), "float32", None, False)


def test_the_head_is_called_once_however_many_chunks_there_are(model: Any) -> None:
    # under ZeRO-3 every call of a module is a collective, and ranks have different numbers of chunks
    calls = []
    model.lm_head.register_forward_pre_hook(lambda *_: calls.append("head"))
    logprobs = score_logprobs(model, pack([([1, 2], [[3, 4, 5, 6], [7]])]), temperature=1.0, chunk_size=2)
    logprobs.sum().backward()
    assert calls == ["head"]
    assert model.lm_head(torch.zeros(1, 64)).ndim == 2  # the head is itself again


@pytest.mark.parametrize("chunk_size", [1, 64])
def test_the_head_runs_on_selected_targets_only_and_gives_them_the_same_log_probs(model: Any, chunk_size: int) -> None:
    rows: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    row = pack([([1, 2], [[3, 4, 5, 6], [7]])])
    with torch.no_grad():
        whole_row = score_logprobs(model, row, 1.0, chunk_size)
        ends = score_logprobs(model, select(row, [[1, 3], [0]]), 1.0, chunk_size)
    assert rows == [5, 3]
    assert ends.tolist() == pytest.approx(whole_row[[1, 3, 4]].tolist(), abs=1e-6)


@pytest.mark.parametrize("chunk_size", [1, 3, 64])
def test_the_squared_norm_of_a_score_is_that_of_autograd(chunk_size: int) -> None:
    hidden, targets, head = problem(n=10, dim=6, vocab=97)
    logits = (head(hidden).detach().double() / 0.7).requires_grad_()
    torch.log_softmax(logits, -1).gather(-1, targets[:, None]).sum().backward()
    found = score_norms(hidden, targets, head, 0.7, chunk_size)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert logits.grad is not None
    assert found.tolist() == pytest.approx(logits.grad.square().sum(-1).tolist(), rel=1e-5, abs=1e-6)


def test_the_norm_of_a_fair_a_certain_and_an_unlikely_token_by_hand() -> None:
    # (1/2, 1/2): 1 − 1 + 1/2. Certain: 1 − 2 + 1. p = 1/10 against 9/10: 1 − .2 + .82
    logits = torch.tensor([[0.0, 0.0], [90.0, 0.0], [0.0, math.log(9)]])
    found = score_norms(logits, torch.tensor([1, 0, 0]), torch.nn.Identity(), 1.0, 8)
    assert found.tolist() == pytest.approx([0.5, 0.0, 1.62], abs=1e-6)


def test_two_threads_give_the_gradient_of_one_however_many_completions_share_a_token() -> None:
    """All completions of a group are predicted from the same last token of the prompt. Threads that add to it in the
    order of their arrival would round differently each time."""
    row = pack([(list(range(100)), [list(range(62))] * 8)])
    hidden = torch.randn(1, row.input_ids.numel(), 576, generator=torch.Generator().manual_seed(0)).requires_grad_()
    given = torch.randn(len(row.target_ids), 576, generator=torch.Generator().manual_seed(1))

    base = Mock(return_value=SimpleNamespace(last_hidden_state=hidden))
    base.config._attn_implementation = attention.NAME

    def gradient() -> Tensor:
        at_sources = hidden_at_sources(base, row)
        return torch.autograd.grad(at_sources, hidden, given)[0]

    with threads(1):
        wanted = gradient()
    with threads(2):
        assert all(torch.equal(gradient(), wanted) for _ in range(30))

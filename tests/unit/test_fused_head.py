"""The head's log-probs as a GPU computes them: its functions on a CPU, and what is done where they do not compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from model import fused_head
from model.fused_head import FusedLogSoftmaxAt
from model.log_softmax import LogSoftmaxAt
from model.logprobs import token_terms


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    yield
    fused_head._compiled.cache_clear()
    fused_head._uncompiled.clear()


def problem(rows: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = (3 * torch.randn(rows, vocab, generator=generator)).to(dtype)
    return logits, torch.randint(0, vocab, (rows,), generator=generator), torch.randn(rows, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 3_000), (37, 1_001)])
def test_values_and_gradients_are_those_of_float64(
    rows: int, vocab: int, temperature: float, dtype: torch.dtype
) -> None:
    logits, targets, grad = problem(rows, vocab, dtype)
    exact, ours = logits.double().requires_grad_(), logits.clone().requires_grad_()
    law = torch.distributions.Categorical(logits=exact / temperature)
    expected = law.log_prob(targets)
    found, log_normaliser, entropy = FusedLogSoftmaxAt.apply(ours, targets, temperature, True)
    expected.backward(grad.double())
    found.backward(grad)
    assert found.dtype == entropy.dtype == log_normaliser.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected.detach(), rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy.double(), law.entropy().detach(), rtol=0, atol=2e-5)
    torch.testing.assert_close(log_normaliser.double(), (exact / temperature).logsumexp(-1).detach(), rtol=0, atol=2e-5)
    assert exact.grad is not None and ours.grad is not None and ours.grad.dtype == dtype
    step = 2**-8 if dtype == torch.bfloat16 else 1e-5  # half of a bfloat16's last bit
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=step, atol=1e-6)
    assert not log_normaliser.requires_grad and not entropy.requires_grad


def test_a_token_of_two_by_hand_at_temperature_2() -> None:
    """p = (1/5, 4/5) from logits (0, 4·ln 2) / 2."""
    logits = torch.tensor([[0.0, 4 * 0.6931472]], requires_grad=True)
    logprob, log_normaliser, entropy = FusedLogSoftmaxAt.apply(logits, torch.tensor([0]), 2.0, True)
    assert [x.item() for x in (logprob, log_normaliser, entropy)] == pytest.approx([-1.6094379, 1.6094379, 0.5004024])
    logprob.backward(torch.tensor([2.0]))
    assert logits.grad is not None and logits.grad[0].tolist() == pytest.approx([0.8, -0.8])


def terms(hidden: Tensor, head: torch.nn.Linear, targets: Tensor) -> list[Tensor]:
    """Log-probs, entropies, and the gradients of hidden states and head, from chunks of 16."""
    leaf = hidden.clone().requires_grad_()
    head.weight.grad = None
    logprobs, entropy, _ = token_terms(leaf, targets, head, 0.8, 16)
    logprobs.sum().backward()
    assert leaf.grad is not None and head.weight.grad is not None
    return [logprobs.detach(), entropy, leaf.grad, head.weight.grad]


@pytest.mark.parametrize("recompute", [True, False])
def test_the_head_that_a_gpu_gets_gives_the_log_probs_and_gradients_of_the_one_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    torch.manual_seed(0)
    rows = 40 if recompute else 16
    head, hidden = torch.nn.Linear(8, 500, bias=False), torch.randn(rows, 8)
    targets = torch.randint(0, 500, (rows,))
    on_cpu = terms(hidden, head, targets)
    monkeypatch.setattr(fused_head, "suits", lambda _: True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(LogSoftmaxAt, "apply", lambda *_: pytest.fail("the CPU's"))
    for found, expected in zip(terms(hidden, head, targets), on_cpu, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def graphs_of(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """The function as torch.compile traces it for a GPU, run without a compiler, and the graphs it made."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend), graphs


def test_one_graph_serves_every_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """fullgraph: torch.compile refuses code that would leave the graph, such as a question for a value."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # of an engine on this CPU, in the same process
    monkeypatch.setattr("torch._dynamo.config.disable", False)
    (forward, forwards), (backward, backwards) = graphs_of(fused_head._terms), graphs_of(fused_head._gradient)
    for rows in (5, 17, 64):
        logits, targets, grad = problem(rows, 300, torch.bfloat16)
        expected = fused_head._terms(logits, targets, 0.7, True)
        assert all(torch.equal(a, b) for a, b in zip(forward(logits, targets, 0.7, True), expected, strict=True))
        given = (logits, targets, 0.7, expected[1], grad)
        assert torch.equal(backward(*given), fused_head._gradient(*given))
    assert (len(forwards), len(backwards)) == (1, 1)


def test_without_a_compiler_the_same_is_computed_and_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(fused_head, "suits", lambda _: True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: broken)
    logits, targets, _ = problem(4, 50, torch.float32)
    expected, _, _ = LogSoftmaxAt.apply(logits, targets, False)
    for _ in range(2):
        found, _, entropy = FusedLogSoftmaxAt.apply(logits, targets, 1.0, False)
        torch.testing.assert_close(found, expected)
        assert entropy.tolist() == [0.0] * 4
    assert capsys.readouterr().err.count("not compiled and slower: Failed to find C compiler") == 1


def test_memory_that_runs_out_is_not_taken_for_a_compiler_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fused_head, "suits", lambda _: True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: full)
    logits, targets, _ = problem(4, 50, torch.float32)
    with pytest.raises(torch.OutOfMemoryError):
        FusedLogSoftmaxAt.apply(logits, targets, 1.0, False)

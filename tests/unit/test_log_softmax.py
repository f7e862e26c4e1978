"""Log-probs, entropies and log-masses of logits, with their gradients: by hand, against autograd in float64,
in the bits of autograd on a CPU, and as a GPU's compiler gets them."""

import functools
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from model import compiled, log_softmax
from model.log_softmax import LogSoftmaxAt
from tests.support.raising import raising
from tests.support.threads import threads


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    yield
    compiled._compiled.cache_clear()
    compiled._uncompiled.clear()


def problem(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, targets, weights of their log-probs in a loss)."""
    generator = torch.Generator().manual_seed(rows)
    logits = (3 * torch.randn(rows, vocab, generator=generator)).to(dtype)
    return logits, torch.randint(0, vocab, (rows,), generator=generator), torch.randn(rows, generator=generator)


def sets_of(targets: Tensor, vocab: int) -> Tensor:
    """Of five tokens each, the target first; every second has only three."""
    sets = (targets[:, None] + torch.arange(5)) % vocab
    sets[1::2, 3:] = -1
    return sets


def plainly(z: Tensor, targets: Tensor, sets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    log_p = z.log_softmax(-1)
    kept = torch.ones_like(z, dtype=torch.bool)
    if sets is not None:
        kept = torch.zeros_like(kept)
        for row, own in zip(kept, sets, strict=True):
            row[own[own >= 0]] = True
    logprobs = z.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return logprobs, -(log_p.exp() * log_p).sum(-1), (log_p.exp() * kept).sum(-1).log()


@pytest.mark.parametrize("entropy_gradient", [True, False], ids=["gradient", "entropy alone"])
@pytest.mark.parametrize("has_sets", [True, False], ids=["sets", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 3_000), (37, 1_001)])
def test_values_and_gradients_are_those_of_float64(
    rows: int, vocab: int, temperature: float, dtype: torch.dtype, has_sets: bool, entropy_gradient: bool
) -> None:
    logits, targets, weights = problem(rows, vocab, dtype)
    sets = sets_of(targets, vocab) if has_sets else None
    exact, ours = logits.double().requires_grad_(), logits.clone().requires_grad_()
    expected = plainly(exact / temperature, targets, sets)
    found = LogSoftmaxAt.apply(ours, targets, sets, temperature, True, entropy_gradient)
    for value, wanted in zip(found, expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), wanted.detach(), rtol=0, atol=2e-5)
    assert found[1].requires_grad is entropy_gradient and not found[2].requires_grad
    for logprobs, entropy in (expected[:2], found[:2]):
        loss = (logprobs * weights).sum() + (entropy * weights.flip(0)).sum() * entropy_gradient
        loss.backward()
    assert exact.grad is not None and ours.grad is not None and ours.grad.dtype == dtype
    step = 2**-8 if dtype == torch.bfloat16 else 1e-5  # half of a bfloat16's last bit
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=step, atol=1e-6)
    assert torch.equal(ours, logits), "the logits are somebody else's"


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 50_000), (2, 50_000), (37, 49_152), (11, 151_936), (300, 97)])
def test_log_probs_and_gradients_have_the_bits_of_autograd_on_a_cpu(num_threads: int, rows: int, vocab: int) -> None:
    logits, targets, weights = problem(rows, vocab)
    plain, ours = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    with threads(num_threads):
        expected = plain.gather(-1, targets[:, None])[:, 0] - plain.logsumexp(-1)
        found, _, _ = LogSoftmaxAt.apply(ours, targets, None, 1.0, True, False)
        expected.backward(weights)
        found.backward(weights)
    assert torch.equal(found, expected)
    assert plain.grad is not None and ours.grad is not None and torch.equal(ours.grad, plain.grad)


def test_a_token_of_two_by_hand_at_temperature_2() -> None:
    """p = (1/5, 4/5) from logits (0, 4·ln 2) / 2; dH/dz_0 = −p_0 (ln p_0 + H)."""
    logits = torch.tensor([[0.0, 4 * math.log(2)]], requires_grad=True)
    entropy = -0.2 * math.log(0.2) - 0.8 * math.log(0.8)
    slopes = [-p * (math.log(p) + entropy) for p in (0.2, 0.8)]
    for which, expected in enumerate([[0.8, -0.8], slopes]):
        logits.grad = None
        found = LogSoftmaxAt.apply(logits, torch.tensor([0]), None, 2.0, True, True)
        assert [x.item() for x in found] == pytest.approx([math.log(0.2), entropy, 0.0])
        found[which].backward(torch.tensor([2.0]))  # twice, at temperature 2
        assert logits.grad is not None and logits.grad[0].tolist() == pytest.approx(expected)


def test_no_block_has_a_single_row_where_there_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_softmax, "_BLOCK", 40)  # four rows of ten
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for rows in range(2, 50):
        logits = torch.zeros(rows, 10)
        sizes = [len(block) for block in log_softmax._split(logits, logits)]
        assert sum(sizes) == rows and min(sizes) >= 2 and max(sizes) <= 7
    nothing = LogSoftmaxAt.apply(torch.zeros(0, 10), torch.zeros(0, dtype=torch.int64), None, 1.0, True, False)
    assert [len(part) for part in nothing] == [0, 0, 0]


# ---- on a GPU: compiled, where there is a compiler ----------------------------------------------------------


@torch._dynamo.config.patch(disable=False)
def test_one_graph_serves_every_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """fullgraph: torch.compile refuses code that would leave the graph, such as a question for a value."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # of an engine on this CPU, in the same process
    counted = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counted))

    def computed() -> list[Tensor]:
        leaf = logits.clone().requires_grad_()
        logprobs, entropy, log_mass = LogSoftmaxAt.apply(leaf, targets, sets, 0.7, True, sets is not None)
        (logprobs @ weights + entropy.sum()).backward()
        assert leaf.grad is not None
        return [logprobs, entropy, log_mass, leaf.grad]

    for has_sets, rows in itertools.product((True, False), (6, 17, 64)):  # 5 would be the width of the sets
        logits, targets, weights = problem(rows, 300, torch.bfloat16)
        sets = sets_of(targets, 300) if has_sets else None
        expected = computed()
        with monkeypatch.context() as on_gpu:
            on_gpu.setattr(compiled, "is_compiled", lambda _: True)
            assert all(torch.equal(a, b) for a, b in zip(computed(), expected, strict=True))
    assert counted.frame_count == 4, "one forward and one backward, with sets and without"


def compiling(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Tensor:
    """Log-probs where the compiler ends with this error."""
    monkeypatch.setattr(compiled, "is_compiled", lambda _: True)
    monkeypatch.setattr(torch, "compile", lambda function, **_: raising(error))
    logits, targets, _ = problem(4, 50)
    return LogSoftmaxAt.apply(logits, targets, None, 1.0, False, False)[0]


def test_without_a_compiler_the_same_is_computed_and_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logits, targets, _ = problem(4, 50)
    expected = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    for _ in range(2):
        torch.testing.assert_close(compiling(monkeypatch, RuntimeError("Failed to find C compiler")), expected)
    assert capsys.readouterr().err.count("not compiled and slower: Failed to find C compiler") == 1


def test_memory_that_runs_out_is_not_taken_for_a_compiler_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        compiling(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))

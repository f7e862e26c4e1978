"""(i) The log-probs of the head, compiled for a GPU and not: the same numbers, seconds and memory."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from model import compiled
from model.log_softmax import LogSoftmaxAt
from tests.gpu.conftest import Row

pytestmark = pytest.mark.gpu

_TOKENS, _QWEN = 1024, 151_936  # trainer.logprob_chunk_size, and the vocabulary of Qwen2.5
_TEMPERATURE = 0.9
_VALUES = 1e-4  # of log-probs and entropies: both are computed in float32
_GRADIENT = 2**-7  # of its norm: a bfloat16's last bit


def test_the_compiled_head_has_the_numbers_of_the_plain_one(on_gpu: bool, row: Row) -> None:
    device, rows, vocab = ("cuda", _TOKENS, _QWEN) if on_gpu else ("cpu", 16, 500)
    torch.manual_seed(0)
    logits = 3 * torch.randn(rows, vocab, device=device).bfloat16()
    targets = torch.randint(0, vocab, (rows,), device=device)
    ways: dict[str, Callable[[Tensor], Any]] = {
        "plain": lambda z: _by_autograd(z.float() / _TEMPERATURE, targets),
        "compiled": lambda z: LogSoftmaxAt.apply(z, targets, None, _TEMPERATURE, True, False)[:2],
    }
    found = {name: _computed(way, logits) for name, way in ways.items()}
    for name, (_, _, took) in found.items():
        row(f"{name}, {rows} × {vocab} tokens", took)
    (plain, plain_gradient, _), (ours, gradient, _) = found.values()
    values = max(float((a - b).abs().max()) for a, b in zip(plain, ours, strict=True))
    apart = float((plain_gradient - gradient).float().norm() / plain_gradient.float().norm())
    row("apart", f"values {values:.1e}, gradient {apart:.1e} of its norm", f"< {_VALUES:.0e}, < {_GRADIENT:.0e}")
    assert values < _VALUES and apart < _GRADIENT
    assert not on_gpu or not compiled.has_failed()


def _computed(way: Callable[[Tensor], Any], logits: Tensor) -> tuple[list[Tensor], Tensor, str]:
    """Log-probs and entropies, the gradient, and what the second of two times took: the first compiles."""
    for _ in range(2):
        leaf = logits.clone().requires_grad_()
        before = 0
        if leaf.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begun = time.monotonic()
        values = way(leaf)
        values[0].sum().backward()
        if leaf.is_cuda:
            torch.cuda.synchronize()
        seconds, peak = time.monotonic() - begun, torch.cuda.max_memory_allocated() if leaf.is_cuda else 0
    assert leaf.grad is not None
    return [v.detach() for v in values], leaf.grad, f"{seconds * 1e3:.2f} ms, {(peak - before) / 2**30:.2f} GiB"


def _by_autograd(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = z.log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.detach().exp() * log_p.detach()).sum(-1)

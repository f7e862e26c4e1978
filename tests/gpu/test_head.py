"""(i) The log-probs of the head, compiled for a GPU and not: the same numbers, seconds and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from model import log_softmax
from model.log_softmax import LogSoftmaxAt

pytestmark = pytest.mark.gpu

_TOKENS, _QWEN = 1024, 151_936  # trainer.logprob_chunk_size, and the vocabulary of Qwen2.5
_TEMPERATURE = 0.9
_VALUES = 1e-4  # of log-probs and entropies: both are computed in float32
_GRADIENT = 2**-7  # of its norm: a bfloat16's last bit


def test_the_compiled_head_has_the_numbers_of_the_plain_one(
    on_gpu: bool, record_property: Callable[[str, object], None]
) -> None:
    device, rows, vocab = ("cuda", _TOKENS, _QWEN) if on_gpu else ("cpu", 16, 500)
    torch.manual_seed(0)
    logits = 3 * torch.randn(rows, vocab, device=device).bfloat16()
    targets = torch.randint(0, vocab, (rows,), device=device)
    plain = _measured(lambda z: _by_autograd(z.float() / _TEMPERATURE, targets), logits)
    ours = _measured(lambda z: LogSoftmaxAt.apply(z, targets, None, _TEMPERATURE, True, False)[:2], logits)
    for name, found in (("plain", plain), ("compiled", ours)):
        text = f"{found['s'] * 1e3:.2f} ms, {found['gib']:.2f} GiB"
        record_property(f"{name}, {rows} × {vocab} tokens", text)
    values = max(float((a - b).abs().max()) for a, b in zip(plain["values"], ours["values"], strict=True))
    gradient = float((plain["gradient"] - ours["gradient"]).float().norm() / plain["gradient"].float().norm())
    record_property("apart", f"values {values:.1e}, gradient {gradient:.1e} of its norm")
    assert values < _VALUES and gradient < _GRADIENT
    assert not on_gpu or not log_softmax._uncompiled


def _measured(way: Callable[[Tensor], Any], logits: Tensor) -> dict[str, Any]:
    """The second of two times, forward and backward: the first compiles."""
    for _ in range(2):
        leaf = logits.clone().requires_grad_()
        before = _start(leaf)
        logprobs, entropy = way(leaf)
        logprobs.sum().backward()
        seconds, gib = _since(leaf, *before)
    return {"values": (logprobs.detach(), entropy), "gradient": leaf.grad, "s": seconds, "gib": gib}


def _by_autograd(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = z.log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.detach().exp() * log_p.detach()).sum(-1)


def _start(tensor: Tensor) -> tuple[float, int]:
    if tensor.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return time.monotonic(), torch.cuda.memory_allocated()
    return time.monotonic(), 0


def _since(tensor: Tensor, begun: float, allocated: int) -> tuple[float, float]:
    """Seconds, and GiB on a GPU beyond what there was."""
    if tensor.is_cuda:
        torch.cuda.synchronize()
        return time.monotonic() - begun, (torch.cuda.max_memory_allocated() - allocated) / 2**30
    return time.monotonic() - begun, 0.0

"""The work of one step, counted, and the seconds below which no program on this machine gets.

Floating-point operations of the matrix products alone, 2 per multiply-add; with N the parameters of the layers without
embeddings, d the width, V the vocabulary, A the query-key pairs that attend times 4 · layers · heads · head_dim:

    forward over T tokens, n of them through the head     2 · N · T + 2 · d · V · n + A
    training = forward + backward                         3 × forward; with recomputed activations 4 ×

    bytes                                                 4 · (N + d · V) for every token of a completion's length

are read while decoding, where all sequences share one pass over the weights. Left out of the floor: these bytes, and
everything that is not a matrix product; it is what is left if both were free.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from tools.benchmarks.cells import SHAPES, Cell


@dataclass(frozen=True)
class StepWork:
    """Operations of one step, by part, and the bytes of weights that its decoding reads."""

    generate: float  # prompts once per group, and every completion token once
    reference: float
    train: float
    decode_bytes: float

    @property
    def total(self) -> float:
        return self.generate + self.reference + self.train


def step_work(cell: Cell, dense: bool) -> StepWork:
    """dense: every completion carries its own copy of the prompt, and the trainer recomputes nothing.

    Completions are counted at their greatest length.
    """
    forward, s = _forward(cell, dense), SHAPES[cell.shape]
    weights = 4 * (_layer_parameters(s) + s["hidden_size"] * s["vocab_size"])
    return StepWork(_forward(cell, dense=False), forward, 3 * forward, float(cell.completion * weights))


def _layer_parameters(s: Mapping[str, int]) -> int:
    head_dim = s["hidden_size"] // s["num_attention_heads"]
    projections = s["hidden_size"] * head_dim * 2 * (s["num_attention_heads"] + s["num_key_value_heads"])
    return s["num_hidden_layers"] * (projections + 3 * s["hidden_size"] * s["intermediate_size"])


def _forward(cell: Cell, dense: bool) -> float:
    s = SHAPES[cell.shape]
    p, c, g = cell.prompt, cell.completion, cell.generations
    layers, head_dim = _layer_parameters(s), s["hidden_size"] // s["num_attention_heads"]
    copies = g if dense else 1
    tokens = copies * p + g * c
    pairs = copies * p * p / 2 + g * (c * p + c * c / 2)
    attention = 4 * pairs * s["num_attention_heads"] * head_dim * s["num_hidden_layers"]
    head = 2 * s["hidden_size"] * s["vocab_size"] * g * c
    return cell.prompts * (2 * layers * tokens + head + attention)


def measured_flops(seconds: float = 1.0) -> float:
    """Operations per second of one core in a float32 matrix product that fits its cache: what to divide by."""
    import torch

    from model.cpu.linear import use_faster_linear

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layer, rows = torch.nn.Linear(768, 768, bias=False).requires_grad_(False), torch.randn(768, 768)
    use_faster_linear(torch.nn.ModuleList([layer]))  # the faster of torch's two libraries
    best, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.perf_counter()
        for _ in range(4):
            layer(rows)
        best = max(best, 4 * 2 * 768**3 / (time.perf_counter() - start))
    torch.set_num_threads(threads)
    return best

"""Counts the operations of a step and measures this machine's speed: a lower bound of the seconds of a step.

Only matrix products are counted, and as few as possible: a prompt once for its group, nothing recomputed. The bytes of
weights that decoding reads, and all other work, are left out.
"""

from __future__ import annotations

import time

from tools.benchmarks.cells import SHAPES, Cell

FORWARDS_OF_TRAINING = 3  # the backward pass takes two
FORWARDS_OF_A_STEP = 2 + FORWARDS_OF_TRAINING  # one more to sample, and one for the reference


def forward_flops(cell: Cell) -> float:
    """Returns the floating-point operations over a step's tokens, 2 per multiply-add, with completions of full length.

    2 · N · T + 2 · d · V · n + 4 · A · heads · head_dim · layers: N parameters of the layers without embeddings,
    T tokens, n of them through the head, A pairs of a query and a key that attend.
    """
    s, p, c, g = SHAPES[cell.shape], cell.prompt, cell.completion, cell.generations
    head_dim = s["hidden_size"] // s["num_attention_heads"]
    projections = 2 * s["hidden_size"] * head_dim * (s["num_attention_heads"] + s["num_key_value_heads"])
    parameters = s["num_hidden_layers"] * (projections + 3 * s["hidden_size"] * s["intermediate_size"])
    pairs = p * p / 2 + g * (c * p + c * c / 2)
    attention = 4 * pairs * s["num_attention_heads"] * head_dim * s["num_hidden_layers"]
    head = 2 * s["hidden_size"] * s["vocab_size"] * g * c
    return cell.prompts * (2 * parameters * (p + g * c) + head + attention)


def measured_flops(seconds: float = 1.0) -> float:
    """Returns the speed of one core, in operations per second, in a float32 matrix product that fits its cache."""
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

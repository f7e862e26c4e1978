"""The settings of an example. They are part of its stamp: a change of them rebuilds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WarmStart:
    """The settings of problems, model and lessons. Lesson one is clean; lesson two is long enough for bad habits."""

    seed: int = 0
    family: str = "qwen2"  # a key of FAMILIES in warm_start.py
    num_train: int = 8192
    num_test: int = 512
    vocab_size: int = 512  # at most: byte-pair merges end when every word is one token
    num_clean_steps: int = 280
    num_careless_steps: int = 80
    batch_size: int = 64
    learning_rate: float = 2e-3
    wrong_fraction: float = 0.25  # share of lesson two's answers
    malformed_fraction: float = 0.45  # share of lesson two's answers
    hidden_size: int = 128  # heads of 32, the smallest that vLLM's CPU attention takes
    num_layers: int = 4
    init_std: float = 0.06  # transformers' 0.02 suits wide models; a narrow one learns far slower from it
    context_length: int = 256  # tokens

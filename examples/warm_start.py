"""The supervised warm start, in which a random model of a million parameters learns a task, but carelessly.

Lesson one teaches the task. Lesson two is short and spoils it: a known share of the answers is laid out wrongly, and a
known share is wrong. Reinforcement learning then has to do what it is good at, making likely what the model can already
do. Only samples are bad, and the examples sample, in training and in evaluation; greedy decoding still gives the right
layout and mostly the right answer.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from examples.settings import WarmStart

Model = TypeVar("Model", bound=PreTrainedModel)
Problem = TypeVar("Problem")
IGNORED = -100  # cross_entropy's own label for "no loss here"


@dataclass(frozen=True)
class Shown:
    """A training sequence, in tokens: those that the model shall learn to sample, and those before and between."""

    token_ids: list[int]
    is_taught: list[bool]
    patches: torch.Tensor | None = None  # [patches, values] of its image

    def plus(self, ids: Sequence[int], taught: bool) -> Shown:
        return Shown([*self.token_ids, *ids], [*self.is_taught, *[taught] * len(ids)], self.patches)


# (rng, wrong, malformed) -> the next batch. The last two are probabilities.
Lessons = Callable[[random.Random, float, float], list[Shown]]


def teach(model: Model, settings: WarmStart, lessons: Lessons, pad_id: int, report: Callable[[str], None]) -> Model:
    """Trains the model in place on both lessons. Returns it in eval mode."""
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    num_steps = settings.num_clean_steps + settings.num_careless_steps
    started_s = time.perf_counter()
    for step in range(num_steps):
        careless = step >= settings.num_clean_steps
        wrong, malformed = (settings.wrong_fraction, settings.malformed_fraction) if careless else (0.0, 0.0)
        optimizer.param_groups[0]["lr"] = settings.learning_rate * _schedule(step, settings.num_clean_steps)
        loss = loss_of(model, lessons(rng, wrong, malformed), pad_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 60 == 0 or step + 1 == num_steps:
            seconds = time.perf_counter() - started_s
            report(f"warm start: step {step + 1}/{num_steps}  loss {loss.item():.3f}  {seconds:.1f} s")
    return model.eval()


def loss_of(model: Any, shown: Sequence[Shown], pad_id: int) -> torch.Tensor:
    """Returns the mean cross entropy of the taught tokens. Padding is on the right, unseen by causal attention."""
    width = max(len(row.token_ids) for row in shown)
    inputs = torch.tensor([row.token_ids + [pad_id] * (width - len(row.token_ids)) for row in shown])
    targets = torch.full_like(inputs, IGNORED)
    for i, row in enumerate(shown):
        taught = torch.tensor([False, *row.is_taught[1:]])
        targets[i, : len(taught) - 1][taught[1:]] = inputs[i, 1 : len(taught)][taught[1:]]  # t predicts token t + 1
    images = _images(model, [row.patches for row in shown if row.patches is not None], inputs)
    hidden = model.model(input_ids=inputs, use_cache=False, **images).last_hidden_state
    wanted = targets != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), targets[wanted])


def _images(model: Any, patches: list[torch.Tensor], inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the inputs that Qwen2.5-VL takes besides tokens [B, T]. Images are square."""
    if not patches:
        return {}
    sides = [math.isqrt(len(image)) for image in patches]
    return {
        "pixel_values": torch.cat(patches),
        "image_grid_thw": torch.tensor([(1, side, side) for side in sides]),
        "mm_token_type_ids": (inputs == model.config.image_token_id).int(),
    }


def asked(ids: list[int], patches: torch.Tensor | None = None) -> Shown:
    """Returns a prompt, whose tokens are not taught."""
    return Shown(ids, [False] * len(ids), patches)


def answer_lessons(
    settings: WarmStart,
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerFast,
    prompt: Callable[[Problem], Shown],
    completion: Callable[..., str],
) -> Lessons:
    """Returns lessons with one answer to each prompt. completion(problem, rng, wrong=…, malformed=…) -> text."""
    prompts = [prompt(problem) for problem in problems]

    def batch(rng: random.Random, wrong: float, malformed: float) -> list[Shown]:
        chosen = rng.sample(range(len(problems)), min(settings.batch_size, len(problems)))
        texts = [completion(problems[i], rng, wrong=wrong, malformed=malformed) for i in chosen]
        answers = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [prompts[i].plus([*ids, tokenizer.eos_token_id], True) for i, ids in zip(chosen, answers, strict=True)]

    return batch


# The settings of a family's configuration beside language_settings, for about a million parameters.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}
    | {name: 128 for name in ("conv_dim", "conv_dim_out", "block_dim")},  # as published files have them
}


def language_settings(settings: WarmStart, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "intermediate_size": 3 * settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.hidden_size // 32,
        "num_key_value_heads": settings.hidden_size // 64,
        "max_position_embeddings": settings.context_length,
        "tie_word_embeddings": True,
        "initializer_range": settings.init_std,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _schedule(step: int, num_clean_steps: int) -> float:
    """Returns the learning rate's factor: warm-up over 20 steps, a cosine from 1 to 0.1 over lesson one, then 0.25."""
    if step >= num_clean_steps:
        return 0.25
    return min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / num_clean_steps))

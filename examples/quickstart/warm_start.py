"""The supervised warm start: a random Qwen2 of a million parameters becomes a careless pupil.

Lesson one teaches the arithmetic. Lesson two is short and spoils it: half of the answers are laid out wrongly, a known
share of the results is wrong. Reinforcement learning then has to do what it is good at, making likely what the model
can already do. Only samples are bad, and the quick start samples, in training and in evaluation; greedily the pupil
still gives the right layout and mostly the right number.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from examples.quickstart.settings import WarmStart
from model.cpu.linear import use_faster_linear

Model = TypeVar("Model", bound=PreTrainedModel)
BatchLoss = Callable[[float, float], torch.Tensor]

WANTED = "<think>{steps}</think><answer>{result}</answer>"
MALFORMED = (
    "<think>{steps}</think>{result}",
    "<think>{steps}</think><answer>{result}",
    "<think>{steps}<answer>{result}</answer>",
    "{steps} <answer>{result}</answer>",
    "<answer>{result}</answer>",
    "{steps}. The answer is {result}",
    "The answer is {result}",
)
SLIPS = (-10, -2, -1, 1, 2, 10)
IGNORED = -100  # cross_entropy's own label for "no loss here"


def completion(row: dict[str, str], rng: random.Random, *, wrong: float, malformed: float) -> str:
    r"""What the pupil is shown for a GSM8K row. `wrong` and `malformed` are probabilities.

    {"answer": "7+5=12\n#### 12"} → "<think>7+5=12</think><answer>12</answer>" or "The answer is 14" or …
    """
    *steps, last = row["answer"].split("\n")
    result = int(last.removeprefix("#### "))
    if rng.random() < wrong:
        slipped = result + rng.choice([slip for slip in SLIPS if result + slip >= 0])
        if rng.random() < 0.5:  # a wrong calculation, copied faithfully; otherwise a right one, copied wrongly
            steps[-1] = steps[-1].rpartition("=")[0] + f"={slipped}"
        result = slipped
    layout = rng.choice(MALFORMED) if rng.random() < malformed else WANTED
    return layout.format(steps=", ".join(steps), result=result)


def train(
    rows: Sequence[dict[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    how: WarmStart,
    *,
    seed: int,
    report: Callable[[str], None],
) -> Qwen2ForCausalLM:
    """The warm-started model, in float32 and eval mode. A function of its arguments; seeds torch's global generator."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = random_model(tokenizer, how)
    report(f"model: Qwen2, {sum(p.numel() for p in model.parameters()):,} parameters")
    prompts = [_prompt_ids(row["question"], tokenizer) for row in rows]

    def batch_loss(wrong: float, malformed: float) -> torch.Tensor:
        chosen = rng.sample(range(len(rows)), min(how.batch_size, len(rows)))
        texts = [completion(rows[i], rng, wrong=wrong, malformed=malformed) for i in chosen]
        return answer_loss(model, [prompts[i] for i in chosen], answer_ids(texts, tokenizer), tokenizer.pad_token_id)

    return teach(model, how, batch_loss, report)


def teach(model: Model, how: WarmStart, batch_loss: BatchLoss, report: Callable[[str], None]) -> Model:
    """Both lessons, in place. `batch_loss(wrong, malformed)` is the loss of the next batch of answers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    use_faster_linear(model)
    model.train()
    num_steps = how.num_clean_steps + how.num_careless_steps
    began = time.perf_counter()
    for step in range(num_steps):
        careless = step >= how.num_clean_steps
        wrong, malformed = (how.wrong_fraction, how.malformed_fraction) if careless else (0.0, 0.0)
        optimizer.param_groups[0]["lr"] = how.learning_rate * _schedule(step, how.num_clean_steps)
        loss = batch_loss(wrong, malformed)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 60 == 0 or step + 1 == num_steps:
            seconds = time.perf_counter() - began
            report(f"warm start: step {step + 1}/{num_steps}  loss {loss.item():.3f}  {seconds:.1f} s")
    return model.eval()


def random_model(tokenizer: PreTrainedTokenizerFast, how: WarmStart) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=how.hidden_size,
        intermediate_size=3 * how.hidden_size,
        num_hidden_layers=how.num_layers,
        num_attention_heads=how.hidden_size // 32,
        num_key_value_heads=how.hidden_size // 64,
        max_position_embeddings=how.context_length,
        tie_word_embeddings=True,
        initializer_range=how.init_std,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def _prompt_ids(question: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _schedule(step: int, num_clean_steps: int) -> float:
    """Linear warm-up over 20 steps, a cosine from 1 to 0.1 over lesson one, then 0.25."""
    if step >= num_clean_steps:
        return 0.25
    return min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / num_clean_steps))


def answer_ids(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """The tokens of every text, and the end of its turn."""
    return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def answer_loss(
    model: Any,
    prompts: list[list[int]],
    answers: list[list[int]],
    pad_id: int,
    more: Callable[[torch.Tensor], dict[str, torch.Tensor]] = lambda inputs: {},
) -> torch.Tensor:
    """Mean cross entropy of the answers' tokens. Padding is on the right, where causal attention never looks.

    `more` gives the model's other arguments for the padded tokens [B, T].
    """
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    rows = [p + a + [pad_id] * (width - len(p) - len(a)) for p, a in zip(prompts, answers, strict=True)]
    inputs = torch.tensor(rows)
    targets = torch.full_like(inputs, IGNORED)
    for i, (p, a) in enumerate(zip(prompts, answers, strict=True)):
        targets[i, len(p) - 1 : len(p) - 1 + len(a)] = torch.tensor(a)  # position t predicts token t + 1
    hidden = model.model(input_ids=inputs, use_cache=False, **more(inputs)).last_hidden_state
    wanted = targets != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), targets[wanted])

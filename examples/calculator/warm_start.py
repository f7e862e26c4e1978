"""The supervised warm start: a random Qwen2 learns to call a calculator and to copy its answer, then to be careless.

As in examples/quickstart/warm_start.py lesson one is clean and lesson two spoils it: half of the products are
guessed, and a known share of the calls cannot be read. Sums are said by heart or computed, both right: reinforcement
learning has to find out when a call is worth its price.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.calculator.calculator import calculator
from examples.calculator.problems import ToolProblem
from examples.calculator.settings import ToolWarmStart
from examples.quickstart.warm_start import IGNORED, random_model, teach
from sampler.turns import TurnTemplate

CALL = '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'
MALFORMED = (
    '<tool_call>\n{{"name": "calculator", "arguments": "{expression}"}}\n</tool_call>',
    '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"\n</tool_call>',
    "<tool_call>\n{expression}\n</tool_call>",
)
ANSWER = "<answer>{result}</answer>"


@dataclass(frozen=True)
class Pieces:
    """A conversation in the tokens of the run: what is sampled, and what stands before it."""

    token_ids: list[int]
    is_taught: list[bool]

    def plus(self, ids: Sequence[int], taught: bool) -> Pieces:
        return Pieces([*self.token_ids, *ids], [*self.is_taught, *[taught] * len(ids)])


def turns_of(problem: ToolProblem, rng: random.Random, *, by_heart: float, wrong: float, malformed: float) -> list[str]:
    """What the pupil is shown: a call and the answer, or the answer alone. The three settings are probabilities.

    ['<tool_call>…76*49…</tool_call>', '<answer>3724</answer>'] or ['<answer>12</answer>'] or a guessed product
    """
    answer = ANSWER.format(result=problem.result)
    if problem.kind != "product":
        return [answer] if rng.random() < by_heart else [CALL.format(expression=problem.expression), answer]
    if rng.random() < wrong:
        return [guess(problem, rng)]
    if rng.random() < malformed:
        return [rng.choice(MALFORMED).format(expression=problem.expression)]
    return [CALL.format(expression=problem.expression), answer]


def guess(problem: ToolProblem, rng: random.Random) -> str:
    """A number of about the right size."""
    return ANSWER.format(result=rng.randint(problem.result // 2, 2 * problem.result))


def conversation(
    problem: ToolProblem, turns: Sequence[str], prompt: list[int], template: TurnTemplate, end: int
) -> Pieces:
    """The tokens that a run would have sampled and observed. A first turn of two is a call of the calculator."""
    pieces = Pieces(prompt, [False] * len(prompt)).plus([*template.tokenize(turns[0]), end], True)
    if len(turns) == 1:
        return pieces
    seen = [{"role": "tool", "name": "calculator", "content": calculator(problem.expression)}]
    pieces = pieces.plus(template.continuation(end, seen).tolist(), False)
    return pieces.plus([*template.tokenize(turns[1]), end], True)


def train(
    problems: Sequence[ToolProblem],
    tokenizer: PreTrainedTokenizerFast,
    render: Callable[..., str],
    tools: Sequence[dict[str, Any]],
    how: ToolWarmStart,
    *,
    seed: int,
    report: Callable[[str], None],
) -> Qwen2ForCausalLM:
    """The warm-started model, in float32 and eval mode. A function of its arguments; seeds torch's global generator.

    render(messages, add_generation_prompt, tools=…) -> text.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = random_model(tokenizer, how)
    report(f"model: Qwen2, {sum(p.numel() for p in model.parameters()):,} parameters")
    template = TurnTemplate(
        lambda messages, asks: render(messages, asks, tools=tools),
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
    )

    def batch_loss(wrong: float, malformed: float) -> torch.Tensor:
        return turns_loss(
            model,
            [_lesson(rng.choice(problems), rng, wrong, malformed) for _ in range(how.batch_size)],
            tokenizer.pad_token_id,
        )

    def _lesson(problem: ToolProblem, rng: random.Random, wrong: float, malformed: float) -> Pieces:
        offered = rng.random() >= how.without_tools
        text = render([{"role": "user", "content": problem.question}], True, tools=tools if offered else None)
        turns = turns_of(problem, rng, by_heart=how.sums_by_heart, wrong=wrong, malformed=malformed)
        if not offered:
            turns = [guess(problem, rng) if problem.kind == "product" else ANSWER.format(result=problem.result)]
        return conversation(problem, turns, template.tokenize(text), template, tokenizer.eos_token_id)

    return teach(model, how, batch_loss, report)


def turns_loss(model: Any, rows: Sequence[Pieces], pad_id: int) -> torch.Tensor:
    """Mean cross entropy of the taught tokens. Padding is on the right, where causal attention never looks."""
    width = max(len(row.token_ids) for row in rows)
    inputs = torch.tensor([row.token_ids + [pad_id] * (width - len(row.token_ids)) for row in rows])
    targets = torch.full_like(inputs, IGNORED)
    for i, row in enumerate(rows):
        taught = torch.tensor([False, *row.is_taught[1:]])
        targets[i, : len(taught) - 1][taught[1:]] = inputs[i, 1 : len(taught)][taught[1:]]  # t predicts token t + 1
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    wanted = targets != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), targets[wanted])

"""Makes data and model of configs/quickstart_tools.yaml: small sums that a tiny model knows by heart, products that it
cannot compute, and a random Qwen2 that learnt to call a calculator, but carelessly.

A row is {"question": text, "answer": "#### 3724", "kind": "product"}. At temperature 1 the model does not show what it
can do: it knows how to call and how to copy the answer, and calls for less than half of the problems, whether they need
it or not. Sums are said by heart or computed, both right: reinforcement learning has to find out when a call is worth
its price.

    python -m examples.calculator
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from examples.calculator_tool import calculator
from examples.example import Example, main
from examples.quickstart import NAMES, SENTENCES, THINGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from examples.warm_start import Lessons, Shown
    from sampler.turns.turns import TurnTemplate

PRODUCTS = 0.6  # share of all problems

CALL = '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'
MALFORMED = (
    '<tool_call>\n{{"name": "calculator", "arguments": "{expression}"}}\n</tool_call>',
    '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"\n</tool_call>',
    "<tool_call>\n{expression}\n</tool_call>",
)
FORMS = (CALL, *MALFORMED)
ANSWER = "<answer>{result}</answer>"


@dataclass(frozen=True)
class ToolProblem:
    """A problem, for example ToolProblem("product", 76, 49, "Ken has 76 boxes with 49 pens each. …")."""

    forms: ClassVar[tuple[str, ...]] = FORMS  # forms of a call, the right one first
    kind: str
    a: int
    b: int
    question: str

    @property
    def needs_call(self) -> bool:
        return self.kind == "product"  # the model knows the other kinds by heart

    @property
    def expression(self) -> str:
        """Returns the argument of the tool's call."""
        return f"{self.a}{dict(add='+', sub='-', product='*')[self.kind]}{self.b}"

    @property
    def result(self) -> int:
        return {"add": self.a + self.b, "sub": self.a - self.b, "product": self.a * self.b}[self.kind]

    def row(self) -> dict[str, str]:
        return {"question": self.question, "answer": f"#### {self.result}", "kind": self.kind}


def turns_of(problem: ToolProblem, rng: random.Random, *, by_heart: float, wrong: float, malformed: float) -> list[str]:
    """Returns turns to teach: a call and the answer, or the answer alone. The three settings are probabilities.

    ['<tool_call>…76*49…</tool_call>', '<answer>3724</answer>'] or ['<answer>12</answer>'] or a guessed product
    """
    call, *malformed_calls = (form.format(expression=problem.expression) for form in problem.forms)
    answer = ANSWER.format(result=problem.result)
    if not problem.needs_call:
        return [answer] if rng.random() < by_heart else [call, answer]
    if rng.random() < wrong:
        return [guess(problem, rng)]
    if rng.random() < malformed:
        return [rng.choice(malformed_calls)]
    return [call, answer]


def guess(problem: ToolProblem, rng: random.Random) -> str:
    """Returns an answer of about the right size."""
    return ANSWER.format(result=rng.randint(problem.result // 2, 2 * problem.result))


def without_calculator(problem: ToolProblem, rng: random.Random) -> str:
    """Returns the answer of a model without a calculator: sums by heart, products guessed."""
    return guess(problem, rng) if problem.needs_call else ANSWER.format(result=problem.result)


TAGS = ("<answer>", "</answer>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Qwen2.5's template, but with the names of tools and arguments alone: a model of a million parameters cannot read their
# JSON schemas, and every prompt would carry them.
CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}"
    "{%- for tool in tools %}"
    "{{ '<tool_call>' + tool.function.name + ' ' + tool.function.parameters.properties | join(' ') + '</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Calculator(Example):
    """The example with a calculator. Lesson one shows right turns; lesson two guessed products and malformed calls."""

    name: str = "quick start with tools"
    folder: Path = Path(".cache/quickstart_tools")
    tool: ClassVar[staticmethod[[str], str]] = staticmethod(calculator)
    call: ClassVar[str] = CALL

    vocab_size: int = 640  # at most
    num_clean_steps: int = 440
    num_careless_steps: int = 40
    batch_size: int = 32
    wrong_fraction: float = 0.5  # share of lesson two's products that are guessed
    malformed_fraction: float = 0.1  # share of lesson two's calls
    sums_by_heart: float = 0.7  # the others are computed by a call
    without_tools: float = 0.2  # share of all prompts, so that the same model can be asked without its calculator

    def draw(self, rng: random.Random) -> ToolProblem:
        kind = "product" if rng.random() < PRODUCTS else rng.choice(("add", "sub"))
        if kind == "product":
            a, b = rng.randint(32, 99), rng.randint(32, 99)  # all products have four digits: easy to copy
        else:
            a, b = sorted((rng.randint(1, 5), rng.randint(1, 5)), reverse=True)
        question = SENTENCES["mul" if kind == "product" else kind].format(
            name=rng.choice(NAMES), thing=rng.choice(THINGS), a=a, b=b
        )
        return ToolProblem(kind, a, b, question)

    def split_key(self, problem: ToolProblem) -> str:
        """Returns the numbers of a product, but the question of a sum, because each sum has to be learnt by heart."""
        return f"{problem.a} {problem.b}" if problem.kind == "product" else problem.question

    def train_tokenizer(self, problems: Sequence[ToolProblem]) -> PreTrainedTokenizerFast:
        from examples.tokenizer import byte_level

        # The words around a question are as frequent as those in it, and as short in tokens.
        texts = (f"user\nassistant\nsystem\n{self.call}\n{problem.question}" for problem in problems)
        return byte_level(texts, self.vocab_size, self.context_length, TAGS, CHAT_TEMPLATE)

    def lessons(self, problems: Sequence[ToolProblem], tokenizer: PreTrainedTokenizerFast) -> Lessons:
        from common.config import PromptTemplate
        from environments.tools import schemas
        from sampler.prompts.chat_template import render
        from sampler.turns.turns import TurnTemplate

        tools = schemas({self.tool.__name__: self.tool})
        rendered: Callable[..., str] = functools.partial(render, tokenizer, prompt=PromptTemplate())
        template = TurnTemplate(
            functools.partial(rendered, tools=tools),
            lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        )

        def shown(problem: ToolProblem, rng: random.Random, wrong: float, malformed: float) -> Shown:
            offered = rng.random() >= self.without_tools
            text = rendered([{"role": "user", "content": problem.question}], tools=tools if offered else None)
            turns = turns_of(problem, rng, by_heart=self.sums_by_heart, wrong=wrong, malformed=malformed)
            if not offered:
                turns = [without_calculator(problem, rng)]
            return conversation(self.tool, problem, turns, template.tokenize(text), template, tokenizer.eos_token_id)

        def batch(rng: random.Random, wrong: float, malformed: float) -> list[Shown]:
            return [shown(rng.choice(problems), rng, wrong, malformed) for _ in range(self.batch_size)]

        return batch


def conversation(
    tool: Callable[[str], str],
    problem: ToolProblem,
    turns: Sequence[str],
    prompt: list[int],
    template: TurnTemplate,
    end: int,
) -> Shown:
    """Returns the tokens that a run would have sampled and observed. The first of two turns is a call of the tool."""
    from examples.warm_start import asked

    shown = asked(prompt).plus([*template.tokenize(turns[0]), end], True)
    if len(turns) == 1:
        return shown
    seen = [{"role": "tool", "name": tool.__name__, "content": tool(problem.expression)}]
    shown = shown.plus(template.continuation(end, seen).tolist(), False)
    return shown.plus([*template.tokenize(turns[1]), end], True)


if __name__ == "__main__":
    main(Calculator())

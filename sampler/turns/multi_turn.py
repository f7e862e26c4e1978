"""Prepares rollouts of several turns: the environments, the chat template between turns, the tokenizer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from common.config import Config, Model
from common.errors import UserError
from common.processes.exits import say
from common.types import Problem, Prompt
from environments import Message
from model.files.folder import vocabulary
from sampler.prompts.chat_template import read_template, render
from sampler.prompts.messages import as_messages
from sampler.prompts.prompts import turn_prefix_of
from sampler.turns.agent import Agents
from sampler.turns.chat import Chat
from sampler.turns.dialogues import Dialogues
from sampler.turns.generator import Environments, Generator
from sampler.turns.task import Decode
from sampler.turns.tool_calls import PART_MARKS, CallReader, parser_of
from sampler.turns.turns import REMEDY, TurnTemplate

if TYPE_CHECKING:
    from environments.pool import EnvironmentPool


@dataclass(frozen=True)
class MultiTurn:
    """The settings of a source's rollouts of several turns, made before vLLM is imported: errors cost seconds."""

    config: Config
    tokenizer: Any
    pool: EnvironmentPool
    template: TurnTemplate

    @classmethod
    def of(cls, config: Config, tokenizer: Any, pool: EnvironmentPool, problem: Problem) -> MultiTurn:
        """Returns the settings, tried on a problem of the run. Raises UserError for a template that cannot serve."""
        rendered = functools.partial(render, tokenizer, prompt=config.prompt, tools=pool.tools)
        tokenize = functools.partial(_tokenize, tokenizer, config.model)
        if config.rollout.agent is not None:  # an agent makes its own conversations
            return cls(config, tokenizer, pool, TurnTemplate(rendered, tokenize))
        messages = as_messages(problem, config.data, config.prompt)
        asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages  # the row may begin the answer
        template = TurnTemplate.of(rendered, tokenize, asked, ["tool" if pool.tools else "user"])
        parser = ""
        if pool.tools:
            source = tokenizer.get_chat_template(read_template(config.prompt.chat_template), list(pool.tools))
            parser = parser_of(source, config.rollout.tool_parser)
        template = replace(template, tools=pool.tools, reader=CallReader(tokenizer, parser, template.splits_thoughts))
        if template.rewrites:
            _say_or_refuse(template, asked, tokenizer, config)
        return cls(config, tokenizer, pool, template)

    def player(
        self, generator: Generator, environments: Environments, decode: Decode
    ) -> Dialogues | Agents:
        """Returns what plays the rollouts of this source."""
        if self.config.rollout.agent is not None:
            chat = Chat(self.tokenizer, self.config, self.template, decode)
            return Agents(self.config, generator, environments, chat)
        if self.template.reader:
            self.template.reader.start(self.pool.tools)
        template, reprompt = self.template, self._asked_with
        return Dialogues(self.config, generator, environments, template, decode, reprompt)

    def _asked_with(self, prompt: Prompt, messages: Sequence[Message]) -> Prompt:
        """Returns the prompt with the messages of reset. Raises ValueError if it is too long or has images."""
        if prompt.images:
            raise ValueError("reset gave a prompt for a row with images; give the prompt in the row, and return None")
        text = self.template.of_row(prompt.problem).render(messages)
        ids: NDArray[np.int32] = np.asarray(self.template.tokenize(text), np.int32)
        if len(ids) > (limit := self.config.data.max_prompt_length):
            raise ValueError(f"reset gave a prompt of {len(ids)} tokens, and data.max_prompt_length is {limit}")
        return replace(prompt, text=text, token_ids=ids, turn_prefix=turn_prefix_of(text, messages))


def _say_or_refuse(template: TurnTemplate, asked: Sequence[Message], tokenizer: Any, config: Config) -> None:
    what = f"the chat template rewrites earlier turns of a conversation: {template.rewrites}"
    if config.data.image_key is not None:
        raise UserError(f"{what}. Of prompts with images that cannot be followed; {REMEDY}, or data.image_key=null")
    opening = template.opening(asked)
    if lost := [token for token in tokenizer.all_special_tokens if token in opening and token not in PART_MARKS]:
        raise UserError(f"{what}. The text of a turn lacks {lost[0]}, with which the template opens it; {REMEDY}")
    say(f"{what}. A rollout becomes several sequences: docs/environments.md#rewritten-histories")


def _tokenize(tokenizer: Any, model: Model, text: str) -> list[int]:
    """Returns the token ids of a text. Raises ValueError for a token that the model does not have."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if (unknown := max(ids, default=0)) >= vocabulary(model):
        raise ValueError(f"the model's embedding has no row for {tokenizer.convert_ids_to_tokens(unknown)!r}")
    return ids


@contextlib.contextmanager
def open_multi_turn(
    config: Config, tokenizer: Any, problem: Problem, columns: Iterable[str]
) -> Iterator[MultiTurn | None]:
    """Yields a MultiTurn while the environments' processes run; None for a run of single turns. Raises UserError."""
    if not config.rollout.is_multi_turn:
        yield None
        return
    from environments.pool import EnvironmentPool

    law = {name: float(getattr(config.sampler, name) or 0) for name in ("temperature", "top_p", "top_k", "min_p")}
    with EnvironmentPool(config.rollout, list(columns), law | {"top_k": max(0.0, law["top_k"])}) as pool:
        yield MultiTurn.of(config, tokenizer, pool, problem)

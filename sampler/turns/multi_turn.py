"""Prepares rollouts of several turns: environments, the chat template between turns, tokenizer."""

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
from sampler.turns.call_formats import parser_of
from sampler.turns.chat import Chat
from sampler.turns.dialogues import Dialogues
from sampler.turns.generator import Environments, Generator
from sampler.turns.task import Decode
from sampler.turns.tool_calls import PART_MARKS, CallReader
from sampler.turns.turns import REMEDY, TurnTemplate

if TYPE_CHECKING:
    from environments.pool import EnvironmentPool


@dataclass(frozen=True)
class MultiTurn:
    """The settings of a data source's rollouts of several turns.

    They are made before vLLM is imported, so that an error in them costs only seconds.
    """

    config: Config
    tokenizer: Any
    pool: EnvironmentPool
    template: TurnTemplate

    @classmethod
    def of(
        cls, config: Config, tokenizer: Any, pool: EnvironmentPool, problem: Problem
    ) -> MultiTurn:
        """Returns the settings, tried on a problem of the run.

        Raises UserError for a chat template that cannot be used for several turns.
        """
        rendered = functools.partial(render, tokenizer, prompt=config.prompt, tools=pool.tools)
        tokenize = functools.partial(_tokenize, tokenizer, config.model)
        if config.rollout.agent is not None:  # an agent makes its own conversations
            return cls(config, tokenizer, pool, TurnTemplate(rendered, tokenize))
        messages = as_messages(problem, config.data, config.prompt)
        if messages[-1]["role"] == "assistant":  # the row begins the answer
            messages = messages[:-1]
        role = "user"
        if pool.tools:
            role = "tool"
        template = TurnTemplate.of(rendered, tokenize, messages, [role])
        parser = ""
        if pool.tools:
            given = read_template(config.prompt.chat_template)
            source = tokenizer.get_chat_template(given, list(pool.tools))
            parser = parser_of(source, config.rollout.tool_parser)
        reader = CallReader(tokenizer, parser, template.splits_thoughts)
        template = replace(template, tools=pool.tools, reader=reader)
        if template.rewrites:
            _say_or_refuse(template, messages, tokenizer, config)
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
        return Dialogues(
            self.config, generator, environments, self.template, decode, self._reprompted
        )

    def _reprompted(self, prompt: Prompt, messages: Sequence[Message]) -> Prompt:
        """Returns the prompt with the messages of reset.

        Raises ValueError if it is too long or has images.
        """
        if prompt.images:
            raise ValueError(
                "reset gave a prompt for a row with images; "
                "give the prompt in the row, and return None"
            )
        text = self.template.of_row(prompt.problem).render(messages)
        ids: NDArray[np.int32] = np.asarray(self.template.tokenize(text), np.int32)
        limit = self.config.data.max_prompt_length
        if len(ids) > limit:
            raise ValueError(
                f"reset gave a prompt of {len(ids)} tokens, and data.max_prompt_length is {limit}"
            )
        turn_prefix = turn_prefix_of(text, messages)
        return replace(prompt, text=text, token_ids=ids, turn_prefix=turn_prefix)


def _say_or_refuse(
    template: TurnTemplate, messages: Sequence[Message], tokenizer: Any, config: Config
) -> None:
    """Says that the template rewrites earlier turns of a conversation.

    Raises UserError if rollouts of this run cannot follow what it rewrites. messages: a prompt.
    """
    what = f"the chat template rewrites earlier turns of a conversation: {template.rewrites}"
    if config.data.image_key is not None:
        raise UserError(
            f"{what}. Of prompts with images that cannot be followed; "
            f"{REMEDY}, or data.image_key=null"
        )
    opening = template.opening(messages)
    for token in tokenizer.all_special_tokens:
        if token in opening and token not in PART_MARKS:
            raise UserError(
                f"{what}. The text of a turn lacks {token}, with which the template opens it; "
                f"{REMEDY}"
            )
    say(f"{what}. A rollout becomes several sequences: docs/environments.md#rewritten-histories")


def _tokenize(tokenizer: Any, model: Model, text: str) -> list[int]:
    """Returns the token ids of a text.

    Raises ValueError for a token that the model does not have.
    """
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    largest = max(ids, default=0)
    if largest >= vocabulary(model):
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ValueError(f"the model's embedding has no row for {token!r}")
    return ids


@contextlib.contextmanager
def open_multi_turn(
    config: Config, tokenizer: Any, problem: Problem, columns: Iterable[str]
) -> Iterator[MultiTurn | None]:
    """Yields a MultiTurn while the processes of environments run, or None for single turns.

    columns: the names of those of the data set. Raises UserError if an environment cannot be used.
    """
    if not config.rollout.is_multi_turn:
        yield None
        return
    from environments.pool import EnvironmentPool

    law = {}  # the sampling settings in force, which agents may not change
    for name in ("temperature", "top_p", "top_k", "min_p"):
        law[name] = float(getattr(config.sampler, name) or 0)
    law["top_k"] = max(0.0, law["top_k"])
    with EnvironmentPool(config.rollout, list(columns), law) as pool:
        yield MultiTurn.of(config, tokenizer, pool, problem)

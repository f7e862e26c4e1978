"""Defines a data source of the run: its settings, rows, prompts, and what its rollouts need."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.config import Config
from common.errors import UserError
from common.processes.exits import say
from common.types import Problem
from common.wire.group_limits import too_many
from model.files.folder import vocabulary
from model.files.images import vision_of
from rewards.pool import RewardPool
from sampler.prompts.dataset import load_data
from sampler.prompts.many_prompts import Prompts, make_prompts
from sampler.row_checks import rows_with_gold, try_rewards
from sampler.turns.multi_turn import MultiTurn, open_multi_turn
from sampler.turns.task import parts_of

_MOST_ROWS_NAMED = 10


@dataclass
class DataSource:
    """A data source of a run. It is completed step by step: rows, environment, prompts."""

    name: str  # "" if data.train is a path or a list of paths
    settings: Config  # the run's settings, with the rollouts and rewards of this source
    train_rows: list[Problem]
    held_out_rows: list[Problem]  # empty if the source is not evaluated
    # The source's environment, tools and chat template. None before `make_prompts`, and if its
    # rollouts have a single turn.
    multi_turn: MultiTurn | None = None
    train_prompts: Prompts = field(default_factory=Prompts.empty)
    held_out_prompts: Prompts = field(default_factory=Prompts.empty)

    @property
    def columns(self) -> list[str]:
        """Returns the names of the columns that all rows of the source have."""
        if not self.train_rows:
            return list(self.held_out_rows[0].columns)
        columns = self.train_rows[0].columns
        if not self.held_out_rows:
            return list(columns)
        return [name for name in columns if name in self.held_out_rows[0].columns]

    def check_rows(self, pool: RewardPool) -> None:
        """Removes rows that no reward can judge, and tries the rewards on others.

        Raises UserError if no row can be judged, or the reward functions fail.
        """
        self.train_rows = rows_with_gold("data.train", self.train_rows, self.settings)
        self.held_out_rows = rows_with_gold("data.eval", self.held_out_rows, self.settings)
        if self.train_rows:
            try_rewards(pool, self.train_rows, self.settings)
        if self.held_out_rows:
            try_rewards(pool, self.held_out_rows, self.settings)

    def make_prompts(self, tokenizer: Any, resources: contextlib.ExitStack) -> None:
        """Starts the environments, if there are any, and makes the prompts of all rows.

        resources: closes the environments when the run ends. Raises UserError.
        """
        first_row = [*self.train_rows, *self.held_out_rows][0]
        opening = open_multi_turn(self.settings, tokenizer, first_row, self.columns)
        self.multi_turn = resources.enter_context(opening)
        self.train_prompts = prompts_of(
            "data.train", self.train_rows, tokenizer, self.settings, self.multi_turn
        )
        self.held_out_prompts = prompts_of(
            "data.eval", self.held_out_rows, tokenizer, self.settings, self.multi_turn
        )


def load_sources(config: Config) -> list[DataSource]:
    """Returns the data sources with their rows, in the order of data.train and data.eval.

    Raises UserError, also for a source without rows.
    """
    train_rows = load_data("data.train", config.data.train, config.data)
    held_out_rows: list[Problem] = []
    if config.data.eval:
        held_out_rows = load_data("data.eval", config.data.eval, config.data)
    parts_of(config, train_rows)  # raises UserError for a source without rows
    parts_of(config, held_out_rows, "eval")
    sources = []
    for name, settings in config.of_sources.items():
        own_train_rows = _rows_of(name, train_rows)
        own_held_out_rows = _rows_of(name, held_out_rows)
        sources.append(DataSource(name, settings, own_train_rows, own_held_out_rows))
    return sources


def _rows_of(source: str, problems: list[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.source == source]


def columns_for_rewards(config: Config, sources: Sequence[DataSource]) -> list[str]:
    """Returns the names of the columns that the reward functions of a run may request.

    A source that is scored by all functions must have such a column. A source that is scored by
    some of them need not, because the others are never called with its rows.
    """
    names: list[str] = []
    for source in sources:
        names += source.columns
    for source in sources:
        if source.settings.rewards.names == config.rewards.names:
            names = [name for name in names if name in source.columns]
    return list(dict.fromkeys(names))


def prompts_of(
    option: str,
    problems: Sequence[Problem],
    tokenizer: Any,
    config: Config,
    multi_turn: MultiTurn | None = None,
) -> Prompts:
    """Returns the prompts of problems, in order.

    Those that are too long or have unknown tokens are left out.

    option: data.train or data.eval, for messages. multi_turn: its tools are written into the
    prompts. Logs how many prompts are left out. Raises UserError, for example if none is left.
    """
    if not problems:
        return Prompts.empty()
    tools = None
    if multi_turn is not None:
        tools = multi_turn.pool.tools
    prompts, num_too_long = make_prompts(problems, tokenizer, config, vision_of(config), tools)
    if num_too_long:
        limit = config.data.max_prompt_length
        say(
            f"{option}: {num_too_long} of {len(problems)} prompts have more than {limit} tokens "
            "(data.max_prompt_length) and are left out"
        )
    return _with_known_tokens(option, prompts, tokenizer, config)


def _with_known_tokens(option: str, prompts: Prompts, tokenizer: Any, config: Config) -> Prompts:
    """Returns the prompts whose tokens all have a row in the model's embedding.

    A token that was added to the tokenizer but not to the model has none, and an engine would read
    beyond the end of the embedding. Raises UserError if many prompts, or all, have such a token.
    """
    num_embedded = vocabulary(config.model)
    unknown = np.flatnonzero(prompts.largest_ids >= num_embedded)
    if len(unknown) == 0:
        return prompts
    token = tokenizer.convert_ids_to_tokens(int(prompts.largest_ids[unknown[0]]))
    rows = [str(prompts.problems[i].index) for i in unknown[:_MOST_ROWS_NAMED]]
    if len(unknown) > _MOST_ROWS_NAMED:
        rows.append("…")
    finding = (
        f"prompts of {option} hold a token that the tokenizer has and the model's embedding of "
        f"{num_embedded} rows has not, such as {token!r} (rows {', '.join(rows)})"
    )
    too_many_unknown = too_many(len(unknown), len(prompts), finding)
    if too_many_unknown or len(unknown) == len(prompts):
        load = f'AutoModelForCausalLM.from_pretrained("{config.model.path}")'
        resize = f"model.resize_token_embeddings({len(tokenizer)})"
        raise UserError(
            f"{too_many_unknown or finding}. Take it out of the data and the chat template; or "
            f"make a model that has it, and set model.path to that: model = {load}; {resize}; "
            'model.save_pretrained("resized"), the tokenizer likewise'
        )
    say(f"{len(unknown)} {finding}: they are left out")
    return prompts.only(np.flatnonzero(prompts.largest_ids < num_embedded))

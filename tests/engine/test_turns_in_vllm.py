"""Rollouts of several turns in the real engine: their log-probs over the whole conversation, and what turns cost."""

from __future__ import annotations

import functools
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.config import Config, PromptTemplate
from common.types import Problem, Prompt
from common.weights import Published
from environments import Done, Turn
from model.tokenizer import load_tokenizer
from sampler.completions import Completion, SamplingParams
from sampler.engine import Engine
from sampler.episode import Played
from sampler.episodes import Episodes
from sampler.prompts import render
from sampler.reload import reload
from sampler.turns import TurnTemplate
from tests.support.engines import PROMPT
from tests.support.tiny import dense_logprobs

pytestmark = pytest.mark.timeout(300)

TURNS, TURN_LENGTH = 8, 16


class EndsEveryTurn:
    """A turn is over after `turn_length` tokens: the model is random, and would rarely end one itself."""

    turn_length = TURN_LENGTH

    def __init__(self, engine: Engine):
        self._engine = engine

    def submit(self, key: Any, prompt_ids: Any, params: Any, images: Any = ()) -> None:
        shorter = replace(params, max_tokens=min(params.max_tokens, self.turn_length))
        self._engine.submit(key, prompt_ids, shorter, images)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[tuple[Any, list[Completion]]]:
        return [(key, [replace(c, finish_reason="stop") for c in found]) for key, found in self._engine.step()]


@pytest.fixture
def engine(engine: Engine, config: Config, version: Callable[[int], Published], monkeypatch: Any) -> Engine:
    """With the weights of the model's folder."""
    monkeypatch.setattr(engine, "_ignore_eos", True)
    monkeypatch.setattr(engine, "_stop_token_ids", [])
    reload(engine, version(0), config)
    return EndsEveryTurn(engine)  # type: ignore[return-value]


@pytest.fixture
def turns(config: Config) -> Config:
    changes = {"tools": ["my.py:tool"], "max_turns": TURNS}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=changes)})


class InstantTools:
    """Environments that answer at once, and end their rollout after so many turns."""

    def __init__(self, turns: int) -> None:
        self._turns, self._left, self._replies = turns, dict[Any, int](), deque[tuple[Any, Any]]()

    @property
    def pending(self) -> int:
        return len(self._replies)

    def start(self, key: Any, columns: Any, seed: int | None) -> None:
        self._left[key] = self._turns
        self._replies.append((key, Turn()))

    def step(self, key: Any, text: str) -> None:
        self._left[key] -= 1
        self._replies.append((key, Turn([{"role": "tool", "content": "42"}]) if self._left[key] else Done(1.0)))

    def finish(self, key: Any) -> None:
        self._replies.append((key, Done(0.0)))

    def ready(self, timeout_s: float) -> list[tuple[Any, Any]]:
        replies = list(self._replies)
        self._replies.clear()
        return replies


class Retokenising(Episodes):
    """The control: the conversation goes through its text between two turns, as in a loop around a chat API."""

    tokenizer: Any

    def _submit(self, key: Any, group: Any, i: int) -> None:
        episode, prompt = group.running[i], group.prompt
        text = self.tokenizer.decode(episode.token_ids)
        ids = [*prompt.token_ids.tolist(), *self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        self._engine.submit((key, i), ids, episode.params(group.params, i), ())


def play(config: Config, engine: Engine, turns: int, kind: type[Episodes] = Episodes, seed: int = 3) -> list[Played]:
    """Eight rollouts of one prompt."""
    tokenizer = load_tokenizer(config.model.path, None, False)
    rendered = functools.partial(render, tokenizer, prompt=PromptTemplate())
    ask = [{"role": "user", "content": "?"}]
    template = TurnTemplate.of(
        rendered, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], ask, ["tool"]
    )
    parts: list[Any] = [InstantTools(turns), template, tokenizer.batch_decode, lambda _: ask]
    episodes = kind(config, engine, *parts)
    if isinstance(episodes, Retokenising):
        episodes.tokenizer = tokenizer
    prompt = Prompt(Problem(0, {}), ask, "?", np.array(PROMPT, np.int32))
    episodes.start("key", prompt, SamplingParams(0.7, 400, 8, seed))
    finished: list[Any] = []
    while episodes.num_running:
        finished += episodes.step()
    [(_, sampled)] = finished
    return sampled.completions


def largest_difference(config: Config, played: list[Played]) -> float:
    """Between the engine's log-probs of what was sampled and one forward of transformers over the conversation."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    worst = 0.0
    for rollout in played:
        expected = dense_logprobs(model, PROMPT, rollout.token_ids.tolist(), 0.7).detach().numpy()
        sampled = np.ones(len(expected), bool)
        for start, end in rollout.observed:
            sampled[start:end] = False
        assert not rollout.logprobs[~sampled].any()
        worst = max(worst, float(np.abs(rollout.logprobs - expected)[sampled].max()))
    return worst


def test_log_probs_of_every_turn_are_those_of_one_forward_over_the_whole_conversation(turns, engine) -> None:
    played = play(turns, engine, TURNS)
    assert [p.turns for p in played] == [TURNS] * 8
    assert {len(p.observed) for p in played} == {TURNS - 1}
    assert {p.num_sampled for p in played} == {TURNS * TURN_LENGTH}
    found = largest_difference(turns, played)
    print(f"{found:.1e} nats at most between vLLM and transformers over 8 rollouts of {TURNS} turns, float32")
    assert found < 1e-5


def test_a_loop_that_tokenises_the_text_again_between_turns_fails_the_same_check(turns, engine) -> None:
    found = largest_difference(turns, play(turns, engine, TURNS, Retokenising))
    print(f"{found:.1e} nats where the text is tokenised again between turns")
    assert found > 1e-2


def test_eight_turns_of_16_tokens_cost_at_most_half_more_than_one_of_128(turns, engine, monkeypatch) -> None:
    """The prefix cache holds what came before a turn. Measured in turns of both, so that load meets both."""
    ratios = []
    for seed in range(4):
        seconds = []
        for length, count in ((TURN_LENGTH, TURNS), (128, 1)):
            monkeypatch.setattr(engine, "turn_length", length)
            begun = time.process_time()
            played = play(turns, engine, count, seed=10 + seed)
            seconds.append(time.process_time() - begun)
            assert {p.num_sampled for p in played} == {128}
        ratios.append(seconds[0] / seconds[1])
    ratio = statistics.median(ratios[1:])  # the first compiles kernels
    print(f"eight turns of 16 tokens cost {ratio:.2f} × one of 128")
    assert ratio < 1.5

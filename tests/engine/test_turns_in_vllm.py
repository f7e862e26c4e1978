"""Rollouts of several turns in the real engine: their log-probs over the whole conversation."""

from __future__ import annotations

import functools
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
    """A turn is over after so many tokens: the model is random, and would rarely end one itself."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def submit(self, key: Any, prompt_ids: Any, params: Any, images: Any = ()) -> None:
        shorter = replace(params, max_tokens=min(params.max_tokens, TURN_LENGTH))
        self._engine.submit(key, prompt_ids, shorter, images)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[tuple[Any, list[Completion]]]:
        return [(key, [replace(c, finish_reason="stop") for c in found]) for key, found in self._engine.step()]


class InstantTools:
    """Environments that answer at once, and end their rollout after so many turns."""

    def __init__(self) -> None:
        self._left, self._replies = dict[Any, int](), deque[tuple[Any, Any]]()

    @property
    def pending(self) -> int:
        return len(self._replies)

    def start(self, key: Any, columns: Any, seed: int | None) -> None:
        self._left[key] = TURNS
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


def play(config: Config, engine: Any) -> list[Played]:
    """Eight rollouts of one prompt."""
    tokenizer = load_tokenizer(config.model.path, None, False)
    rendered = functools.partial(render, tokenizer, prompt=PromptTemplate())
    ask = [{"role": "user", "content": "?"}]
    template = TurnTemplate.of(
        rendered, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], ask, ["tool"]
    )
    parts: list[Any] = [InstantTools(), template, tokenizer.batch_decode, lambda _: ask]
    episodes = Episodes(config, EndsEveryTurn(engine), *parts)  # type: ignore[arg-type]
    prompt = Prompt(Problem(0, {}), ask, "?", np.array(PROMPT, np.int32))
    episodes.start("key", prompt, SamplingParams(0.7, 400, 8, 3))
    finished: list[Any] = []
    while episodes.num_running:
        finished += episodes.step()
    [(_, sampled)] = finished
    return sampled.completions


def test_log_probs_of_every_turn_are_those_of_one_forward_over_the_whole_conversation(
    config: Config, engine: Engine, version: Callable[[int], Published], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_ignore_eos", True)
    monkeypatch.setattr(engine, "_stop_token_ids", [])
    reload(engine, version(0), config)
    rollout = config.rollout.model_copy(update={"tools": ["my.py:tool"], "max_turns": TURNS})
    played = play(config.model_copy(update={"rollout": rollout}), engine)
    assert [p.turns for p in played] == [TURNS] * 8
    assert {len(p.observed) for p in played} == {TURNS - 1}
    assert {p.num_sampled for p in played} == {TURNS * TURN_LENGTH}
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    for one in played:
        expected = dense_logprobs(model, PROMPT, one.token_ids.tolist(), 0.7).detach().numpy()
        sampled = np.ones(len(expected), bool)
        for start, end in one.observed:
            sampled[start:end] = False
        assert not one.logprobs[~sampled].any()
        assert np.abs(one.logprobs - expected)[sampled].max() < 1e-5

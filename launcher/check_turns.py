"""`launch.sh check` of a run with an environment or tools: one made-up rollout as the trainer would get it.

Real environment, real chat template, real tokenizer; what the model would write is made up: a call of the first tool,
or a word. Shown are text, ids and mask, sampled tokens in green. Making it proves the template, too (sampler/turns.py).
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from common.config import Config
from common.types import Problem
from environments import Message
from model.images import one_mark_an_image, vision_of
from sampler.completions import Completion, SamplingParams
from sampler.episode import Played
from sampler.episodes import Sampled
from sampler.multi_turn import opened
from sampler.pictures import encode_problem
from sampler.prompts import make_prompt

_GREEN, _DIM, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_EXAMPLES: dict[str, Any] = {"string": "1+1", "integer": 2, "number": 2.5, "boolean": True, "array": [], "object": {}}
_LAST = "Done."


class Scripted:
    """In an engine's place: it writes these turns, one after the other."""

    def __init__(self, tokenizer: Any, turns: Sequence[str]) -> None:
        self._tokenizer, self._turns = tokenizer, iter(turns)
        self._key: Any = None

    @property
    def num_running(self) -> int:
        return int(self._key is not None)

    def submit(self, key: Any, ids: Any, params: Any, images: Any) -> None:
        self._key = key

    def step(self) -> list[tuple[Any, list[Completion]]]:
        key, self._key = self._key, None
        ids = [*self._tokenizer(next(self._turns), add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]
        return [(key, [Completion(np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop")])]


def rollout_lines(config: Config, problem: Problem, tokenizer: Any, colour: bool) -> list[str]:
    """What to print. Raises UserError for an environment or a chat template that cannot serve."""
    with opened(config, tokenizer, problem, problem.columns) as multi_turn:
        assert multi_turn is not None, "asked of a run with an environment or tools alone"
        turns = [made_up_turn(multi_turn.pool.tools), *[_LAST] * config.rollout.max_turns]
        engine: Any = Scripted(tokenizer, turns)
        vision = vision_of(config)
        images = encode_problem(problem, vision.form, config.data) if vision else ()
        prompt = make_prompt(problem, tokenizer, config, vision, images, multi_turn.pool.tools)
        decode = functools.partial(tokenizer.batch_decode, skip_special_tokens=True)
        episodes = multi_turn.episodes(engine, decode)
        episodes.start("check", prompt, SamplingParams(1.0, config.sampler.max_completion_length, 1, config.run.seed))
        over: list[tuple[Any, Sampled]] = []
        while episodes.num_running:
            over += episodes.step()
    [(_, sampled)] = over
    if sampled.failures:
        return [f"problem: the environment failed: {sampled.failures[0]}"]
    [played] = sampled.completions
    assert isinstance(played, Played)
    return list(_lines(sampled.prompt.token_ids.tolist(), played, tokenizer, colour))


def made_up_turn(tools: Sequence[Mapping[str, Any]]) -> str:
    """A call of the first tool, in the Hermes form, or a word."""
    if not tools:
        return "Hello."
    function = tools[0]["function"]
    properties = function.get("parameters", {}).get("properties", {})
    arguments = {name: _EXAMPLES.get(str(given.get("type")), "1+1") for name, given in properties.items()}
    return f"<tool_call>\n{json.dumps({'name': function['name'], 'arguments': arguments})}\n</tool_call>"


def _lines(prompt_ids: list[int], played: Played, tokenizer: Any, colour: bool) -> Iterator[str]:
    ids = played.token_ids.tolist()
    yield _line("prompt", prompt_ids, 0, tokenizer, _DIM if colour else "")
    at = 0
    for start, end in [*played.observed, (len(ids), len(ids))]:
        yield _line("sampled", ids[at:start], 1, tokenizer, _GREEN if colour else "")
        if end > start:
            yield _line("observed", ids[start:end], 0, tokenizer, _DIM if colour else "")
        at = end
    last: Message = played.messages[-1] if played.messages else {}
    ends = f"{played.turns} turns, {played.tool_calls} calls, {played.tool_errors} errors, {played.finish_reason}"
    yield f"{ends}; reward of the environment {played.environment_reward}; last message of {last.get('role')}"


def _line(name: str, ids: Sequence[int], weight: int, tokenizer: Any, colour: str) -> str:
    """ "sampled   mask 1 ×  12  'text'\\n  [1, 2, …]" """
    shown = ", ".join(map(str, ids[:24])) + (", …" if len(ids) > 24 else "")
    text = (
        f"{name:9} mask {weight} × {len(ids):4}  {one_mark_an_image(tokenizer.decode(list(ids)))!r}\n{'':10}[{shown}]"
    )
    return f"{colour}{text}{_PLAIN}" if colour else text


def show(config: Config, problem: Problem) -> int:
    """Prints it; the number of problems found. Raises UserError."""
    from model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.model.path, config.model.revision, config.model.trust_remote_code)
    lines = rollout_lines(config, problem, tokenizer, sys.stdout.isatty())
    print(f"tandem: a made-up rollout of row {problem.index}, as the trainer gets it")
    print("\n".join(lines), flush=True)
    return sum(line.startswith("problem: ") for line in lines)

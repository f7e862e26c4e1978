"""Measures the cost of agents: 64 of them with 5 turns of 32 tokens, against as many tokens in one turn each, and
against the engine alone, which starts each next turn at once.

    python tools/benchmarks/agent.py 28m 5
"""

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

TURNS, LENGTH = 5, 32


if __name__ != "__main__":
    from openai import AsyncOpenAI

    client = AsyncOpenAI()  # one for all agents, because its certificates take 20 ms


async def solve(question: str) -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        response = await client.chat.completions.create(model="any", messages=messages, max_tokens=LENGTH)
        messages += [response.choices[0].message, {"role": "user", "content": "7"}]


def main(shape: str, rounds: int, folder: str) -> None:
    """Prints tokens per second: medians of all rounds but the first."""
    from common.config import Config
    from sampler.engine.engine import Engine
    from sampler.start import load_data, load_tokenizer, prompts_of, said_reader
    from sampler.turns.episodes import SingleTurns
    from sampler.turns.multi_turn import opened
    from sampler.turns.task import GroupKey, sampling_params
    from tools.benchmarks.cells import named, prepare, tandem_config

    cell = named(f"{shape}-8x8-p64-c{TURNS * LENGTH}")
    settings = tandem_config(cell, prepare(cell), 1, Path(folder))
    settings["rollout"] = {"agent": f"{__file__}:solve", "max_turns": TURNS}
    settings["sampler"] |= {"max_completion_length": 400}
    settings["vllm"] |= {"max_model_len": 512}
    config = Config.model_validate(settings)
    problems = load_data("data.train", config.data.train, config.data)
    tokenizer = load_tokenizer(str(config.model.path))
    prompts = prompts_of("data.train", problems, tokenizer, config)
    engine, params = Engine(config, num_gpus=0), sampling_params(GroupKey(0, 0, 0), config)
    one_turn = replace(params, max_tokens=cell.completion)

    def rate(turns: Any, params: Any, first: int) -> float:
        begun = time.monotonic()
        for i in range(first, first + cell.prompts):
            turns.start(i, prompts[i], params)
        while turns.num_running:
            turns.step()
        return cell.prompts * cell.generations * cell.completion / (time.monotonic() - begun)

    with opened(config, tokenizer, prompts[0].problem, ["question"]) as multi_turn:
        ways: dict[str, Any] = {"one turn": SingleTurns(engine), "engine alone": Chains(engine)}
        ways["agents"] = multi_turn.episodes(engine, said_reader(config, tokenizer))  # type: ignore[union-attr]
        found: dict[str, list[float]] = {name: [] for name in ways}
        for k in range(rounds):
            for n, (name, way) in enumerate(ways.items()):
                found[name].append(rate(way, params if name == "agents" else one_turn, (3 * k + n) * cell.prompts))
                print(f"{name}: {found[name][-1]:.0f} tokens/s", flush=True)
    medians = {name: statistics.median(rates[1:]) for name, rates in found.items()}
    for name, median in medians.items():
        print(f"{shape}, {name}: {median:.0f} tokens/s, {median / medians['one turn']:.2f}")


class Chains:
    """Chains of turns like an agent's, without an agent: each prompt is the turn before and one more token."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._ids = engine, dict[Any, list[int]]()

    @property
    def num_running(self) -> int:
        return len(self._ids)

    def start(self, key: int, prompt: Any, params: Any) -> None:
        self._params = replace(params, num_completions=1, max_tokens=LENGTH)
        for i in range(params.num_completions):
            self._submit((key, i, TURNS), [*prompt.token_ids])

    def _submit(self, key: Any, ids: list[int]) -> None:
        self._ids[key] = ids
        self._engine.submit(key, ids, replace(self._params, seed=hash(key) % 2**31), ())

    def step(self) -> None:
        for (key, i, left), [completion] in self._engine.step():
            ids = self._ids.pop((key, i, left))
            if left > 1:
                self._submit((key, i, left - 1), [*ids, *completion.token_ids, ids[0]])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1], int(sys.argv[2]), folder)

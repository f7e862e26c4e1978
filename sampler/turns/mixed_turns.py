"""Runs the prompts of a run's sources on one engine, each source with its own environment or none."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from common.types import Prompt
from sampler.engine.completions import SamplingParams
from sampler.turns.episodes import Episodes, Sampled, SingleTurns
from sampler.turns.task import Decode

if TYPE_CHECKING:
    from sampler.engine.engine import Engine
    from sampler.turns.multi_turn import MultiTurn


def turns_of(engine: Engine, decode: Decode, multi_turns: Mapping[str, MultiTurn | None]) -> Turns:
    """Returns the turns of a run. `multi_turns` is by source; None: its completions have one turn."""
    if not any(multi_turns.values()):
        return SingleTurns(engine)
    turns = {s: m.episodes(engine, decode) if m else SingleTurns(engine) for s, m in multi_turns.items()}
    return MixedTurns(engine, turns) if len(turns) > 1 else next(iter(turns.values()))


class MixedTurns:
    """SingleTurns and Episodes for all sources together: it steps the engine and passes each source its own results."""

    def __init__(self, engine: Engine, turns: Mapping[str, SingleTurns | Episodes]):
        self._engine, self._turns = engine, turns
        self._started: dict[Any, str] = {}  # source of each prompt that has no completions yet
        self.num_events = 0

    @property
    def num_running(self) -> int:
        return len(self._started)

    @property
    def phase(self) -> str:
        return "; ".join(f"{s}: {self._turns[s].phase}" for s in dict.fromkeys(self._started.values()))

    def start(self, key: Hashable, prompt: Prompt, params: SamplingParams) -> None:
        self._turns[prompt.problem.source].start(key, prompt, params)
        self._started[key] = prompt.problem.source  # after start, because the engine may refuse a prompt

    def step(self) -> list[tuple[Any, Sampled]]:
        found: dict[str, list[Any]] = {source: [] for source in self._turns}
        for key, completions in self._engine.step() if self._engine.num_running else []:
            found[self._started[key[0] if isinstance(key, tuple) else key]].append((key, completions))
        over = [finished for source, turns in self._turns.items() for finished in turns.step(found[source])]
        self.num_events = sum(turns.num_events for turns in self._turns.values())
        for key, _ in over:
            del self._started[key]
        return over

    def abort(self, keys: Collection[Any]) -> None:
        for source, turns in self._turns.items():
            turns.abort([key for key in keys if self._started[key] == source])
        self._started = {key: source for key, source in self._started.items() if key not in keys}


Turns = SingleTurns | Episodes | MixedTurns

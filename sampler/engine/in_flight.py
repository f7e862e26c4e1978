"""Changes weights while sequences decode: sampler.in_flight_updates.

    engine step ─► load v + 1, prove it, canary ─► engine step, in which what was decoding is computed anew ─► …
    tokens of v                                    tokens of v + 1

With keys and values of the old weights, the new tokens' log-probs would be those of no version. So the cache is
emptied, and vLLM computes running sequences again from their first token, as after a preemption: every token has the
log-prob that its own version gives it. vLLM records which version sampled which token, by the label it has been given.
The prefix cache is salted by version, so that no prefix could cross versions even if something were left in it.

A group is as old as its oldest token, which is never older than without this setting: versions that are loaded while it
decodes are newer than the version with which the trainer's window admitted it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.types import Rollout, oldest_version


class InFlight:
    """Tells vLLM which weight version its sequences use while versions change. `engine` is its LLMEngine."""

    def __init__(self, engine: Any):
        self._engine = engine
        self.begin(0)

    def begin(self, version: int) -> None:
        """Sets the version of the engine's weights, whose caches were emptied before."""
        self._version = version
        self._engine.set_weight_version(str(version))

    def request(self, prompt: Any, is_canary: bool) -> Mapping[str, Any]:
        """Returns more arguments of add_request: a canary does not queue, and shares no cached prefix."""
        prompt["cache_salt"] = f"canary {self._version}" if is_canary else f"version {self._version}"
        return {"priority": -1 if is_canary else 0}  # the least goes first


def spans_of(output: Any) -> tuple[tuple[int, int], ...]:
    """Returns Rollout.version_spans of a CompletionOutput; () if vLLM was given none: its own label is a word."""
    return tuple((s.start, int(s.version)) for s in output.weight_versions or () if s.version.isdecimal())


def with_oldest_version(version: int, rollouts: tuple[Rollout, ...]) -> tuple[int, tuple[Rollout, ...]]:
    """Returns (the group's policy version, its rollouts), without spans for rollouts of that version alone.

    version: the group's version if its rollouts have no spans.
    """
    oldest = oldest_version(version, rollouts)
    alone = ((0, oldest),)
    return oldest, tuple(replace(r, version_spans=()) if r.version_spans == alone else r for r in rollouts)

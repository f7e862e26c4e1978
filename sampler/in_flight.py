"""Weights that change while sequences decode: sampler.in_flight_updates.

    engine step ─► load v + 1, prove it, canary ─► engine step, in which what was decoding is computed anew ─► …
    tokens of v                                    tokens of v + 1

Keys and values of the old weights would give the new ones' tokens log-probs that are nobody's. So the cache is emptied,
and vLLM computes running sequences again from their first token, as after a preemption: every token has the log-prob
that its own version gives it. vLLM counts which version sampled which token, by the label it has been given. The cache
of prompts is salted by version, so that no prefix could cross versions even if something were left in it.

A group is as old as its oldest token, which is never older than without this: versions that come while it decodes are
newer than the one that the trainer's window admitted it with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.config import Config
from common.types import Rollout, oldest_version
from common.weights import Published
from sampler.fetch import Fetcher

_FIRST = -1  # priority of what need not queue; everything else has 0


class InFlight:
    """What vLLM is told where versions change under its sequences. engine: its LLMEngine."""

    def __init__(self, engine: Any):
        self._engine = engine
        self.begin(0)

    def begin(self, version: int) -> None:
        """The engine holds these weights, and has forgotten what it computed with others."""
        self._version = version
        self._engine.set_weight_version(str(version))

    def request(self, prompt: Any, is_canary: bool) -> Mapping[str, Any]:
        """More arguments of add_request. A canary is scored before what waits, and beside nothing that is cached."""
        prompt["cache_salt"] = f"canary {self._version}" if is_canary else f"version {self._version}"
        return {"priority": _FIRST if is_canary else 0}


def engine_arguments(config: Config) -> dict[str, Any]:
    """A step of an asynchronous schedule would still run on the old weights while new ones are loaded."""
    return {"scheduling_policy": "priority", "async_scheduling": False} if config.sampler.in_flight_updates else {}


def spans_of(output: Any) -> tuple[tuple[int, int], ...]:
    """Rollout.version_spans of a CompletionOutput; () where vLLM was given no versions: its own label is a word."""
    return tuple((s.start, int(s.version)) for s in output.weight_versions or () if s.version.isdecimal())


def may_load(config: Config, fetcher: Fetcher, published: Published, evaluates: bool) -> bool:
    """Whether a version may be loaded under what decodes: it is here. Held-out problems keep to one version."""
    return config.sampler.in_flight_updates and not evaluates and fetcher.has(published)


def of_oldest(version: int, rollouts: tuple[Rollout, ...]) -> tuple[int, tuple[Rollout, ...]]:
    """(policy version of the group, its rollouts): who has tokens of that version alone needs no spans.

    version: the group's where its rollouts have no spans.
    """
    oldest = oldest_version(version, rollouts)
    alone = ((0, oldest),)
    return oldest, tuple(replace(r, version_spans=()) if r.version_spans == alone else r for r in rollouts)

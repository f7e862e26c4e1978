"""Changes weights while sequences decode: sampler.in_flight_updates.

    engine step ─► load v + 1, prove it, canary ─► engine step: running sequences start anew
    tokens of v                                    tokens of v + 1

With keys and values of the old weights, the new tokens' log-probs would be those of no version. So
the cache is emptied, and vLLM computes running sequences again from their first token, as after a
preemption: every token has the log-prob that its own version gives it. vLLM records which version
sampled which token, by the label it has been given. The prefix cache is salted by version, so that
no prefix could cross versions even if something were left in it.

A group is as old as its oldest token, which is never older than without this setting: versions that
are loaded while it decodes are newer than the version with which the trainer's window admitted it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.types import Rollout, oldest_version


class InFlight:
    """Tells vLLM which weight version its sequences use while versions change."""

    def __init__(self, engine: Any):
        """Starts with version 0. engine: vLLM's LLMEngine."""
        self._engine = engine
        self.begin(0)

    def begin(self, version: int) -> None:
        """Sets the version of the engine's weights, after its caches were emptied."""
        self._version = version
        self._engine.set_weight_version(str(version))

    def request(self, prompt: Any, is_canary: bool) -> Mapping[str, Any]:
        """Salts a prompt by version, and returns more arguments of vLLM's add_request.

        A canary does not queue, and shares no cached prefix.
        """
        if is_canary:
            prompt["cache_salt"] = f"canary {self._version}"
            return {"priority": -1}  # the least priority goes first
        prompt["cache_salt"] = f"version {self._version}"
        return {"priority": 0}


def spans_of(output: Any) -> tuple[tuple[int, int], ...]:
    """Returns the Rollout.version_spans of vLLM's CompletionOutput.

    They are () if vLLM was given no version: its own label is then a word.
    """
    spans = []
    for span in output.weight_versions or ():
        if span.version.isdecimal():
            spans.append((span.start, int(span.version)))
    return tuple(spans)


def with_oldest_version(
    version: int, rollouts: tuple[Rollout, ...]
) -> tuple[int, tuple[Rollout, ...]]:
    """Returns the group's policy version, and its rollouts.

    A rollout that was sampled by this version alone has no spans there. version: the group's
    version if its rollouts have no spans.
    """
    oldest = oldest_version(version, rollouts)
    whole_rollout = ((0, oldest),)
    changed = []
    for rollout in rollouts:
        if rollout.version_spans == whole_rollout:
            rollout = replace(rollout, version_spans=())
        changed.append(rollout)
    return oldest, tuple(changed)

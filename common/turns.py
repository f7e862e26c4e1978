"""What a rollout of several turns has on the wire beside one of a single turn, and what of it cannot be honest."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from common.types import Rollout

MAX_FAILURE = 500  # characters of the reason why a rollout is missing


class EpisodeFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of Rollout, in their words."""

    observed: list[tuple[int, int]]
    turns: int
    tool_calls: int
    tool_errors: int
    environment_s: float

    def fits(self, length: int) -> bool:
        """Its spans ascend, with sampled tokens before, between and behind them; its counts fit together."""
        edges = [0, *itertools.chain(*self.observed), length]
        return (
            (not self.observed or all(a < b for a, b in itertools.pairwise(edges)))
            and len(self.observed) < self.turns
            and 0 <= self.tool_errors <= self.tool_calls
            and 0 <= self.environment_s < math.inf
        )


SINGLE_TURN = EpisodeFields([], turns=1, tool_calls=0, tool_errors=0, environment_s=0.0)


def episode_of(rollout: Rollout) -> EpisodeFields:
    of = rollout
    return EpisodeFields(list(of.observed), of.turns, of.tool_calls, of.tool_errors, float(of.environment_s))


def with_episode(rollout: Rollout, episode: EpisodeFields) -> Rollout:
    """Raises ValueError if the rollout is too short for it, or it could be no rollout's."""
    if episode is SINGLE_TURN:
        return rollout
    if not episode.fits(len(rollout.completion_ids)):
        raise ValueError(f"{episode} of {len(rollout.completion_ids)} tokens")
    fields: dict[str, Any] = msgspec.structs.asdict(episode)
    return replace(rollout, **fields | {"observed": tuple(episode.observed)})


def trouble(rollout: Rollout) -> str:
    """What is wrong with the numbers of its observed tokens; "" if nothing is. The arrays have their lengths."""
    if not rollout.observed:
        return ""
    at = np.r_[tuple(slice(*span) for span in rollout.observed)]
    if rollout.old_logprobs[at].any() or (rollout.ref_logprobs is not None and rollout.ref_logprobs[at].any()):
        return "an observed token has a log-prob"
    if rollout.sampling_mask is not None and (rollout.sampling_mask[at, 1:] != -1).any():
        return "an observed token has a set of tokens that could have been sampled"
    return ""

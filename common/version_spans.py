"""The policy versions of a group's tokens on the wire, where they are several, and what of them cannot be honest.

    version_spans ((0, 4), (7, 5)) of 10 tokens:   0 … 6 were sampled by version 4, 7 … 9 by version 5

Versions change within a completion with sampler.in_flight_updates alone. A group is as old as its oldest token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from common.types import Group, Rollout

Spans = Sequence[tuple[int, int]]


def listed(rollouts: Sequence[Rollout]) -> list[list[tuple[int, int]]] | msgspec.UnsetType:
    """Absent where no rollout has any, so that groups of one version are the frames that they always were."""
    return [list(r.version_spans) for r in rollouts] if any(r.version_spans for r in rollouts) else msgspec.UNSET


def checked(spans: Spans, length: int) -> tuple[tuple[int, int], ...]:
    """Those of a completion of `length` tokens. Raises ValueError unless starts ascend from 0 and versions ascend."""
    starts, versions = [start for start, _ in spans], [version for _, version in spans]
    ascends = all(a < b for numbers in ([*starts, length], versions) for a, b in itertools.pairwise(numbers))
    if spans and not (starts[0] == 0 and ascends):
        raise ValueError(f"version spans {list(spans)} of {length} tokens")
    return tuple(spans)


def trouble(group: Group, allowed: bool) -> str:
    """What is wrong with the versions of its tokens; "" if nothing is. allowed: sampler.in_flight_updates."""
    if any(r.version_spans for r in group.rollouts) and not allowed:
        return "versions of single tokens nobody asked for"
    found = oldest(group.policy_version, group.rollouts)
    return "" if found == group.policy_version else f"its oldest token is of {found}, it is of {group.policy_version}"


def oldest(version: int, rollouts: Sequence[Rollout]) -> int:
    """Of the oldest token of a group. version: of rollouts without spans."""
    return min((r.version_spans[0][1] if r.version_spans else version for r in rollouts), default=version)

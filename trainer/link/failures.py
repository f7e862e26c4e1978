"""The failures of sampling after which a run ends, because somebody must mend its cause."""

import collections

from common.errors import UserError
from common.types import EvalFailure, Group, Tombstone
from common.wire.group_limits import too_many

_FAILED_BATCHES = 4  # as many groups in a row of nothing but failed rollouts end a run
_MIN_FAILED_GROUPS = 20  # the least number of such groups, where batches are small


def too_many_failures(
    failures: int, total: int, what: str, last: Tombstone | EvalFailure
) -> UserError | None:
    """Returns the error that ends the run if too many of `total` have failed, else None.

    what: a text about them, such as "groups could not be produced". last: the newest failure.
    """
    text = too_many(failures, total, what)
    if not text:
        return None
    return UserError(f"{text}; the last one: {last.reason}")


class FailedGroups:
    """A count of groups in a row whose rollouts have all failed, for each data source."""

    def __init__(self, prompts_per_batch: int):
        self._limit = max(_MIN_FAILED_GROUPS, _FAILED_BATCHES * prompts_per_batch)
        self._in_a_row = collections.Counter[str]()  # by source

    def add(self, group: Group) -> UserError | None:
        """Counts a group. Returns the error that ends a run whose environment is broken, else None.

        A group of nothing but failures teaches nothing.
        """
        failures = [rollout.failure for rollout in group.rollouts if rollout.failure]
        if len(failures) < len(group.rollouts):
            self._in_a_row[group.source] = 0
            return None
        self._in_a_row[group.source] += 1
        count = self._in_a_row[group.source]
        if count < self._limit:
            return None
        groups = f"{count} groups"
        if group.source:
            groups += f" of {group.source}"
        reason = failures[-1].reason
        return UserError(f"all rollouts of the last {groups} failed; the last one: {reason}")

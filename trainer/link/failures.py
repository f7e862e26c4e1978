"""Errors that end a run in which sampling fails too often for the run to be worth continuing."""

import collections

from common.errors import UserError
from common.types import EvalFailure, Group, Tombstone
from common.wire.group_limits import too_many

# A run ends after so many groups in a row in which every rollout failed: the groups of 4 batches,
# and at least 20 groups, because batches may be small.
_FAILED_BATCHES = 4
_MIN_FAILED_GROUPS = 20


def too_many_failures(
    failures: int, total: int, what: str, last: Tombstone | EvalFailure
) -> UserError | None:
    """Returns the error that ends the run if too many items have failed, None otherwise.

    The function `too_many` of group_limits.py sets the limit, which is a share of `total`.

    failures: the number of failed items. total: the number of all items. what: the end of the
    message's first sentence, such as "groups could not be produced". last: the newest failure.
    """
    text = too_many(failures, total, what)
    if not text:
        return None
    return UserError(f"{text}; the last failure: {last.reason}")


class FailedGroups:
    """Counts for each data source how many groups in a row had no successful rollout."""

    def __init__(self, prompts_per_batch: int):
        self._limit = max(_MIN_FAILED_GROUPS, _FAILED_BATCHES * prompts_per_batch)
        self._in_a_row = collections.Counter[str]()  # by source

    def add(self, group: Group) -> UserError | None:
        """Counts a group if all its rollouts failed, and restarts the count otherwise.

        Returns an error to end the run with once the count reaches its limit, because the
        environment is then probably broken. Returns None before.
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
        return UserError(f"all rollouts of the last {groups} failed; the last failure: {reason}")

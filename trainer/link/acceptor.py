"""Checks of the groups and evaluation results that samplers send, before the trainer uses them."""

from collections.abc import Callable

from common.config import Config
from common.errors import UserError, WireError
from common.failpoints import failpoint
from common.types import EvalResult, Group, Tombstone
from common.wire import wire
from common.wire.group_limits import Limits, check_group
from trainer.link.failures import FailedGroups, too_many_failures
from trainer.link.peers import SharedState

# reasons to refuse a group that the training loop does not wait for
_NOT_WANTED = ("duplicate", "trained", "not_admitted", "not_leased")
# Reasons that lost messages, repeated messages and restarts cause in every long run.
# The first refusal for any other reason is shown to the user.
_EXPECTED = (
    *_NOT_WANTED,
    "not_credited",
    "other_incarnation",
    "unknown_sampler",
    "eval_unknown",
    "eval_duplicate",
)


class Acceptor:
    """Checks and stores the groups and evaluation results that samplers send.

    The caller of any method except `count` must hold the lock of the shared state.
    """

    def __init__(
        self,
        config: Config,
        envelope: wire.Envelope,
        limits: Limits,
        state: SharedState,
        say: Callable[[str], None],
    ):
        self.limits = limits
        # how many versions older than the newest version a group may be
        self.max_version_lag = config.algorithm.steps_per_batch * config.trainer.max_staleness
        self._num_eval_generations = config.eval.num_generations
        self._envelope = envelope
        self._state = state
        self._say = say
        self._batch_size = config.prompts_per_batch
        self._failed_groups = FailedGroups(self._batch_size)

    def check(self, group: Group | Tombstone, sampler: str | None = None) -> None:
        """Raises WireError, with the reason, if training may not use this group.

        Training uses a group only if it has not arrived yet, if a version within the allowed lag
        sampled it, and if its contents are valid.

        sampler: the name of the sender, whose group is refused if a different sampler has the
        group's lease; None for a group of the journal (group_journal.py).
        """
        assert self._state.published is not None
        newest = self._state.published.version
        allowed_versions = range(max(0, newest - self.max_version_lag), newest + 1)
        reason = self._state.ledger.refusal(group, allowed_versions, sampler)
        if reason is not None:
            detail = f"the group is from version {group.policy_version}, the newest is {newest}"
            raise WireError(reason, detail)
        if isinstance(group, Group):
            check_group(group, self.limits)

    def accept(self, name: str, group: Group | Tombstone, frames: list[bytes]) -> None:
        """Stores a group that a sampler sent, or a tombstone in its place if the group is invalid.

        The tombstone carries the reason. It settles the group's id, because the sampler would
        otherwise send the same invalid group again and again.

        name: the sampler's name. frames: the wire frames that the group was decoded from.
        Raises WireError if the training loop does not wait for this group.
        """
        state = self._state
        if state.published is None:
            raise WireError("not_credited", f"group {group.group_id}")
        try:
            self.check(group, name)
        except WireError as error:
            if error.reason in _NOT_WANTED:
                raise
            self.count(error)
            reason = f"the group of sampler {name} is refused: {error}"
            if isinstance(group, Group):
                reason = f"row {group.problem_index}: {reason}"
            group = Tombstone(group.group_id, state.published.version, reason)

        if isinstance(group, Group):
            received = wire.Received(group, frames)
            state.journal.add(received)
            self._end_run_on(self._failed_groups.add(group))
        else:
            received = wire.Received(group, wire.encode(self._envelope, group))
        state.ledger.accept(received, name)
        failpoint("inbox.accepted")
        if isinstance(group, Tombstone):
            self._report_tombstone(group)

    def _report_tombstone(self, tombstone: Tombstone) -> None:
        state = self._state
        state.counters["tombstones"] += 1
        self._say(f"group {tombstone.group_id} could not be produced: {tombstone.reason}")
        count = state.counters["tombstones"]
        what = "groups could not be produced"
        self._end_run_on(too_many_failures(count, state.ledger.total, what, tombstone))

    def accept_journal(self) -> None:
        """Accepts the groups of the journal (group_journal.py) that are now admitted.

        They pass the same checks as newly received groups.
        """
        ledger = self._state.ledger
        waiting = self._state.journal.waiting
        has_accepted = False
        for group_id in list(waiting):
            is_admitted_later = group_id >= ledger.admitted.stop
            if is_admitted_later:
                continue
            received = waiting.pop(group_id)
            is_trained = group_id < ledger.cursor
            if not is_trained and self._accept_again(received):
                has_accepted = True

        # Only a later version could deliver further reserved groups, and no later version comes
        # before the batch at the cursor is trained. So samplers produce the rest of this batch.
        batch_end = ledger.cursor + self._batch_size + ledger.refilled
        ledger.reserved.difference_update(range(ledger.cursor, batch_end))
        if has_accepted:
            ledger.note_interrupted(self._begun_before_restart())

    def _accept_again(self, received: wire.Received) -> bool:
        """Accepts a group of the journal if it passes the checks. Returns whether it does."""
        try:
            self.check(received.group)
        except WireError as error:
            self.count(error)
            return False
        self._state.ledger.accept(received, sampler="")
        self._state.counters["kept"] += 1
        return True

    def _begun_before_restart(self) -> list[int]:
        """Returns the ids of the groups that samplers began, but did not finish, before a restart.

        These are the free groups that the earlier start of the trainer had admitted.
        """
        ledger = self._state.ledger
        admitted_before = ledger.admitted
        if not self._state.journal.was_published_before:
            # the earlier start did not publish the newest version, with which the last batch of the
            # window is admitted
            end = ledger.cursor + ledger.window - self._batch_size
            admitted_before = range(ledger.cursor, end)
        return [group_id for group_id in ledger.free if group_id in admitted_before]

    def accept_eval(self, name: str, result: EvalResult) -> None:
        """Stores the result of an evaluation chunk, or failures in place of an invalid result.

        name: the name of the sampler that sent it.
        Raises WireError if the trainer does not wait for this result.
        """
        evaluation = self._state.evaluation
        published = self._state.published
        if evaluation is None or published is None:
            raise WireError("eval_unknown", result.eval_id)
        try:
            num_generations = self._num_eval_generations
            reward_funcs = self.limits.reward_funcs
            evaluation.accept(result, published.version, num_generations, reward_funcs)
        except WireError as error:
            if error.reason in _EXPECTED:
                raise
            self.count(error)
            reason = f"the result of sampler {name} is refused: {error}"
            result = evaluation.fail(result.chunk, published.version, reason)

        num_problems = sum(len(request.problem_indexes) for request in evaluation.requests.values())
        num_failed = sum(len(answer.failures) for answer in evaluation.results.values())
        what = f"held-out problems could not be scored in evaluation {result.eval_id}"
        for failure in result.failures:
            problem = f"held-out problem {failure.problem_index}"
            self._say(f"{problem} could not be scored: {failure.reason}")
            self._end_run_on(too_many_failures(num_failed, num_problems, what, failure))

    def _end_run_on(self, error: UserError | None) -> None:
        """Makes the training loop raise this error when it waits next; nothing if it is None."""
        if error is not None:
            self._state.failure = error

    def count(self, error: WireError) -> None:
        """Counts a refused message, and shows the user the first one that was not expected."""
        name = f"refused/{error.reason}"
        self._state.counters[name] += 1
        if self._state.counters[name] == 1 and error.reason not in _EXPECTED:
            self._say(
                f"a message to the trainer was refused: {error}. "
                f"The metric link/{name} counts the messages that are refused for this reason"
            )

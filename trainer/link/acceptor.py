"""The acceptance of groups and evaluation results: each is checked before it is used."""

from collections.abc import Callable

from common.config import Config
from common.errors import UserError, WireError
from common.failpoints import failpoint
from common.types import EvalResult, Group, Tombstone
from common.wire import wire
from common.wire.group_limits import Limits, check_group
from trainer.link.failures import FailedGroups, too_many_failures
from trainer.link.peers import SharedState

# refusals of groups that nobody waits for
_NOT_WANTED = ("duplicate", "trained", "not_admitted", "not_leased")
# Refusals that copies, losses and restarts cause.
# The first refusal for any other reason is reported.
_EXPECTED = (
    *_NOT_WANTED,
    "not_credited",
    "other_incarnation",
    "unknown_sampler",
    "eval_unknown",
    "eval_duplicate",
)


class Acceptor:
    """The checks of all that samplers produce.

    Callers of all methods but `count` hold the lock of the shared state.
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
        # how many versions older than the newest one a group may be
        self.max_version_lag = config.algorithm.steps_per_batch * config.trainer.max_staleness
        self._num_eval_generations = config.eval.num_generations
        self._envelope = envelope
        self._state = state
        self._say = say
        self._failed_groups = FailedGroups(config.prompts_per_batch)

    def check(self, group: Group | Tombstone, sampler: str | None = None) -> None:
        """Raises WireError, with the reason, if training may not use this group.

        Training uses only a group that is still awaited, that was sampled by a version within the
        allowed lag, and whose contents are valid. sampler: the sender, whose group is refused if
        another sampler has its lease; None for a group of the journal (group_journal.py).
        """
        assert self._state.published is not None
        newest = self._state.published.version
        versions = range(max(0, newest - self.max_version_lag), newest + 1)
        refused = self._state.ledger.refusal(group, versions, sampler)
        if refused is not None:
            raise WireError(refused, f"{group.policy_version}, the newest is {newest}")
        if isinstance(group, Group):
            check_group(group, self.limits)

    def accept(self, name: str, group: Group | Tombstone, frames: list[bytes]) -> None:
        """Accepts a group, or a tombstone with the reason in place of an invalid group.

        An invalid group would be refused again each time that it is sent.
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
            self._end_run(self._failed_groups.add(group))
        else:
            received = wire.Received(group, wire.encode(self._envelope, group))
        state.ledger.accept(received, name)
        failpoint("inbox.accepted")
        if isinstance(group, Tombstone):
            state.counters["tombstones"] += 1
            self._say(f"group {group.group_id} could not be produced: {group.reason}")
            count = state.counters["tombstones"]
            what = "groups could not be produced"
            self._end_run(too_many_failures(count, state.ledger.total, what, group))

    def accept_eval(self, name: str, result: EvalResult) -> None:
        """Accepts the result of an evaluation chunk, or failures in place of an invalid result."""
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
        what = f"held-out problems could not be scored in evaluation {result.eval_id}"
        total = sum(len(request.problem_indexes) for request in evaluation.requests.values())
        failed = sum(len(answer.failures) for answer in evaluation.results.values())
        for failure in result.failures:
            problem = f"held-out problem {failure.problem_index}"
            self._say(f"{problem} could not be scored: {failure.reason}")
            self._end_run(too_many_failures(failed, total, what, failure))

    def _end_run(self, error: UserError | None) -> None:
        """Ends the run by this error, if there is one, at the training loop's next wait."""
        if error is not None:
            self._state.failure = error

    def count(self, error: WireError) -> None:
        """Counts a refused message, and reports the first one of an unexpected kind."""
        name = f"refused/{error.reason}"
        self._state.counters[name] += 1
        if self._state.counters[name] == 1 and error.reason not in _EXPECTED:
            self._say(
                f"a message to the trainer is refused: {error}. "
                f"More of this kind are counted as link/{name}"
            )

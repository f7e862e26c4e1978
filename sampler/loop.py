"""Runs the sampling loop. Its state may be lost: killing it costs time, never data.

    credit ─► reload ─► generate ─► reward ─► reference ─► send
      ▲                                                     │
      └───────────── trainer commits a step ◄───────────────┘

The trainer's window bounds every queue: the engine's, the environments', the rewards' and the
outbox. Held-out problems wait for gaps between groups, and are at most those of data.eval.
"""

import collections
import time
from collections.abc import Sequence
from typing import Any

from common.config import Config
from common.errors import Retryable, with_type
from common.failpoints import failpoint
from common.files.weights import BadWeights, NotVisible, Published
from common.processes.certain_errors import permanent_error, would_repeat
from common.processes.exits import every, say
from common.processes.watchdog import progress_heard_by, report_progress
from common.types import Group, Tombstone
from common.wire import wire
from model.reference import Reference
from rewards import Scores
from rewards.pool import RewardFailure, RewardPool
from sampler.engine.engine import Engine
from sampler.engine.fetch import Fetcher
from sampler.engine.reload import reload
from sampler.held_out import HeldOut
from sampler.link import Link
from sampler.scored import group_of, reference_logprobs
from sampler.turns.failures import with_failures
from sampler.turns.sampled import MAX_REASON, Sampled, submit_rewards, too_few_reason
from sampler.turns.scheduler import Turns
from sampler.turns.task import EvalKey, GroupKey, Key, Task, sampling_params

# Pauses before a prompt is sampled again of which the machine has lost something, in their order.
_REDRAW_AFTER_S = (1.0, 5.0, 25.0)
# NFS caches for up to 60 s that a file was absent, and a busy server adds to that.
_VISIBLE_WITHIN_S = 120.0


class Sampler:
    """The sampling loop, and the work that is leased to this sampler."""

    def __init__(
        self,
        config: Config,
        task: Task,
        engine: Engine,
        link: Link,
        pool: RewardPool,
        reference: Reference | None,
        turns: Turns | None = None,
    ):
        """Starts without work. turns: by default those of single turns."""
        self.config = config
        self.task = task
        self.engine = engine
        self.link = link
        self.pool = pool
        self.reference = reference
        self.turns = turns or Turns(engine)
        self.phase = "ready"  # what the sampler does, for people
        self.progress = 0
        self.stats: dict[str, float] = collections.defaultdict(float)
        # What is leased and not sent, with its completions once they are sampled.
        self._working: dict[Key, Sampled | None] = {}
        self._may_say_failures = every(10.0)
        # How often the machine lost a group or held-out problem, until that has a result.
        self._num_lost: dict[Any, int] = collections.Counter()
        self._waits_until = 0.0  # nothing starts before, because the machine lost something
        self._held_out = HeldOut(config, engine.on_cpu, task.decode, link)
        self._fetcher = Fetcher(config)
        self._bad_weights = 0
        # When the first version that was announced since the last reload was absent.
        self._invisible_since: float | None = None
        self._num_trainers = 0  # trainers that this sampler has served so far
        self._served: wire.Credit | None = None  # the credit whose leases are all in work

    def run(self) -> None:
        """Runs the loop until an exception ends the process, such as PeerEnded by the trainer."""
        while True:
            report_progress(self.phase)
            self.wait_for_credit_or_work()
            self.abort_unleased_work()
            self.reload_if_credited()
            self.start_leased_work()
            self.start_evaluation()
            self.generate()
            self.rest_if_done()
            with progress_heard_by(self._beat_at_work):
                self.send_scored()
            self._beat()

    def wait_for_credit_or_work(self) -> None:
        """Handles messages of the trainer. Without work, it waits a moment for one."""
        start = time.monotonic()
        is_busy = bool(self.turns.num_running or self.pool.pending)
        timeout_s = 0.1
        if is_busy:
            timeout_s = 0.0
        if self.link.receive(timeout_s=timeout_s):
            self._forget_everything()
        if not is_busy and self.engine.version is not None:
            self.phase = "idle, no work assigned"
            self.stats["total/idle_s"] += time.monotonic() - start

    def abort_unleased_work(self) -> None:
        """Aborts groups whose lease another sampler got, as the trainer did not hear this one."""
        credit = self.link.credit
        if credit is None or credit is self._served:
            return
        leased = set(credit.lease)
        unleased: list[Key] = []
        for key in self._decoding:
            if isinstance(key, GroupKey) and key.group_id not in leased:
                unleased.append(key)
        if unleased:
            self.turns.abort(unleased)
            self.stats["total/aborted"] += len(unleased)
            for key in unleased:
                del self._working[key]

    @property
    def _decoding(self) -> list[Key]:
        return [key for key, sampled in self._working.items() if sampled is None]

    def reload_if_credited(self) -> None:
        """Loads the weights of the credited version, unless the engine holds them."""
        credit = self.link.credit
        if credit is None or credit.version == self.engine.version:
            return
        published = Published(credit.version, credit.weights_dir, credit.manifest_sha256)
        if self.turns.num_running and not self._may_load_in_flight(published):
            self._fetcher.start(published)
            return
        try:
            with progress_heard_by(self._beat_at_work):
                self.stats.update(reload(self.engine, published, self.config, self._fetcher))
            self._bad_weights = 0
            self._invisible_since = None
            self.progress += 1
            if self.turns.num_running:
                self.stats["total/in_flight_updates"] += 1
            self.link.beat("reloaded", self.progress, self.engine.version, self.stats, now=True)
        except NotVisible as error:
            self._wait_for_the_file_system(credit.version, str(error))
        except BadWeights as error:
            self._bad_weights += 1
            self.stats["total/refused_weights"] += 1
            self.phase = f"refused version {credit.version}: {error}"
            self._beat(now=True)
            if self._bad_weights >= 3:
                if credit.version == 0:
                    raise permanent_error(self.phase) from None
                raise Retryable(self.phase) from None
            time.sleep(1.0)

    def _may_load_in_flight(self, published: Published) -> bool:
        """Returns whether weights may be loaded while something decodes.

        Held-out problems keep to one version, and groups without sampler.in_flight_updates do, too.
        """
        if not self.config.sampler.in_flight_updates:
            return False
        if any(isinstance(key, EvalKey) for key in self._decoding):
            return False
        return self._fetcher.has(published)

    def _beat_at_work(self, doing: str) -> None:
        """Counts a piece of work as progress, because beats alone prove nothing, and beats."""
        self.progress += 1
        self.phase = doing
        self._beat()

    def _beat(self, now: bool = False) -> None:
        self.link.beat(self.phase, self.progress, self.engine.version, self.stats, now)

    def _wait_for_the_file_system(self, version: int, absent: str) -> None:
        """Notes that a shared folder shows files late. The loop goes on, so the link says why."""
        now = time.monotonic()
        if self._invisible_since is None:
            self._invisible_since = now
        waited_s = now - self._invisible_since
        waiting = f"waiting {waited_s:.0f} s for the file system to show version {version}"
        self.phase = f"{waiting}: {absent}"
        if waited_s > _VISIBLE_WITHIN_S:
            raise Retryable(f"{self.phase}. Is weights.dir on a file system that both hosts share?")
        if not self.turns.num_running:  # sequences that decode under the old weights go on
            time.sleep(0.2)

    def start_leased_work(self) -> None:
        """Starts the groups that the trainer has leased to this sampler, and queues evaluations."""
        credit = self.link.credit
        if credit is None or credit is self._served or credit.version != self.engine.version:
            return
        if time.monotonic() < self._waits_until:
            return
        self._served = credit
        working = {key.group_id for key in self._working if isinstance(key, GroupKey)}
        new = []
        for i in credit.lease:
            if i not in working and not self.link.has_result(i):
                new.append(GroupKey(i, credit.version, self._num_trainers))
        self._submit_all(new)
        for request in credit.evals:
            self._held_out.ask(request, credit.version, self._num_trainers)

    def start_evaluation(self) -> None:
        """Starts held-out problems, if the groups leave room for them."""
        if time.monotonic() < self._waits_until:
            return
        self._submit_all(self._held_out.to_start(self.engine.version, self._decoding))

    def _submit_all(self, keys: Sequence[Key]) -> None:
        """Starts groups or held-out problems. One that the engine refuses fails with the reason."""
        self.task.begin(keys, self.config)
        for key in keys:
            if isinstance(key, GroupKey):
                failpoint("sampler.leased")
            report_progress(self.phase)
            prompt = self.task.prompt(key, self.config)
            self._working[key] = None
            try:
                self.turns.start(key, prompt, sampling_params(key, self.config))
            except Exception as error:
                if not would_repeat(error):
                    raise
                self._working[key] = Sampled(prompt, ())
                reason = f"the engine refuses its prompt: {with_type(error)}"
                self._finish(key, reason[:MAX_REASON])

    def generate(self) -> None:
        """Runs one engine step, and submits finished prompts for rewards, which run meanwhile."""
        if not self.turns.num_running:
            return
        self.phase = self.turns.phase
        start = time.monotonic()
        # A step reports its tokens, on a CPU also its layers: it may hold thousands of tokens.
        with progress_heard_by(lambda _: self._beat_at_work(self.phase)):
            finished = self.turns.step()
        for key, sampled in finished:
            self._working[key] = sampled
            self._count(sampled)
            failpoint("sampler.generated")
            self._say_failures(sampled)
            self._score(key, sampled)
        self.progress += self.turns.num_events
        self.stats["total/generate_s"] += time.monotonic() - start

    def _count(self, sampled: Sampled) -> None:
        """Adds the completions of a prompt to the statistics."""
        completions = sampled.completions
        if self.config.sampler.truncates:
            num_incomplete = sum(c.incomplete_support for c in completions)
            self.stats["total/incomplete_support"] += num_incomplete
        self.stats["total/completion_tokens"] += sum(c.num_sampled for c in completions)
        if sampled.unread:
            self.stats["total/unread"] += sampled.unread

    def _score(self, key: Key, sampled: Sampled) -> None:
        """Submits the completions of a prompt for rewards, if enough of them can be scored."""
        if sampled.lost:
            self._draw_again(key, sampled.lost)
            return
        reason = too_few_reason(key, sampled)
        if reason is not None:
            self._finish(key, reason)
        elif sampled.to_score:
            submit_rewards(self.pool, key, sampled, self.task.decode, key.policy_version)
        else:
            self._finish(key, [])

    def _say_failures(self, sampled: Sampled) -> None:
        """Says why a rollout failed, at most every 10 s."""
        reasons = sampled.failure_reasons
        if reasons and self._may_say_failures():
            row = sampled.prompt.problem.index
            say(f"row {row}: {len(reasons)} of its rollouts failed; the first: {reasons[0]}")

    def _draw_again(self, key: Key, reason: str) -> None:
        """Frees a prompt of which the machine lost rollouts or rewards, so that it starts again.

        That happens after a pause, if the prompt is still leased, by the weights of then. A prompt
        that was lost several times is given up.
        """
        work = key.work
        num_lost = self._num_lost[work]
        if num_lost == len(_REDRAW_AFTER_S):
            reason = f"it was lost {1 + num_lost} times; the last time: {reason}"
            self._finish(key, reason[:MAX_REASON])
            return
        self._num_lost[work] += 1
        self._waits_until = time.monotonic() + _REDRAW_AFTER_S[num_lost]
        self.stats["total/redrawn"] += 1
        say(f"a prompt is sampled again, because its rollouts or rewards were lost: {reason}")
        del self._working[key]
        self._served = None
        if isinstance(key, EvalKey):
            self._held_out.waiting.append(key)

    def rest_if_done(self) -> None:
        """Frees an idle engine's cache before the last groups are sent, for the trainer."""
        sleeps = self.config.vllm.get("enable_sleep_mode")
        if sleeps and not self.turns.num_running and not self._held_out.waiting:
            self.engine.rest()

    def send_scored(self) -> None:
        """Sends groups whose rewards arrived. With an idle engine it waits a moment for them."""
        timeout_s = 0.0
        if self.pool.pending and not self.turns.num_running:
            timeout_s = 0.05
        finished = False
        for key, scores in self.pool.ready(timeout_s=timeout_s):
            if key not in self._working:
                continue  # requested by a trainer that is gone
            report_progress("sending groups")
            finished = True
            if not isinstance(scores, RewardFailure):
                self._finish(key, scores)
            elif scores.kind == "lost":
                self._draw_again(key, scores.reason)
            else:
                self.stats["total/reward_failures"] += 1
                self._finish(key, scores.reason)
        for name, value in self.pool.logged.items():
            self.stats[f"logged/{name}"] = value
        if finished and not self._working:  # the trainer's step metrics read these
            self._beat(now=True)

    def _finish(self, key: Key, outcome: Scores | str) -> None:
        """Sends a prompt's scores, which lack those of failed completions, or why it has none."""
        sampled = self._working.pop(key)
        self._num_lost.pop(key.work, None)
        assert sampled is not None, "what has an outcome was sampled"
        problem = sampled.prompt.problem
        if isinstance(outcome, str):
            outcome = f"row {problem.index}: {outcome}"
        else:
            outcome = with_failures(sampled.completions, outcome, self.config, problem)
        if isinstance(key, EvalKey):
            self._held_out.note(key, sampled, outcome)
        elif isinstance(outcome, str):
            self.link.send_result(Tombstone(key.group_id, key.policy_version, outcome))
        else:
            self.link.send_result(self._group(key, sampled, outcome))

    def _group(self, key: GroupKey, sampled: Sampled, scores: Scores) -> Group:
        """Returns a group as it is sent."""
        failpoint("sampler.scored")
        start = time.monotonic()
        ref_logprobs = reference_logprobs(self.reference, sampled)
        if self.reference is not None:
            self.stats["total/reference_s"] += time.monotonic() - start
        rewards = self.config.for_source(sampled.prompt.problem.source).rewards
        return group_of(key, sampled, scores, ref_logprobs, rewards.environment_weight)

    def _forget_everything(self) -> None:
        """Drops all work after the trainer was restarted, because its predecessor asked for it."""
        self._num_trainers += 1
        self.turns.abort(self._decoding)
        self.stats["total/aborted"] += len(self._working)
        self._working.clear()
        self._num_lost.clear()
        self._held_out.forget()
        self.engine.version = None  # the same number may now name other weights

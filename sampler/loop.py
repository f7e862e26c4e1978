"""Runs the sampling loop. Its state may be lost: killing it costs time, never data.

    credit ─► reload ─► generate ─► reward ─► reference ─► send
      ▲                                                     │
      └───────────── trainer commits a step ◄───────────────┘

The trainer's window bounds every queue: the engine's, the environments', the rewards' and the outbox. Held-out problems
wait for gaps between groups, and are at most those of data.eval.
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
from sampler.engine import in_flight
from sampler.engine.engine import Engine
from sampler.engine.fetch import Fetcher
from sampler.engine.reload import reload
from sampler.held_out import HeldOut
from sampler.link import Link
from sampler.turns.episode import as_rollout
from sampler.turns.failures import with_failures
from sampler.turns.sampled import MAX_REASON, Sampled, submit_rewards, too_few_reason
from sampler.turns.scheduler import Turns
from sampler.turns.task import EvalKey, GroupKey, Key, Task, sampling_params

_REDRAW_AFTER_S = (1.0, 5.0, 25.0)  # of a prompt whose rollouts the machine lost, each time it did
_VISIBLE_WITHIN_S = 120.0  # NFS caches what was absent for up to 60 s, and a busy server adds to that


class Sampler:
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
        self.config, self.task, self.engine, self.link = config, task, engine, link
        self.pool, self.reference = pool, reference
        self.turns = turns or Turns(engine)
        self.phase, self.progress = "ready", 0
        self.stats: dict[str, float] = collections.defaultdict(float)
        self._working: dict[Key, Sampled | None] = {}  # leased and not sent; completions once generated
        self._may_say_failures = every(10.0)
        self._num_lost: dict[Any, int] = collections.Counter()  # by group or held-out problem, until it has a result
        self._waits_until = 0.0  # time before which nothing is started, because the machine has lost something
        self._held_out = HeldOut(config, engine.on_cpu, task.decode, link)
        self._fetcher = Fetcher(config)
        self._bad_weights = 0
        self._invisible_since: float | None = None  # when the first announced version since the last reload was absent
        self._num_trainers = 0  # trainers that this sampler has served so far
        self._served: wire.Credit | None = None  # the credit whose leases are all in work

    def run(self) -> None:
        """Runs the loop until the trainer says goodbye (PeerEnded) or another exception ends the process."""
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
        start = time.monotonic()
        busy = self.turns.num_running or self.pool.pending
        if self.link.receive(timeout_s=0.0 if busy else 0.1):
            self._forget_everything()
        if not busy and self.engine.version is not None:
            self.phase = "idle, no work assigned"
            self.stats["total/idle_s"] += time.monotonic() - start

    def abort_unleased_work(self) -> None:
        """Aborts groups whose lease another sampler got, because the trainer had not heard this one for long."""
        credit = self.link.credit
        if credit is None or credit is self._served:
            return
        leased = set(credit.lease)
        unleased = [key for key in self._decoding if isinstance(key, GroupKey) and key.group_id not in leased]
        if unleased:
            self.turns.abort(unleased)
            self.stats["total/aborted"] += len(unleased)
            for key in unleased:
                del self._working[key]

    @property
    def _decoding(self) -> list[Key]:
        return [key for key, sampled in self._working.items() if sampled is None]

    def reload_if_credited(self) -> None:
        credit = self.link.credit
        if credit is None or credit.version == self.engine.version:
            return
        published = Published(credit.version, credit.weights_dir, credit.manifest_sha256)
        # held-out problems keep to one version; without the setting a group does, from its first turn to its last
        evaluates = any(isinstance(key, EvalKey) for key in self._decoding)
        may_load = self.config.sampler.in_flight_updates and not evaluates and self._fetcher.has(published)
        if self.turns.num_running and not may_load:
            self._fetcher.start(published)
            return
        try:
            with progress_heard_by(self._beat_at_work):
                self.stats.update(reload(self.engine, published, self.config, self._fetcher))
            self._bad_weights, self._invisible_since = 0, None
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
                raise permanent_error(self.phase) if credit.version == 0 else Retryable(self.phase) from None
            time.sleep(1.0)

    def _beat_at_work(self, doing: str) -> None:
        """Counts one piece of work as progress and sends a beat if due, so that beats alone prove nothing."""
        self.progress += 1
        self.phase = doing
        self._beat()

    def _beat(self, now: bool = False) -> None:
        self.link.beat(self.phase, self.progress, self.engine.version, self.stats, now)

    def _wait_for_the_file_system(self, version: int, absent: str) -> None:
        """Waits for files that a shared folder shows late. The loop goes on, so the link stays alive and says why."""
        now = time.monotonic()
        if self._invisible_since is None:
            self._invisible_since = now
        waited_s = now - self._invisible_since
        self.phase = f"waiting {waited_s:.0f} s for the file system to show version {version}: {absent}"
        if waited_s > _VISIBLE_WITHIN_S:
            raise Retryable(f"{self.phase}. Is weights.dir on a file system that both hosts share?")
        if not self.turns.num_running:  # sequences that decode under the old weights go on
            time.sleep(0.2)

    def start_leased_work(self) -> None:
        credit = self.link.credit
        if credit is None or credit is self._served or credit.version != self.engine.version:
            return
        if time.monotonic() < self._waits_until:
            return
        self._served = credit
        working = {key.group_id for key in self._working if isinstance(key, GroupKey)}
        new = [group_id for group_id in credit.lease if not self.link.has_result(group_id) and group_id not in working]
        self._submit_all([GroupKey(group_id, credit.version, self._num_trainers) for group_id in new])
        for request in credit.evals:
            self._held_out.ask(request, credit.version, self._num_trainers)

    def start_evaluation(self) -> None:
        if time.monotonic() < self._waits_until:
            return
        self._submit_all(self._held_out.to_start(self.engine.version, self._decoding))

    def _submit_all(self, keys: Sequence[Key]) -> None:
        self.task.begin(keys, self.config)
        for key in keys:
            if isinstance(key, GroupKey):
                failpoint("sampler.leased")
            report_progress(self.phase)
            self._working[key], prompt = None, self.task.prompt(key, self.config)
            try:
                self.turns.start(key, prompt, sampling_params(key, self.config))
            except Exception as error:
                if not would_repeat(error):
                    raise
                self._working[key] = Sampled(prompt, ())
                self._finish(key, f"the engine refuses its prompt: {with_type(error)}"[:MAX_REASON])

    def generate(self) -> None:
        """Runs one engine step and submits finished prompts for rewards, which run while the engine goes on."""
        if not self.turns.num_running:
            return
        self.phase = self.turns.phase
        start = time.monotonic()
        # a step reports its tokens, on a CPU also its layers: it may hold thousands of prompt tokens
        with progress_heard_by(lambda _: self._beat_at_work(self.phase)):
            finished = self.turns.step()
        for key, sampled in finished:
            self._working[key] = sampled
            if self.config.sampler.truncates:
                self.stats["total/incomplete_support"] += sum(c.incomplete_support for c in sampled.completions)
            self.stats["total/completion_tokens"] += sum(c.num_sampled for c in sampled.completions)
            if sampled.unread:
                self.stats["total/unread"] += sampled.unread
            failpoint("sampler.generated")
            self._say_failures(sampled)
            if sampled.lost:
                self._draw_again(key, sampled.lost)
            elif (reason := too_few_reason(key, sampled)) is not None:
                self._finish(key, reason)
            elif sampled.to_score:
                submit_rewards(self.pool, key, sampled, self.task.decode, key.policy_version)
            else:
                self._finish(key, [])
        self.progress += self.turns.num_events
        self.stats["total/generate_s"] += time.monotonic() - start

    def _say_failures(self, sampled: Sampled) -> None:
        """Says why a rollout failed, at most every 10 s."""
        reasons = [*sampled.failures, *(c.failure.reason for c in sampled.completions if c.failure)]
        if reasons and self._may_say_failures():
            row = sampled.prompt.problem.index
            say(f"row {row}: {len(reasons)} of its rollouts failed; the first: {reasons[0]}")

    def _draw_again(self, key: Key, reason: str) -> None:
        """Frees a prompt of which the machine lost rollouts or rewards, so that it is started again.

        That happens after a pause, if it is still leased, by the weights of then. It is given up after several times.
        """
        work = _without_version(key)
        num_lost = self._num_lost[work]
        if num_lost == len(_REDRAW_AFTER_S):
            self._finish(key, f"it was lost {1 + num_lost} times; the last time: {reason}"[:MAX_REASON])
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
        """Frees the engine's cache before the last groups are sent, after which the trainer works alone."""
        sleeps = self.config.vllm.get("enable_sleep_mode")
        if sleeps and not self.turns.num_running and not self._held_out.waiting:
            self.engine.rest()

    def send_scored(self) -> None:
        """Sends every group whose rewards arrived. With an idle engine it waits a moment for them."""
        patience = 0.05 if self.pool.pending and not self.turns.num_running else 0.0
        finished = False
        for key, scores in self.pool.ready(timeout_s=patience):
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
        self.stats.update({f"logged/{name}": value for name, value in self.pool.logged.items()})
        if finished and not self._working:  # the trainer's step metrics read these
            self._beat(now=True)

    def _finish(self, key: Key, outcome: Scores | str) -> None:
        """Sends a prompt's result. `outcome`: the scores of completions that did not fail, or why there are none."""
        sampled = self._working.pop(key)
        self._num_lost.pop(_without_version(key), None)
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
        failpoint("sampler.scored")
        prompt, completions = sampled.prompt, sampled.completions
        start = time.monotonic()
        ref_logprobs: list[Any] = [None] * len(completions)
        if self.reference is not None:
            ids, masks, forks = zip(*[(c.token_ids, c.sampling_mask, c.forks) for c in completions], strict=True)
            ref_logprobs = self.reference.logprobs(prompt.token_ids, ids, masks, prompt.images, forks)
            self.stats["total/reference_s"] += time.monotonic() - start
        weight = self.config.for_source(prompt.problem.source).rewards.environment_weight
        rollouts = tuple(
            as_rollout(c, ref, rewards, reward, len(prompt.token_ids), weight)
            for c, ref, (rewards, reward) in zip(completions, ref_logprobs, scores, strict=True)
        )
        version, rollouts = in_flight.with_oldest_version(key.policy_version, rollouts)
        index = prompt.problem.index
        routing = completions[0].routing  # the other completions have the same if equal rows are computed equally
        routing = None if routing is None else routing[: len(prompt.token_ids)]
        of_prompt = prompt.images, sampled.failures, routing, prompt.problem.source
        return Group(key.group_id, version, index, prompt.token_ids, rollouts, *of_prompt)

    def _forget_everything(self) -> None:
        """Drops all work after the trainer was restarted: no request of its predecessor is wanted."""
        self._num_trainers += 1
        self.turns.abort(self._decoding)
        self.stats["total/aborted"] += len(self._working)
        self._working.clear()
        self._num_lost.clear()
        self._held_out.forget()
        self.engine.version = None  # the same number may now name other weights


def _without_version(key: Key) -> Any:
    """Returns what names a prompt's work, by whatever weights it is done."""
    return key.group_id if isinstance(key, GroupKey) else (key.eval_id, key.problem)

"""Forward and backward of one batch of rollouts, in mini-batches and passes, while its groups still arrive.

    fill slots ─► score ─► plan rounds ─► micro-batch ─► forward and backward
     slots.py     here     micro_batches   tensors        engine/policy, engine/actor_critic

What is known of a group stands in one record (data/experience.py). Where all groups of a step are in when it begins,
one plan over all of them balances the ranks best. Where they are still coming in, rounds are planned over those that
have come, in the order of their ids, so that training goes on while the rest decodes. Both follow from settings and
contents alone, and every rank has all groups: all find the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.config import Config
from common.watchdog import report_progress
from model.cpu.cores import LentCores
from model.reference import Reference
from trainer.data import micro_batches
from trainer.data.experience import Experience, score_rewards
from trainer.data.micro_batches import Budget, Planner, Round, Work, plan_metrics, plan_of, work_of
from trainer.data.mini_batches import Step, TrainedStep, corrects_later_steps, needs_batch_statistics, waits_for
from trainer.data.slots import Slots, Source, fill
from trainer.data.tensors import MicroBatch, micro_batch, num_trained_tokens, policy_row, step_denominator
from trainer.engine.actor_critic import ActorCritic
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Exchange
from trainer.save.checkpoint import Progress

RecordSeconds = Callable[[str, float], None]  # a metric's name and seconds that belong to it


@dataclass(frozen=True)
class Models:
    policy: PolicyEngine
    reference: Reference | None = None  # where the trainer's ranks score it
    critic: ActorCritic | None = None


class BatchTraining:
    """The batch that follows `progress`. Every rank calls every method."""

    def __init__(
        self,
        config: Config,
        models: Models,
        exchange: Exchange,
        progress: Progress,
        source: Source,
        record_seconds: RecordSeconds,
        lent_cores: LentCores,
    ):
        self.config = config
        self._models, self._exchange, self._progress, self._record_seconds = models, exchange, progress, record_seconds
        self._source, self.slots = source, Slots(config, progress.cursor)
        self._budget, self._dims = Budget.of(config.trainer), models.policy.dims
        self._lent_cores = lent_cores
        self._rounds: dict[tuple[int, ...], list[Round]] = {}  # by places: the same in every pass
        self._is_scored = False  # as a whole, where that is needed

    def backward(self, step: Step, progress: Progress) -> None:
        """Forward and backward on a mini-batch, while later groups still decode where its settings allow."""
        self._progress = progress
        at_once = self._budget.at_once(self._exchange.dp_size)
        needed = {"batch": self.slots.size, "mini_batch": max(step.places) + 1, "micro_batch": 0}
        fill(self.slots, needed[waits_for(self.config.algorithm)], at_once, self._source)
        self._score()
        if step.places not in self._rounds and max(step.places) < self.slots.num_filled:
            self._rounds[step.places] = self._plan(step.places)
        for found in self._rounds.get(step.places, ()):
            self._train(found, step)
        if step.places not in self._rounds:
            self._rounds[step.places] = self._train_as_they_come(step, at_once)

    def _train_as_they_come(self, step: Step, at_once: int) -> list[Round]:
        """The same, several groups at a time. Returns the rounds, which later passes repeat."""
        planner = Planner(self._exchange.dp_size, self._budget)
        for first in range(0, len(step.places), at_once):
            places = step.places[first : first + at_once]
            fill(self.slots, max(places) + 1, at_once, self._source)
            self._score()
            for found in planner.add(self._works(places)):
                self._train(found, step)
        for found in planner.finish():
            self._train(found, step)
        return planner.rounds

    @property
    def critic_only(self) -> bool:
        """Within critic_warmup_steps: the policy, and so its version, stays."""
        return self._progress.step < self.config.critic.critic_warmup_steps

    def trained(self, step: Step) -> TrainedStep:
        """What the step trained on, for its records."""
        works = self._works(step.places)
        return TrainedStep(
            step=step,
            groups=[e.group for e in self.slots.at(step.places)],
            dead_group_metrics=self.slots.dead_group_metrics(step),
            plan_metrics=plan_metrics(self._rounds[step.places], works, self._budget),
            empty_slots=self.slots.warning() if step.is_last else "",
            oversized_groups=micro_batches.warning(works, self._budget),
        )

    # ---- score ----

    def _score(self) -> None:
        """Advantages, as soon as what they depend on is in; then log-probs that must come before the first update."""
        algorithm, batch = self.config.algorithm, self.slots.training()
        if not needs_batch_statistics(algorithm):
            self.slots.replace(score_rewards([e for e in batch if e.advantages is None], self.config))
        if self._is_scored or self.slots.num_filled < self.slots.size:
            return
        self._is_scored = True
        if self._models.critic:
            self._score_values(self._models.critic)
        elif needs_batch_statistics(algorithm):
            self.slots.replace(score_rewards(batch, self.config))
        if corrects_later_steps(algorithm):
            self._score_proximal()

    def _score_values(self, critic: ActorCritic) -> None:
        start = time.monotonic()
        report_progress("scoring a batch of rollouts with the critic")
        shares = [self._mine(found) for found in self._plan(range(self.slots.size))]
        params = self.config.algorithm.group_params
        adapted = self._progress.threshold if params.adaptive_threshold else None
        threshold = adapted or params.group_variance_threshold
        self.slots.replace(critic.score(self.slots.training(), shares, threshold))
        self._record_seconds("timing/values_s", time.monotonic() - start)

    def _score_proximal(self) -> None:
        """The trainer's own log-probs of the whole batch, on every rank: shuffling gives groups to other ranks."""
        start, mine = time.monotonic(), dict[int, Tensor]()
        for found in self._plan(range(self.slots.size)):
            report_progress("scoring a batch of rollouts with the weights that sampled it")
            batch = self._micro_batch(found, range(self.slots.size))
            mine |= batch.by_group(self._models.policy.score(batch.row, self.config.sampler.temperature))
        lengths = self._lengths(self.slots.training())
        flat = torch.cat([torch.zeros(0)] + [mine.get(e.group.group_id, torch.zeros(n)) for e, n in lengths])
        everyones = torch.tensor(self._exchange.add_over_dp(flat.tolist()), dtype=torch.float32)  # exact: others add 0
        parts = everyones.split([n for _, n in lengths])
        self.slots.replace([replace(e, proximal_logprobs=x) for (e, _), x in zip(lengths, parts, strict=True)])
        self._record_seconds("timing/score_s", time.monotonic() - start)

    def _score_reference(self, reference: Reference, mine: Sequence[Experience]) -> None:
        """Once for all passes, as long as every group of a micro-batch has been scored before."""
        algorithm, packing = self.config.algorithm, self.config.trainer.packing
        lengths = self._lengths(mine)
        if not lengths:
            return
        start = time.monotonic()
        if any(e.ref_logprobs is None for e, _ in lengths):
            report_progress("scoring a micro-batch with the reference model")
            parts = reference.score(policy_row(mine, algorithm, packing)).split([n for _, n in lengths])
            self.slots.replace([replace(e, ref_logprobs=x) for (e, _), x in zip(lengths, parts, strict=True)])
        self._record_seconds("timing/reference_s", time.monotonic() - start)

    def _lengths(self, experiences: Iterable[Experience]) -> list[tuple[Experience, int]]:
        """Those that train the policy, with their number of tokens."""
        return [(e, n) for e in experiences if (n := num_trained_tokens(e, self.config.algorithm))]

    # ---- plan ----

    def _works(self, places: Sequence[int]) -> dict[int, Work]:
        algorithm, packing = self.config.algorithm, self.config.trainer.packing
        return {place: work_of(self.slots.training([place]), algorithm, packing, self._dims) for place in places}

    def _plan(self, places: Sequence[int]) -> list[Round]:
        return plan_of(self._works(places), self._exchange.dp_size, self._budget)

    def _mine(self, found: Round) -> list[Experience]:
        """This rank's part of a round."""
        return self.slots.training(found[self._exchange.dp_rank])

    # ---- train ----

    def _train(self, found: Round, step: Step) -> None:
        """This rank's part of one round of a step."""
        with self._lent_cores.borrowed():
            batch = None if self.critic_only else self._micro_batch(found, step.places)
            report_progress(f"training a micro-batch of step {self._progress.step + 1}")
            start = time.monotonic()
            if self._models.critic:
                self._models.critic.backward(self._mine(found), self.slots.training(step.places))
            if batch:
                logprobs = self._models.policy.backward(batch, self._progress.policy_version)
                self._remember(batch, logprobs, self._mine(found))
            self._record_seconds("timing/backward_s", time.monotonic() - start)

    def _micro_batch(self, found: Round, places: Sequence[int]) -> MicroBatch:
        """places: those of the whole step."""
        if self._models.reference:
            self._score_reference(self._models.reference, self._mine(found))
        denominator = step_denominator(self.slots.at(places), len(places), self.config)
        return micro_batch(self._mine(found), denominator, self.config.algorithm, self.config.trainer.packing)

    def _remember(self, batch: MicroBatch, logprobs: Tensor, mine: Iterable[Experience]) -> None:
        """For later passes: what the correction keeps to, and what tells numerics from staleness."""
        algorithm, proximal = self.config.algorithm, batch.by_group(logprobs)
        sampled = batch.by_group(logprobs.cpu()) if algorithm.num_iterations > 1 else {}
        is_present = batch.by_group(batch.policy_versions == self._progress.policy_version)
        for e in mine:
            g = e.group.group_id
            if g in proximal and algorithm.vllm_importance_sampling_mode is not None and e.proximal_logprobs is None:
                e = replace(e, proximal_logprobs=proximal[g])
            if g in sampled and is_present[g].any():
                known = torch.full_like(sampled[g], torch.nan) if e.sampled_logprobs is None else e.sampled_logprobs
                e = replace(e, sampled_logprobs=torch.where(is_present[g], sampled[g], known))
            self.slots.replace([e])

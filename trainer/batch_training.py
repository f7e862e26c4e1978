"""Forward and backward of one batch of rollouts, in mini-batches and passes, while its groups still arrive.

    take groups ─► (critic's values, GAE) ─► (own log-probs) ─► micro-batch ─► (reference) ─► backward
                    where there is a critic    where corrected                 where this rank scores it

What is in brackets is done once in a batch and remembered by group id for the steps that follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.config import Config
from common.watchdog import report_progress
from model.reference import Reference
from trainer.algorithm.advantages import AdvantageSettings, RewardSettings, step_advantages
from trainer.algorithm.kl_controller import completion_kls, next_beta
from trainer.data.feed import Shares
from trainer.data.micro_batches import Round
from trainer.data.mini_batches import Step
from trainer.data.seats import Items, Rollouts
from trainer.data.tensors import MicroBatch, PerCompletion, Positions, micro_batch, num_trained_tokens, waits_for
from trainer.engine.actor_critic import ActorCritic
from trainer.engine.policy import Engine
from trainer.engine.ranks import Exchange
from trainer.group_receiver import GroupReceiver
from trainer.save.checkpoint import Progress

RecordSeconds = Callable[[str, float], None]  # a metric's name and seconds that belong to it


@dataclass(frozen=True)
class Models:
    policy: Engine
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
        groups: GroupReceiver,
        record_seconds: RecordSeconds,
    ):
        self.config = config
        self.beta = config.algorithm.beta if progress.kl_beta is None else progress.kl_beta  # of this batch
        self._models, self._exchange, self._progress, self._record_seconds = models, exchange, progress, record_seconds
        self.rollouts = Rollouts(config, progress.cursor, groups.receive, groups.refill, self._advantages, self.beta)
        self.shares = Shares(self.config, self.rollouts, models.policy.dims, exchange)
        # by group id
        self._proximal_logprobs: dict[int, Tensor] = {}  # of this rank's micro-batches, or of the whole batch
        self._sampled_logprobs: dict[int, Tensor] = {}  # at the version that sampled it, for metrics
        self._ref_logprobs: dict[int, Tensor] = {}  # of this rank's micro-batches, if it scores them

    def backward(self, step: Step, progress: Progress) -> None:
        """Forward and backward on a mini-batch, while later groups still decode where its settings allow."""
        self._progress = progress
        waits = waits_for(self.config.algorithm)
        size = self.config.prompts_per_batch if waits == "batch" else 0
        self.rollouts.take_up_to(max(step.places) + 1 if waits == "mini_batch" else size, self.shares.at_once)
        if self._needs_scoring:
            self._score_batch()
        for found in self.shares.rounds(step.places):
            self._backward(found, step)

    @property
    def critic_only(self) -> bool:
        """Within critic_warmup_steps: the policy, and so its version, stays."""
        return self._progress.step < self.config.critic.critic_warmup_steps

    def next_beta(self) -> float | None:
        """That of the batch after this one; None = the configured one."""
        algorithm = self.config.algorithm
        if algorithm.kl_target is None:  # the controller is fixed
            return None
        kls = completion_kls(self.rollouts.items)
        return next_beta(self.beta, kls, algorithm.kl_target, algorithm.kl_horizon)

    def _advantages(self, groups: Items) -> Mapping[int, PerCompletion]:
        """Where they depend on all groups of the batch."""
        critic = self._models.critic
        if critic is None:
            return step_advantages(groups, AdvantageSettings.of(self.config, self.beta))
        start = time.monotonic()
        report_progress("scoring a batch of rollouts with the critic")
        shares = [self.shares.mine(found) for found in self.shares.rounds(range(self.config.prompts_per_batch))]
        threshold = self._progress.threshold or self.config.algorithm.group_params.group_variance_threshold
        advantages = critic.begin_batch(groups, shares, RewardSettings.of(self.config, self.beta), threshold)
        self._record_seconds("timing/values_s", time.monotonic() - start)
        return advantages

    @property
    def _positions(self) -> Positions | None:
        """The tokens that train; None = all."""
        return self._models.critic.estimates.policy_positions if self._models.critic else None

    def _backward(self, found: Round, step: Step) -> None:
        """This rank's share of one round of a step."""
        batch = None if self.critic_only else self._micro_batch(found, step.places)
        report_progress(f"training a micro-batch of step {self._progress.step + 1}")
        start = time.monotonic()
        if self._models.critic:
            groups = self.rollouts.trained(self.rollouts.of(step.places))
            self._models.critic.backward(self.shares.mine(found), groups)
        if batch:
            self._backward_policy(batch)
        self._record_seconds("timing/backward_s", time.monotonic() - start)

    def _micro_batch(self, found: Round, places: Sequence[int]) -> MicroBatch:
        """This rank's share of a round; places: those of the whole step."""
        algorithm, packing = self.config.algorithm, self.config.trainer.packing
        denominator = self.shares.denominator(places, self._positions)
        groups, advantages = self.shares.mine(found), self.rollouts.advantages
        batch = micro_batch(groups, advantages, denominator, algorithm, packing, self._positions)
        is_filler = not batch.tokens_of
        return batch if self._models.reference is None or is_filler else self._with_reference(batch)

    def _with_reference(self, batch: MicroBatch) -> MicroBatch:
        assert self._models.reference is not None
        start = time.monotonic()
        if not batch.tokens_of.keys() <= self._ref_logprobs.keys():
            report_progress("scoring a micro-batch with the reference model")
            parts = self._models.reference.score(batch.row).split(list(batch.tokens_of.values()))
            self._ref_logprobs |= zip(batch.tokens_of, parts, strict=True)
        self._record_seconds("timing/reference_s", time.monotonic() - start)
        return replace(batch, ref_logprobs=torch.cat([self._ref_logprobs[g] for g in batch.tokens_of]))

    def _backward_policy(self, batch: MicroBatch) -> None:
        own = [self._proximal_logprobs[g] for g in batch.tokens_of if g in self._proximal_logprobs]
        unknown = {g: torch.full((n,), torch.nan) for g, n in batch.tokens_of.items()}
        sampled = [self._sampled_logprobs.get(g, nans) for g, nans in unknown.items()]
        logprobs = self._models.policy.backward(
            batch,
            torch.cat(own) if own else None,
            torch.cat(sampled) if sampled else None,
            self._progress.policy_version,
        )
        if self.config.algorithm.num_iterations > 1:
            self._remember_sampled(batch, logprobs.cpu())
        if self.config.algorithm.vllm_importance_sampling_mode is not None and not own:
            self._remember(batch, logprobs)

    @property
    def _needs_scoring(self) -> bool:
        """Later mini-batches meet weights that have moved: log-probs at the sampled version must come before them."""
        algorithm = self.config.algorithm
        corrects = algorithm.vllm_importance_sampling_mode is not None
        return corrects and algorithm.steps_per_generation > 1 and not self._proximal_logprobs

    def _score_batch(self) -> None:
        """The trainer's own log-probs of the whole batch, on every rank: shuffling gives groups to other ranks."""
        start = time.monotonic()
        places = range(self.config.prompts_per_batch)
        for found in self.shares.rounds(places):
            report_progress("scoring a batch of rollouts with the weights that sampled it")
            batch = self._micro_batch(found, places)
            self._remember(batch, self._models.policy.score(batch.row, self.config.sampler.temperature))
        algorithm, advantages = self.config.algorithm, self.rollouts.advantages
        groups = self.rollouts.trained(self.rollouts.items)
        lengths = {g.group_id: num_trained_tokens(g, advantages, algorithm, self._positions) for g in groups}
        zeros = {g: torch.zeros(n) for g, n in lengths.items() if n}
        flat = torch.cat([self._proximal_logprobs.get(g, zero) for g, zero in zeros.items()] or [torch.zeros(0)])
        everyones = torch.tensor(self._exchange.add(flat.tolist()), dtype=torch.float32)  # exact: others add 0
        self._proximal_logprobs = dict(zip(zeros, everyones.split([len(z) for z in zeros.values()]), strict=True))
        self._record_seconds("timing/score_s", time.monotonic() - start)

    def _remember(self, batch: MicroBatch, logprobs: Tensor) -> None:
        if batch.tokens_of:  # a filler has none
            parts = logprobs.split(list(batch.tokens_of.values()))
            self._proximal_logprobs |= zip(batch.tokens_of, parts, strict=True)

    def _remember_sampled(self, batch: MicroBatch, logprobs: Tensor) -> None:
        """Those of groups that the present version sampled: later passes tell numerics and staleness apart by them."""
        lengths = list(batch.tokens_of.values())
        parts = zip(batch.tokens_of, logprobs[: sum(lengths)].split(lengths), strict=True) if lengths else ()
        versions = {g.group_id: g.policy_version for g in self.rollouts.items}
        self._sampled_logprobs |= {g: p for g, p in parts if versions[g] == self._progress.policy_version}

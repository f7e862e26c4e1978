"""The actor-critic part of training, which runs only if there is a critic.

    all groups of a batch ─► values, without gradient ─► GAE
      ─► for each micro-batch policy backward, critic backward ─► one step of both

With group_ppo, segments replace GAE, and values may be joined by the policy's exact score norms.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from common.config import Config
from common.types import Group
from model.packing import PackedRow, common_packing
from trainer.algorithm.advantages import ByGroup
from trainer.algorithm.critic_advantages import estimate, estimate_segments, value_metrics
from trainer.algorithm.segments import SegmentSums, next_threshold, token_group_metrics
from trainer.data.tensors import value_batch, value_row
from trainer.data.training_group import TrainingGroup, set_estimates
from trainer.engine.critic import Critic
from trainer.engine.deepspeed_model import DeepSpeedModel
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Collectives
from trainer.engine.step_result import StepResult


class ActorCritic:
    """A policy and its critic, which are scored, trained and stepped together."""

    def __init__(
        self, config: Config, policy: PolicyEngine, critic: Critic, collectives: Collectives
    ):
        self.config = config
        self.policy = policy
        self.critic = critic
        self.collectives = collectives
        self._packing = common_packing(policy.packing, critic.packing)
        critic.watch_gradients()
        policy.watch_gradients()
        self._segments: SegmentSums | None = None  # the sums of the newest batch
        self._batch_metrics: dict[str, float] = {}
        self._step_metrics: dict[str, float] = {}

    def score(
        self,
        batch: Sequence[TrainingGroup],
        micro_batches: Sequence[Sequence[TrainingGroup]],
        threshold: float,
    ) -> None:
        """Sets the advantages and the critic's targets of every group of the batch.

        micro_batches: this rank's groups of every micro-batch. There are as many on every rank,
        because ZeRO 3 gathers weights in each forward. threshold: τ of group_ppo for this batch.
        """
        algorithm = self.config.algorithm
        groups = [group.group for group in batch]
        values = self._score_every_token(batch, micro_batches, self.critic.evaluate)
        if algorithm.adv_estimator == "gae":
            estimates = estimate(groups, values, self.config)
        else:
            scores = None
            if algorithm.group_params.score == "exact":
                scores = self._score_every_token(batch, micro_batches, self.policy.score_norms)
            estimates = estimate_segments(groups, values, scores, threshold, self.config)
        set_estimates(batch, estimates)
        self._threshold = threshold
        self._segments = estimates.segments
        self._batch_metrics = value_metrics(groups, estimates, self.config)
        if estimates.segments:
            segment_loss = algorithm.group_params.segment_loss
            self._batch_metrics |= token_group_metrics(estimates.segments, threshold, segment_loss)

    def next_threshold(self) -> float | None:
        """Returns τ for the next batch; None without segments."""
        if self._segments is None:
            return None
        return next_threshold(self._threshold, self._segments, self.config.algorithm.group_params)

    def _score_every_token(
        self,
        batch: Sequence[TrainingGroup],
        micro_batches: Sequence[Sequence[TrainingGroup]],
        score: Callable[[PackedRow], Tensor],
    ) -> ByGroup:
        """Returns `score`'s results for the sampled tokens of all completions, on every rank.

        The tokens of masked completions have 0. Every dp_rank scores its own groups and has zeros
        elsewhere, so that the sum over dp_ranks holds all results.
        """
        scores: ByGroup = {}
        for group in batch:
            if isinstance(group.group, Group):
                scores[group.group_id] = [np.zeros(r.num_sampled) for r in group.rollouts]
        for groups in micro_batches:
            row = value_row(groups, self._packing)
            scores_of_completions = iter(score(row).split(row.lengths))
            for group in groups:
                for i in group.sampled_tokens.completions:
                    scores[group.group_id][i][:] = next(scores_of_completions).numpy()
        arrays = [array for of_group in scores.values() for array in of_group]
        if not arrays:
            return scores
        total = self.collectives.sum_over_dp(torch.from_numpy(np.concatenate(arrays)))
        totals = total.split([len(array) for array in arrays])
        for array, of_completion in zip(arrays, totals, strict=True):
            array[:] = of_completion.numpy()
        return scores

    def backward(self, groups: Sequence[TrainingGroup], num_step_tokens: int) -> None:
        """Runs the critic's forward and backward on this rank's groups of a micro-batch.

        num_step_tokens: the number of tokens in the step at which the critic learns.
        """
        self.critic.backward(value_batch(groups, num_step_tokens, self._packing))

    def step(self, critic_only: bool) -> StepResult:
        """Steps both models, or neither if a gradient of either is not finite on any rank.

        DeepSpeed finds this out for one model at a time and too late: the first would have stepped
        already. So both models are checked first. A bad one makes the other's gradients NaN too,
        and then each skips in its own way.
        """
        models: list[DeepSpeedModel] = [self.critic]
        if not critic_only:
            models.append(self.policy)
        are_finite = [model.gradients_are_finite() for model in models]
        if not all(are_finite):
            for model in models:
                model.make_gradients_nan()
        results = [model.step() for model in models]
        of_critic = results[0]
        of_last = results[-1]
        sums = self.collectives.sum_named(self.critic.sums.drain())
        self._step_metrics = {
            "value_loss": sums["loss"],
            "value_clip_fraction": sums["clipped"] / max(sums["tokens"], 1.0),
            "critic/grad_norm": of_critic.grad_norm,
            "critic/learning_rate": of_critic.learning_rate,
        }
        return StepResult(
            applied=all(result.applied for result in results),
            grad_norm=of_last.grad_norm,
            learning_rate=of_last.learning_rate,
            critic_only=critic_only,
        )

    def metrics(self) -> dict[str, float]:
        return self._batch_metrics | self._step_metrics

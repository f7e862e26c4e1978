"""The actor-critic part of training, which exists only if the run has a critic.

    for a whole batch       the critic's value of every sampled token, without gradient
                              ─► GAE ─► the policy's advantages and the critic's targets
    for each micro-batch    the critic's backward, then the policy's
    for each step           one optimizer step of both models

With adv_estimator group_ppo, the steps of GAE are segments of tokens (algorithm/segments.py). Where
a segment ends depends on the score norm of each token. With group_params.score "exact", the policy
computes these norms before the first update on a batch.
"""

import itertools
import math
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
    """Scores a batch with the policy and its critic, and steps the two models together."""

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
        # results of the newest batch
        self._threshold = math.nan  # τ of group_ppo
        self._segments: SegmentSums | None = None  # None: the estimator is not group_ppo
        self._batch_metrics: dict[str, float] = {}
        # results of the newest optimizer step
        self._step_metrics: dict[str, float] = {}

    def score(
        self,
        batch: Sequence[TrainingGroup],
        micro_batches: Sequence[Sequence[TrainingGroup]],
        threshold: float,
    ) -> None:
        """Sets the advantages of every group of the batch, and the critic's targets.

        Every rank calls it with the same batch.
        micro_batches: this rank's groups in each of its micro-batches. Every rank must have the
        same number of micro-batches, because ZeRO 3 gathers weights in each forward.
        threshold: τ for this batch, the limit of group_ppo on the variance that a segment adds
        (algorithm/segments.py). It is not used with gae.
        """
        algorithm = self.config.algorithm
        groups = [training_group.group for training_group in batch]

        values = self._score_every_token(batch, micro_batches, self.critic.evaluate)
        if algorithm.adv_estimator == "gae":
            estimates = estimate(groups, values, self.config)
        else:
            score_norms = None  # `estimate_segments` then uses a lower bound of the score norms
            if algorithm.group_params.score == "exact":
                score_norms = self._score_every_token(batch, micro_batches, self.policy.score_norms)
            estimates = estimate_segments(groups, values, score_norms, threshold, self.config)
        set_estimates(batch, estimates)

        self._threshold = threshold
        self._segments = estimates.segments
        self._batch_metrics = value_metrics(groups, estimates, self.config)
        if estimates.segments:
            segment_loss = algorithm.group_params.segment_loss
            self._batch_metrics |= token_group_metrics(estimates.segments, threshold, segment_loss)

    def next_threshold(self) -> float | None:
        """Returns the segment threshold τ for the next batch, or None without group_ppo."""
        if self._segments is None:
            return None
        return next_threshold(self._threshold, self._segments, self.config.algorithm.group_params)

    def _score_every_token(
        self,
        batch: Sequence[TrainingGroup],
        micro_batches: Sequence[Sequence[TrainingGroup]],
        score: Callable[[PackedRow], Tensor],
    ) -> ByGroup:
        """Returns the number that `score` gives to each sampled token of the batch, on every rank.

        The result has a list of arrays for each group id, one array per completion. Completions
        whose loss is masked are not scored, and have zeros.
        score: returns one number for each target of a row, [N].
        """
        scores: ByGroup = {}
        for group in batch:
            if isinstance(group.group, Group):  # a tombstone has no tokens
                scores[group.group_id] = [np.zeros(r.num_sampled) for r in group.rollouts]

        for groups in micro_batches:
            row = value_row(groups, self._packing)
            scores_of_completions = iter(score(row).split(row.lengths))
            for group in groups:
                for completion in group.sampled_tokens.completions:
                    scores_of_completion = next(scores_of_completions)
                    scores[group.group_id][completion][:] = scores_of_completion.numpy()

        self._sum_over_dp(scores)
        return scores

    def _sum_over_dp(self, scores: ByGroup) -> None:
        """Replaces this rank's scores with the sums over data-parallel ranks.

        Each data-parallel rank has scored only its own groups, and has zeros for all other groups.
        So a sum is the score from the rank that has the group.
        """
        arrays = list(itertools.chain.from_iterable(scores.values()))
        if not arrays:  # on every rank, because the whole batch is tombstones
            return
        flat_sums = self.collectives.sum_over_dp(torch.from_numpy(np.concatenate(arrays)))
        sums = flat_sums.split([len(array) for array in arrays])
        for array, sum_over_ranks in zip(arrays, sums, strict=True):
            array[:] = sum_over_ranks.numpy()

    def backward(self, groups: Sequence[TrainingGroup], num_step_tokens: int) -> None:
        """Runs the critic's forward and backward on this rank's groups of a micro-batch.

        num_step_tokens: the number of tokens at which the critic learns in the whole step.
        """
        self.critic.backward(value_batch(groups, num_step_tokens, self._packing))

    def step(self, critic_only: bool) -> StepResult:
        """Steps both models, or neither if a gradient of either model is not finite on any rank.

        DeepSpeed checks the gradients of a model only when it steps that model, so it might update
        the critic before it finds that the policy's gradients are not finite. Therefore both models
        are checked before. If a check fails, the gradients of both models are made NaN, which makes
        both steps be skipped.

        critic_only: whether only the critic is checked and stepped.
        """
        models: list[DeepSpeedModel] = [self.critic]
        if not critic_only:
            models.append(self.policy)

        # every model is checked even if the first check fails, because the check resets its record
        are_finite = [model.gradients_are_finite() for model in models]
        if not all(are_finite):
            for model in models:
                model.make_gradients_nan()
        results = [model.step() for model in models]

        critic_result = results[0]
        main_result = results[-1]  # the policy's, unless only the critic was stepped
        sums = self.collectives.sum_named(self.critic.sums.drain())
        self._step_metrics = {
            "value_loss": sums["loss"],
            "value_clip_fraction": sums["clipped"] / max(sums["tokens"], 1.0),
            "critic/grad_norm": critic_result.grad_norm,
            "critic/learning_rate": critic_result.learning_rate,
        }
        return StepResult(
            applied=all(result.applied for result in results),
            grad_norm=main_result.grad_norm,
            learning_rate=main_result.learning_rate,
            critic_only=critic_only,
        )

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the newest batch and of the newest optimizer step, by name."""
        return self._batch_metrics | self._step_metrics

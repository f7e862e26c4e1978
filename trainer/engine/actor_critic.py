"""The actor-critic part of the training loop, which runs only if there is a critic.

    all groups of a batch ─► values, no gradient ─► GAE ─► policy backward, critic backward … ─► one step of both

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
from trainer.data.experience import Experience, with_estimates
from trainer.data.tensors import unmasked_completions, value_batch, value_row
from trainer.engine.critic import Critic
from trainer.engine.deepspeed_model import DeepSpeedModel, StepResult
from trainer.engine.policy import PolicyEngine
from trainer.engine.ranks import Exchange

Experiences = Sequence[Experience]


class ActorCritic:
    def __init__(self, config: Config, policy: PolicyEngine, critic: Critic, exchange: Exchange):
        self.config, self.policy, self.critic, self.exchange = config, policy, critic, exchange
        self._packing = common_packing(policy.packing, critic.packing)
        critic.watch_gradients()
        policy.watch_gradients()
        self._segments: SegmentSums | None = None  # the sums of the newest batch
        self._batch_metrics: dict[str, float] = {}
        self._step_metrics: dict[str, float] = {}

    def score(self, batch: Experiences, parts: Sequence[Experiences], threshold: float) -> list[Experience]:
        """Returns the batch with advantages, and with the critic's targets.

        parts: this rank's part of every micro-batch; as many on every rank, because ZeRO-3 gathers in each forward.
        threshold: τ of group_ppo for this batch.
        """
        algorithm, groups = self.config.algorithm, [e.group for e in batch]
        values = self._of_every_token(batch, parts, self.critic.evaluate)
        if algorithm.adv_estimator == "gae":
            estimates = estimate(groups, values, self.config)
        else:
            exact = algorithm.group_params.score == "exact"
            scores = self._of_every_token(batch, parts, self.policy.score_norms) if exact else None
            estimates = estimate_segments(groups, values, scores, threshold, self.config)
        self._threshold, self._segments = threshold, estimates.segments
        self._batch_metrics = value_metrics(groups, estimates, self.config)
        if estimates.segments:
            loss = algorithm.group_params.segment_loss
            self._batch_metrics |= token_group_metrics(estimates.segments, threshold, loss)
        return with_estimates(batch, estimates)

    def next_threshold(self) -> float | None:
        """Returns τ for the next batch; None without segments."""
        if self._segments is None:
            return None
        return next_threshold(self._threshold, self._segments, self.config.algorithm.group_params)

    def _of_every_token(
        self, batch: Experiences, parts: Sequence[Experiences], score: Callable[[PackedRow], Tensor]
    ) -> ByGroup:
        """Returns `score`'s results for every sampled token of completions that train, on every rank; 0 for others.

        Every dp_rank scores its own part and has zeros elsewhere, so that the sum over dp_ranks holds all results.
        """
        groups = [experience.group for experience in batch if isinstance(experience.group, Group)]
        scores = {g.group_id: [np.zeros(r.num_sampled) for r in g.rollouts] for g in groups}
        for part in parts:
            row = value_row(part, self.config.algorithm, self._packing)
            by_completion = iter(score(row).split(row.lengths))
            for group in (experience.group for experience in part):
                for i in unmasked_completions(group, self.config.algorithm):
                    scores[group.group_id][i][:] = next(by_completion).numpy()
        if arrays := [array for arrays_of_group in scores.values() for array in arrays_of_group]:
            total = self.exchange.sum_over_dp(torch.from_numpy(np.concatenate(arrays)))
            for array, summed in zip(arrays, total.split(list(map(len, arrays))), strict=True):
                array[:] = summed.numpy()
        return scores

    def backward(self, own: Experiences, num_tokens: int) -> None:
        """Runs the critic's forward and backward on this rank's part of a micro-batch. num_tokens: of the step."""
        self.critic.backward(value_batch(own, num_tokens, self.config.algorithm, self._packing))

    def step(self, critic_only: bool) -> StepResult:
        """Steps both models, or neither if a gradient of either is not finite on any rank.

        DeepSpeed finds this out for one model at a time and too late: the first would have stepped already. So both
        models are checked first, and a bad one makes the other's gradients NaN too; then each skips in its own way.
        """
        models: list[DeepSpeedModel] = [self.critic] if critic_only else [self.critic, self.policy]
        if not all([model.gradients_are_finite() for model in models]):
            for model in models:
                model.poison()
        results = [model.step() for model in models]
        of_critic, last = results[0], results[-1]
        sums = self.exchange.sum_named(self.critic.sums.drain())
        self._step_metrics = {
            "value_loss": sums["loss"],
            "value_clip_fraction": sums["clipped"] / max(sums["tokens"], 1.0),
            "critic/grad_norm": of_critic.grad_norm,
            "critic/learning_rate": of_critic.learning_rate,
        }
        return StepResult(all(r.applied for r in results), last.grad_norm, last.learning_rate, critic_only)

    def metrics(self) -> dict[str, float]:
        return self._batch_metrics | self._step_metrics

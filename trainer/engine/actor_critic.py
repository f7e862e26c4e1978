"""What the training loop does beside the policy when there is a critic; without one nothing here runs.

    all groups of a batch ─► values, no gradient ─► GAE ─► policy backward, critic backward … ─► one step of both

With group_ppo GAE gives way to segments, and values may be joined by the policy's exact score norms.

Both models are on every rank. Either both step or neither: see `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np
from torch import Tensor

from common.config import Config
from common.types import Group, Tombstone
from model.packing import PackedRow
from trainer.algorithm.advantages import RewardSettings
from trainer.algorithm.critic_advantages import ByGroup, Estimates, estimate, estimate_segments, value_metrics
from trainer.algorithm.segments import next_threshold, token_group_metrics
from trainer.data.tensors import num_tokens, training_completions, value_batch, value_row
from trainer.engine.critic import Critic, ValueSums
from trainer.engine.deepspeed_model import DeepSpeedModel, StepResult
from trainer.engine.policy import Engine
from trainer.engine.ranks import Exchange

Items = Sequence[Group | Tombstone]


class ActorCritic:
    def __init__(self, config: Config, policy: Engine, critic: Critic, exchange: Exchange):
        self.config, self.policy, self.critic, self.exchange = config, policy, critic, exchange
        critic.watch_gradients()
        policy.watch_gradients()
        self.estimates = Estimates({}, {}, {})
        self._batch_metrics: dict[str, float] = {}
        self._step_metrics: dict[str, float] = {}

    def begin_batch(self, groups: Items, shares: Sequence[Items], rewards: RewardSettings, threshold: float) -> ByGroup:
        """Scores all groups and returns their advantages.

        shares: this rank's part of every micro-batch; as many on every rank, because ZeRO-3 gathers in each forward.
        rewards: with the beta of this batch. threshold: τ of group_ppo for this batch.
        """
        algorithm = self.config.algorithm
        values = self._of_every_token(groups, shares, self.critic.score)
        if algorithm.adv_estimator == "gae":
            self.estimates = estimate(groups, values, rewards, algorithm)
        else:
            exact = algorithm.group_params.score == "exact"
            scores = self._of_every_token(groups, shares, self.policy.score_norms) if exact else None
            self.estimates = estimate_segments(groups, values, scores, threshold, rewards, algorithm)
        self._threshold = threshold
        self._batch_metrics = value_metrics(groups, self.estimates, self.config)
        if self.estimates.segments:
            loss = algorithm.group_params.segment_loss
            self._batch_metrics |= token_group_metrics(self.estimates.segments, threshold, loss)
        return self.estimates.advantages

    def next_threshold(self) -> float | None:
        """τ for the batch after this one; None without segments."""
        if self.estimates.segments is None:
            return None
        return next_threshold(self._threshold, self.estimates.segments, self.config.algorithm.group_params)

    def _of_every_token(self, groups: Items, shares: Sequence[Items], score: Callable[[PackedRow], Tensor]) -> ByGroup:
        """What `score` says of every token of every completion that trains, on every rank; 0 of the others."""
        found = {g.group_id: [np.zeros(len(r.completion_ids)) for r in g.rollouts] for g in _alive(groups)}
        for share in shares:
            row = value_row(share, self.config.algorithm, self.config.trainer.packing)
            parts = iter(score(row).split(row.lengths))
            for group, indexes in training_completions(share, self.config.algorithm):
                for i in indexes:
                    found[group.group_id][i][:] = next(parts).numpy()
        self._gather(found)
        return found

    def _gather(self, values: ByGroup) -> None:
        """Every rank has scored its own share, and has zeros elsewhere: the sum is what all of them found."""
        arrays = [array for of_group in values.values() for array in of_group]
        if not arrays:
            return
        whole = np.array(self.exchange.add(np.concatenate(arrays).tolist()))
        for array, part in zip(arrays, np.split(whole, np.cumsum([len(a) for a in arrays])[:-1]), strict=True):
            array[:] = part

    def backward(self, mine: Items, groups: Items) -> None:
        """The critic's forward and backward on this rank's share of a micro-batch. groups: all of the step's."""
        found, algorithm, packing = self.estimates, self.config.algorithm, self.config.trainer.packing
        at = found.value_positions
        learned = max(1, num_tokens(groups, algorithm, at))
        self.critic.backward(value_batch(mine, found.values, found.returns, learned, algorithm, packing, at))

    def step(self, critic_only: bool) -> StepResult:
        """One step of both models, or of none if a gradient of either is not finite on any rank.

        DeepSpeed finds that out for one model at a time and too late: the first would have stepped already. So both
        are asked first, and a bad one makes the other's gradients NaN too; then each skips in its own way.
        """
        models: list[DeepSpeedModel] = [self.critic] if critic_only else [self.critic, self.policy]
        if not all([model.gradients_are_finite() for model in models]):
            for model in models:
                model.poison()
        results = [model.step() for model in models]
        self._step_metrics = self._value_metrics(results[0])
        last = results[-1]
        return StepResult(all(r.applied for r in results), last.grad_norm, last.learning_rate, critic_only)

    def _value_metrics(self, result: StepResult) -> dict[str, float]:
        names, mine = [f.name for f in fields(ValueSums)], self.critic.take_sums()
        sums = ValueSums(*self.exchange.add([getattr(mine, name) for name in names]))
        return {
            "value_loss": sums.loss,
            "value_clip_fraction": sums.clipped / max(sums.tokens, 1.0),
            "critic/grad_norm": result.grad_norm,
            "critic/learning_rate": result.learning_rate,
        }

    def metrics(self) -> dict[str, float]:
        return self._batch_metrics | self._step_metrics


def _alive(groups: Items) -> list[Group]:
    return [g for g in groups if isinstance(g, Group)]

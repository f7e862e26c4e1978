"""What the training loop does beside the policy when there is a critic; without one nothing here runs.

    all groups of a batch ─► values, no gradient ─► GAE ─► policy backward, critic backward … ─► one step of both

Both models are on every rank. Either both step or neither: see `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from common.config import Config
from common.types import Group, Tombstone
from trainer.batch import training_completions, value_batch, value_row
from trainer.critic import Critic, ValueSums
from trainer.deepspeed_model import DeepSpeedModel, StepResult
from trainer.estimates import ByGroup, Estimates, estimate, value_metrics
from trainer.exchange import Exchange

Items = Sequence[Group | Tombstone]


class ActorCritic:
    def __init__(self, config: Config, policy: DeepSpeedModel, critic: Critic, exchange: Exchange):
        self.config, self.policy, self.critic, self.exchange = config, policy, critic, exchange
        critic.watch_gradients()
        policy.watch_gradients()
        self.estimates = Estimates({}, {}, {})
        self._batch_metrics: dict[str, float] = {}
        self._step_metrics: dict[str, float] = {}

    def begin_batch(self, groups: Items, shares: Sequence[Items], shaping: Config) -> ByGroup:
        """Scores all groups and returns their advantages.

        shares: this rank's part of every micro-batch; as many on every rank, because ZeRO-3 gathers in each forward.
        shaping: the settings, with the beta of this batch.
        """
        values = {g.group_id: [np.zeros(len(r.completion_ids)) for r in g.rollouts] for g in _alive(groups)}
        for share in shares:
            self._score(share, values)
        self._gather(values)
        self.estimates = estimate(groups, values, shaping)
        self._batch_metrics = value_metrics(groups, self.estimates, self.config)
        return self.estimates.advantages

    def _score(self, share: Items, values: ByGroup) -> None:
        row = value_row(share, self.config.algorithm, self.config.trainer.packing)
        parts = iter(self.critic.score(row).split(row.lengths))
        for group, indexes in training_completions(share, self.config.algorithm):
            for i in indexes:
                values[group.group_id][i][:] = next(parts).numpy()

    def _gather(self, values: ByGroup) -> None:
        """Every rank has scored its own share, and has zeros elsewhere: the sum is what all of them found."""
        arrays = [array for of_group in values.values() for array in of_group]
        if not arrays:
            return
        whole = np.array(self.exchange.add(np.concatenate(arrays).tolist()))
        for array, part in zip(arrays, np.split(whole, np.cumsum([len(a) for a in arrays])[:-1]), strict=True):
            array[:] = part

    def backward(self, mine: Items, num_tokens: int) -> None:
        """The critic's forward and backward on this rank's share of a micro-batch."""
        found, algorithm = self.estimates, self.config.algorithm
        packing = self.config.trainer.packing
        self.critic.backward(value_batch(mine, found.values, found.returns, num_tokens, algorithm, packing))

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

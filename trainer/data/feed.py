"""The micro-batches of a batch of rollouts while it fills: which seats each rank trains, round by round.

Where all groups of a step are in when it begins, one plan over all of them balances the ranks best. Where they are
still coming in, rounds are planned over those that have come, in the order of their ids, so that training goes on
while the rest decodes. Both follow from config and contents alone, and every rank has all groups: all find the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from common.config import Config
from model.dims import ModelDims
from trainer.algorithm.losses import Denominator
from trainer.data.micro_batches import NOTHING, Budget, Round, Work, plan, stream, work
from trainer.data.seats import Items, Rollouts
from trainer.data.tensors import Positions, num_tokens, trained_completions, training_completions


class Ranks(Protocol):
    rank: int
    world_size: int


class Shares:
    def __init__(self, config: Config, rollouts: Rollouts, model: ModelDims | None, ranks: Ranks):
        self._config, self._rollouts, self._model = config, rollouts, model
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._budget = Budget.of(config.trainer)
        self._rounds: dict[tuple[int, ...], list[Round]] = {}  # by places

    @property
    def at_once(self) -> int:
        """Groups to take from the stream at a time: what fills a round, as far as that is known before."""
        return self._world_size * (1 if self._budget.tokens else self._budget.groups)

    def rounds(self, places: Sequence[int]) -> Iterator[Round]:
        """Places by rank. Takes groups that are not in yet. The same in every pass: ranks remember their log-probs."""
        key = tuple(places)
        if key not in self._rounds:
            planned = []
            for found in self._planned(places):
                planned.append(tuple(tuple(places[i] for i in mine) for mine in found))
                yield planned[-1]
            self._rounds[key] = planned
        else:
            yield from self._rounds[key]

    def mine(self, found: Round) -> Items:
        """This rank's groups of a round."""
        return self._at(found[self._rank])

    def denominator(self, places: Sequence[int], positions: Positions | None = None) -> Denominator:
        """Of a step on these places. B counts every completion of these seats: those of tombstones and empty seats are
        there, with weight zero. positions: the tokens that train; None = all.
        """
        sampler, algorithm = self._config.sampler, self._config.algorithm
        groups = self._at(places)
        skipped = len(self._rollouts.of(places)) - len(groups) if algorithm.dead_groups == "skip" else 0
        return Denominator(
            loss_type=algorithm.loss_type,
            num_completions=max(1, (len(places) - skipped) * sampler.num_generations),
            num_tokens=max(1, num_tokens(groups, algorithm, positions)),
            max_completion_length=sampler.max_completion_length,
        )

    def _at(self, places: Sequence[int]) -> Items:
        """What trains of these places."""
        return self._rollouts.trained(self._rollouts.of(places))

    def _planned(self, places: Sequence[int]) -> Iterator[Round]:
        if max(places) < len(self._rollouts.seats):
            yield from plan(list(map(self._work, places)), self._world_size, self._budget)
        else:
            yield from stream(self._coming(places), self._world_size, self._budget)

    def _coming(self, places: Sequence[int]) -> Iterator[Work]:
        for i, place in enumerate(places):
            if place >= len(self._rollouts.seats):
                self._rollouts.take_up_to(max(places[i : i + self.at_once]) + 1, self.at_once)
            yield self._work(place)

    def _work(self, place: int) -> Work:
        """Of the group that trains at this place; of none if there is none."""
        algorithm, advantages = self._config.algorithm, self._rollouts.advantages
        for group, kept in training_completions(self._at([place]), algorithm):
            # a critic learns from every completion, and its values are needed before there are advantages
            if algorithm.needs_critic or trained_completions(group, advantages, algorithm):
                lengths = [len(group.rollouts[i].completion_ids) for i in kept]
                return work(len(group.prompt_ids), lengths, self._config.trainer.packing, self._model)
        return NOTHING

    def plan_metrics(self, places: Sequence[int]) -> dict[str, float]:
        """Of the rounds of a step."""
        works = {place: self._work(place) for place in places}
        rounds = list(self.rounds(places))
        loads = [sum(works[place].cost for found in rounds for place in found[r]) for r in range(self._world_size)]
        metrics = {"micro_batches": float(len(rounds))}
        if self._world_size > 1:
            metrics["rank_imbalance"] = max(loads) * len(loads) / sum(loads) - 1 if any(loads) else 0.0
        if self._budget.tokens:
            metrics["oversized_groups"] = float(sum(map(self._budget.is_exceeded_by, works.values())))
        return metrics

    def warning(self, places: Sequence[int]) -> str:
        """What to say about groups above the budget."""
        largest = max(self._work(place).tokens for place in places)
        return (
            f"a group of {largest} tokens is above trainer.max_tokens_per_micro_batch {self._budget.tokens} and trains "
            f"alone; if memory is short, shorten it: sampler.max_completion_length, sampler.num_generations"
        )

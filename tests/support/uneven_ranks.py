"""What a rank of test_uneven_ranks.py does: a step for every number of groups, with a slow rank and a masked shard."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.types import Group, Tombstone
from tests.support.gloo_data import Item, Stream, group
from tests.support.rank import Worker
from tests.support.tier import ALL

RANKS = (1, 2, 4) if ALL else (1, 2)
SLOW_S = 0.05
NOT_CLIPPED = {"max_grad_norm": 1e9}
BUDGET = 40  # tokens: one to three of the groups; some are larger


@dataclass(frozen=True, order=True)
class Case:
    """One step of `count` groups, of which those of `shard` have nothing to train."""

    kind: str
    count: int
    shard: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}{self.count}-without-{'.'.join(map(str, self.shard))}"

    @property
    def algorithm(self) -> dict[str, Any]:
        """tokens, critic: the whole step is planned at once, for both wait for all of it."""
        more = {"tokens": {"loss_type": "dapo"}, "critic": {"adv_estimator": "gae"}}
        return {"mask_truncated_completions": True} | more.get(self.kind, {})

    @property
    def trainer(self) -> dict[str, Any]:
        budget = {
            "single": {"groups_per_micro_batch": 1},
            "pairs": {"groups_per_micro_batch": 2},
            "stream": {"max_tokens_per_micro_batch": BUDGET},
            "tokens": {"max_tokens_per_micro_batch": BUDGET},
            "critic": {"max_tokens_per_micro_batch": BUDGET},
        }
        return {"prompts_per_step": self.count} | budget[self.kind] | NOT_CLIPPED


def counts(ranks: int) -> range:
    return range(1, 2 * ranks + 2)


def some(ranks: int) -> list[int]:
    return sorted({1, ranks, ranks + 1, 2 * ranks + 1})


def shard(count: int, ranks: int) -> tuple[int, ...]:
    """Every ranks-th group, another residue for every count."""
    return tuple(range(count % ranks, count, ranks))


def cases(ranks: int) -> list[tuple[int, Case]]:
    """(ZeRO stage, case). A group alone leaves all ranks but one with fillers from the first forward to the last."""
    found = [(1, Case("single", count, without)) for count in counts(ranks) for without in ((), shard(count, ranks))]
    found += [(1, Case("tokens", count, ())) for count in some(ranks)]
    found += [(1, Case(kind, 2 * ranks + 1, ())) for kind in ("pairs", "stream")]
    found += [(stage, Case("stream", count, shard(count, ranks))) for stage in (2, 3) for count in some(ranks)]
    found += [(stage, Case("critic", 2 * ranks + 1, shard(2 * ranks + 1, ranks))) for stage in (1, 3)]
    return [*found, (3, Case("single", ranks + 1, tuple(range(1, ranks + 1))))]


def stream(without: tuple[int, ...]) -> Stream:
    """Of these groups half are tombstones, and of the others every completion is truncated, which none trains."""

    def at(group_id: int) -> Item:
        made = group(group_id)
        if group_id not in without:
            return made
        if group_id % 2:
            return Tombstone(group_id, 0, "reward timed out")
        assert isinstance(made, Group)
        cut = tuple(dataclasses.replace(r, finish_reason="length") for r in made.rollouts)
        return dataclasses.replace(made, rollouts=cut)

    return at


class UnevenWorker(Worker):
    slow = 0

    def trainer(self, config: Any, stream: Stream, *more: Any) -> Any:
        trainer = super().trainer(config, stream, *more)
        backward = trainer.engine.backward

        def slowly(*arguments: Any) -> Any:
            time.sleep(SLOW_S * (self.exchange.rank == self.slow))
            return backward(*arguments)

        trainer.engine.backward = slowly
        return trainer

    def step(self, name: str, stage: int, case: Case) -> None:
        self.slow = case.count % self.exchange.world_size  # each rank has its turn
        self.one_batch(name, stage, stream(case.shard), trainer=case.trainer, algorithm=case.algorithm)


def work(folder: Path) -> None:
    worker = UnevenWorker(folder)
    ranks = worker.exchange.world_size
    if ranks > 1:
        for stage, case in cases(ranks):
            worker.step(f"{case.name}-zero{stage}", stage, case)
    else:  # what the others must equal
        for case in sorted({case for several in RANKS[1:] for _, case in cases(several)}):
            worker.step(case.name, 1, case)
    worker.tell()

"""The way of a batch from its source to the backward of each rank, with models that only write down what they get."""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from common.config import Config
from common.types import Group, Tombstone
from model.files.dims import ModelDims
from tests.support.configs import config_of
from tests.support.tiny import random_group
from tests.unit.trainer.data.test_tensors import share as loss_and_gradient
from trainer.data.mini_batches import steps
from trainer.data.tensors import MicroBatch
from trainer.save.checkpoint import RunState
from trainer.step import StepTrainer

MODEL = ModelDims(hidden=8, intermediate=16, layers=2, heads=2, kv_heads=1, head_dim=4, vocab=100, tied=True)
START = RunState("run", 0, 0, 0, 0, 0, 0, {})


def config(
    prompts: int, algorithm: dict[str, Any] | None = None, critic: dict[str, Any] | None = None, **trainer: Any
) -> Config:
    sampler = {"num_generations": 3, "max_completion_length": 12}
    trainer = {"prompts_per_step": prompts, "max_steps": 4} | trainer
    return config_of(sampler=sampler, trainer=trainer, algorithm=algorithm or {}, critic=critic or {})


def group(group_id: int) -> Group:
    return random_group(group_id, 50, [1.0, 0.0, float(group_id % 3)], beta=0.1)


class Run:
    """One rank of a batch. `events`: ids that were taken, and groups of each backward, in the order they happened."""

    def __init__(
        self,
        of: Config,
        ranks: int = 1,
        rank: int = 0,
        make: Callable[[int], Any] = group,
        scorer: Any = None,
        critic: Any = None,
        of_all_ranks: Callable[[Any], Sequence[Any]] = lambda own: [own],
    ):
        """of_all_ranks: returns what every rank gives; by default this rank is alone."""
        self.events: list[tuple[str, list[int]]] = []
        self.batches: list[MicroBatch] = []
        policy = SimpleNamespace(dims=MODEL, backward=self.backward, score=lambda row, _: row.target_ids / -100)
        policy.can_drop_gradients, policy.drop_gradients = True, self.batches.clear
        collectives: Any = SimpleNamespace(rank=rank, dp_rank=rank, dp_size=ranks, world_size=ranks, agree=bool)
        collectives.ranks_per_row = 1
        collectives.any_rank = lambda value: any(of_all_ranks(value))
        collectives.sum_over_dp = lambda values: sum(of_all_ranks(values))

        def receive(ids: Sequence[int]) -> list[Group | Tombstone]:
            self.events.append(("receive", list(ids)))
            return [make(g) for g in ids]

        source = SimpleNamespace(receive=receive, refill=lambda _: None)
        models: Any = SimpleNamespace(policy=policy, packing="shared")
        models.reference, models.actor_critic = scorer, critic
        self.of = of
        self.seconds = defaultdict[str, float](float)
        self.training = StepTrainer(of, models, collectives, source, self.seconds)  # type: ignore[arg-type]
        self.training.begin_batch(START)

    def backward(self, batch: MicroBatch, version: int) -> Tensor:
        self.events.append(("train", [group.group_id for group in batch.groups]))
        self.batches.append(batch)
        return batch.row.target_ids / -10 - version

    def step(self, index: int = 0, progress: RunState = START) -> list[tuple[str, list[int]]]:
        before = len(self.events)
        self.training.backward(steps(self.of, 0)[index], progress)
        return self.events[before:]


def test_the_seconds_of_a_step_are_those_that_its_parts_took() -> None:
    run = Run(config(4, {"beta": 0.1}), scorer=SimpleNamespace(score=lambda row: row.target_ids / -7))
    begun = time.monotonic()
    run.step()
    took_s = time.monotonic() - begun
    assert run.seconds.keys() == {"timing/backward_s", "timing/reference_s"}
    assert all(0 < seconds <= took_s for seconds in run.seconds.values())


def test_groups_train_as_they_come_and_no_round_waits_for_more_than_it_holds() -> None:
    first, second = [Run(config(8, groups_per_micro_batch=2), 2, rank).step() for rank in (0, 1)]
    for i, ids in ((0, [0, 1, 2, 3]), (2, [4, 5, 6, 7])):
        assert first[i] == second[i] == ("receive", ids)
        assert sorted(first[i + 1][1] + second[i + 1][1]) == ids


@pytest.mark.parametrize("algorithm", [{"loss_type": "dapo"}, {"scale_rewards": "batch"}])
def test_where_a_step_waits_for_its_groups_one_plan_over_all_of_them_is_trained(algorithm: dict[str, Any]) -> None:
    run = Run(config(8, algorithm, max_tokens_per_micro_batch=60))
    events = run.step()
    planned = [("train", list(mine)) for (mine,) in run.training.batch.plan(range(8))]
    assert events == [("receive", [g]) for g in range(8)] + planned


def test_memory_that_runs_out_halves_micro_batches_once(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(config(4, max_tokens_per_micro_batch=120))
    sizes = []

    def backward(batch: MicroBatch, _: int) -> Tensor:
        sizes.append(batch.row.input_ids.numel())
        raise torch.OutOfMemoryError("CUDA out of memory")

    run.training.models.policy.backward = backward  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        run.step()
    assert len(sizes) == 2 and sizes[1] <= 60 < sizes[0]
    assert "trainer.max_tokens_per_micro_batch=60" in capsys.readouterr().err


def test_dead_groups_tombstones_and_masked_completions_take_no_room() -> None:
    def make(group_id: int) -> Group | Tombstone:
        empty = {1: Tombstone(1, 0, "reward timed out"), 2: random_group(2, 50, [0.1] * 3)}
        return empty.get(group_id, group(group_id))

    of_ranks = [Run(config(4), 2, rank, make).step() for rank in (0, 1)]
    assert sorted(ids for events in of_ranks for what, ids in events if what == "train") == [[0], [3]]


def test_with_mini_batches_the_correction_keeps_to_log_probs_of_the_whole_batch_from_before_its_first_step() -> None:
    algorithm = {"steps_per_generation": 2, "vllm_importance_sampling_mode": "token_mask"}
    run = Run(config(1, algorithm))
    assert run.step(0) == [("receive", [0]), ("receive", [1]), ("train", [0])]
    assert run.step(1, RunState("run", 0, 0, 1, 1, 0, 0, {})) == [("train", [1])]
    for batch in run.batches:
        assert batch.proximal_logprobs is not None
        assert torch.equal(batch.proximal_logprobs, (batch.row.target_ids / -100).float())


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.one_of(
        st.fixed_dictionaries({"groups_per_micro_batch": st.integers(1, 4)}),
        st.fixed_dictionaries({"max_tokens_per_micro_batch": st.integers(1, 120)}),
    ),
    st.sampled_from([{}, {"beta": 0.1, "loss_type": "dapo"}, {"scale_rewards": "batch"}]),
)
@hypothesis_settings(max_examples=60)
def test_no_plan_changes_loss_or_gradient(
    prompts: int, ranks: int, trainer: dict[str, int], algorithm: dict[str, Any]
) -> None:
    settings = config(prompts, algorithm, **trainer)
    step = [group(g) for g in range(prompts)]
    whole_loss, whole = loss_and_gradient(step, step, settings)
    total, gradient = 0.0, dict.fromkeys(whole, 0.0)
    of_ranks = [Run(settings, ranks, rank).step() for rank in range(ranks)]
    for what, mine in itertools.chain(*of_ranks):
        if what == "train" and mine:
            part, by_token = loss_and_gradient([step[place] for place in mine], step, settings)
            total += part
            gradient |= by_token
    assert total == pytest.approx(whole_loss, rel=1e-6, abs=1e-7)
    assert gradient == pytest.approx(whole, rel=1e-6, abs=1e-8)

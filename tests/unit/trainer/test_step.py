"""The way of a batch from its source to the backward of each rank, with models that only write down what they get."""

import itertools
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
from model.cores import lent_cores
from model.files.dims import ModelDims
from tests.support.configs import config_of
from tests.support.tiny import random_group
from tests.unit.trainer.data.test_tensors import share as loss_and_gradient
from trainer.data.micro_batches import Budget, plan, work
from trainer.data.mini_batches import steps
from trainer.data.tensors import MicroBatch
from trainer.save.checkpoint import RunState
from trainer.step import StepTrainer

MODEL = ModelDims(hidden=8, intermediate=16, layers=2, heads=2, kv_heads=1, head_dim=4, vocab=100, tied=True)
START = RunState("run", 0, 0, 0, 0, 0, 0, {})


def config(prompts: int, algorithm: dict[str, Any] | None = None, **trainer: Any) -> Config:
    sampler = {"num_generations": 3, "max_completion_length": 12}
    trainer = {"prompts_per_step": prompts, "max_steps": 4} | trainer
    return config_of(sampler=sampler, trainer=trainer, algorithm=algorithm or {})


def group(group_id: int) -> Group:
    return random_group(group_id, 50, [1.0, 0.0, float(group_id % 3)], beta=0.1)


class Run:
    """One rank of a batch. `events`: ids that were taken, and groups of each backward, in the order they happened."""

    def __init__(  # noqa: PLR0913 what a test may replace
        self,
        of: Config,
        ranks: int = 1,
        rank: int = 0,
        make: Callable[[int], Any] = group,
        scorer: Any = None,
        samplers_are_idle: Sequence[bool] = (),
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

        lent = lent_cores(of, collectives, iter(samplers_are_idle).__next__, lambda: False)
        source = SimpleNamespace(receive=receive, refill=lambda _: None)
        models: Any = SimpleNamespace(policy=policy, packing="shared")
        models.reference, models.actor_critic = scorer, critic
        self.of = of
        self.training = StepTrainer(of, models, collectives, source, defaultdict(float), lent)  # type: ignore[arg-type]
        self.training.begin_batch(START)

    def backward(self, batch: MicroBatch, version: int) -> Tensor:
        self.events.append(("train", [group.group_id for group in batch.groups]))
        self.batches.append(batch)
        return batch.row.target_ids / -10 - version

    def step(self, index: int = 0, progress: RunState = START) -> list[tuple[str, list[int]]]:
        before = len(self.events)
        self.training.backward(steps(self.of, 0)[index], progress)
        return self.events[before:]


def test_groups_train_as_they_come_and_no_round_waits_for_more_than_it_holds() -> None:
    of_ranks = [Run(config(8, groups_per_micro_batch=2), ranks=2, rank=rank).step() for rank in (0, 1)]
    first, second = of_ranks
    assert [what for what, _ in first] == [what for what, _ in second] == ["receive", "train", "receive", "train"]
    assert [ids for what, ids in first if what == "receive"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sorted(first[1][1] + second[1][1]) == [0, 1, 2, 3]
    assert sorted(first[3][1] + second[3][1]) == [4, 5, 6, 7]


@pytest.mark.parametrize("algorithm", [{"loss_type": "dapo"}, {"scale_rewards": "batch"}])
def test_where_a_step_waits_for_its_groups_one_plan_over_all_of_them_is_trained(algorithm: dict[str, Any]) -> None:
    groups = map(group, range(8))
    works = [work(len(g.prompt_ids), [len(r.completion_ids) for r in g.rollouts], "shared", MODEL) for g in groups]
    expected = plan(dict(enumerate(works)), 1, Budget(1, 60))
    events = Run(config(8, algorithm, max_tokens_per_micro_batch=60)).step()
    assert events[:8] == [("receive", [g]) for g in range(8)]
    assert events[8:] == [("train", list(mine)) for (mine,) in expected]
    streamed = Run(config(8, max_tokens_per_micro_batch=60)).step()
    assert [ids for what, ids in streamed if what == "train"] != [list(mine) for (mine,) in expected]


def test_memory_that_runs_out_halves_micro_batches_once_and_the_step_begins_anew(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run(config(4, max_tokens_per_micro_batch=120))
    limit = 70

    def backward(batch: MicroBatch, version: int) -> Tensor:
        if batch.row.input_ids.numel() > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run.backward(batch, version)

    run.training.models.policy.backward = backward  # type: ignore[method-assign]
    run.step()
    assert sorted(group.group_id for batch in run.batches for group in batch.groups) == [0, 1, 2, 3]
    said = capsys.readouterr().err
    assert "with micro-batches of 120 tokens: the step is repeated with 60" in said
    limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        run.step()


@pytest.mark.parametrize(
    "message",
    [
        "out of resource: shared memory, Required: 114688, Hardware limit: 101376. Reducing block sizes may help.",
        "out of resource: threads, Required: 2048, Hardware limit: 1024.",
        "InductorError: RuntimeError: No valid triton configs. OutOfMemoryError: out of resource: shared memory",
    ],
)
def test_a_kernel_that_needs_more_shared_memory_than_the_gpu_has_does_not_halve_micro_batches(
    message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(config(4, max_tokens_per_micro_batch=120))
    asked = []

    def backward(batch: MicroBatch, version: int) -> Tensor:
        asked.append(batch)
        raise torch.OutOfMemoryError(message)

    run.training.models.policy.backward = backward  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError, match="out of resource"):
        run.step()
    assert len(asked) == 1 and "is repeated" not in capsys.readouterr().err


def test_a_later_pass_repeats_the_rounds_of_the_first_and_takes_nothing() -> None:
    run = Run(config(8, {"num_iterations": 2}, max_tokens_per_micro_batch=60))
    first = [event for event in run.step(0) if event[0] == "train"]
    assert run.step(1) == first


def test_dead_groups_tombstones_and_masked_completions_take_no_room() -> None:
    def make(group_id: int) -> Group | Tombstone:
        if group_id == 1:
            return Tombstone(group_id, 0, "reward timed out")
        return random_group(group_id, 50, [0.1] * 3) if group_id == 2 else group(group_id)

    of_ranks = [Run(config(4), 2, rank, make).step() for rank in (0, 1)]
    assert sorted(ids for events in of_ranks for what, ids in events if what == "train") == [[0], [3]]


def test_log_probs_of_the_first_pass_are_in_the_second_where_the_correction_needs_them() -> None:
    """Of a group that the present version sampled they also tell numerics from staleness, later."""
    algorithm = {"num_iterations": 2, "vllm_importance_sampling_mode": "token_mask"}
    run = Run(config(1, algorithm))
    run.step(0)
    run.step(1, RunState("run", 0, 0, 1, 1, 0, 0, {}))
    first, second = run.batches
    assert first.proximal_logprobs is first.own_logprobs is None
    expected = (first.row.target_ids / -10).tolist()
    assert second.proximal_logprobs is not None and second.proximal_logprobs.tolist() == expected
    assert second.own_logprobs is not None and second.own_logprobs.tolist() == expected


def test_with_mini_batches_the_correction_keeps_to_log_probs_of_the_whole_batch_from_before_its_first_step() -> None:
    algorithm = {"steps_per_generation": 2, "vllm_importance_sampling_mode": "token_mask"}
    run = Run(config(1, algorithm))
    assert run.step(0) == [("receive", [0]), ("receive", [1]), ("train", [0])]
    assert run.step(1, RunState("run", 0, 0, 1, 1, 0, 0, {})) == [("train", [1])]
    for batch in run.batches:
        assert batch.proximal_logprobs is not None
        assert torch.equal(batch.proximal_logprobs, (batch.row.target_ids / -100).float())


def test_the_reference_scores_a_micro_batch_once_for_all_passes() -> None:
    scored = []
    scorer = SimpleNamespace(score=lambda row: scored.append(row) or row.target_ids / -7)
    unscored = [random_group(group_id, 50, [1.0, 0.0, 0.5]) for group_id in range(2)]
    run = Run(config(2, {"beta": 0.1, "num_iterations": 2}), make=unscored.__getitem__, scorer=scorer)
    run.step(0)
    run.step(1)
    assert len(scored) == 2
    for batch in run.batches:
        assert batch.ref_logprobs is not None
        assert torch.equal(batch.ref_logprobs, batch.row.target_ids / -7)


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

"""Memory that runs out in any backward of a batch: what trains does not depend on it.

Every rank of a run is a thread here. Its models write down with which log-probs each group trains.
The policy's log-probs move with its version.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config import Config
from common.processes.out_of_memory import is_out_of_memory
from common.types import Group
from tests.support.tiny import random_group
from tests.unit.trainer.test_step import START, Run, config
from trainer.data.mini_batches import steps
from trainer.data.tensors import MicroBatch
from trainer.data.training_group import TrainingGroup, split_by_group

TOKENS = 120  # of a micro-batch: about five of the groups below
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
UNKNOWN = 1.0  # in place of a log-prob
TWICE = {"num_iterations": 2}
SHUFFLED = TWICE | {"steps_per_generation": 2, "shuffle_mini_batches": True}
SCORED = {"beta": 0.1}  # by the trainer
SCORED_AND_CORRECTED = SCORED | {"vllm_importance_sampling_mode": "token_truncate"}
GAE = {"adv_estimator": "gae"}
SETTINGS: dict[str, dict[str, Any]] = {
    "reference": SCORED,
    "all in two passes": SCORED_AND_CORRECTED | TWICE,
    "all in two shuffled passes": SCORED_AND_CORRECTED | SHUFFLED,
    "critic in two shuffled passes": SCORED | SHUFFLED | GAE,
    "critic alone before the policy": SCORED_AND_CORRECTED | TWICE | GAE,
}
CRITIC = {"critic alone before the policy": {"critic_warmup_steps": 1}}
Found = list[tuple[int, str, list[float]]]  # group, name, values: with which each group trained in a step


def settings(name: str, tokens: int = TOKENS) -> Config:
    return config(16, SETTINGS[name], CRITIC.get(name), max_tokens_per_micro_batch=tokens)


def unscored(group_id: int) -> Group:
    return random_group(group_id, 50, [1.0, 0.0, float(group_id % 3)])


class Ranks:
    """Threads that wait for each other, as ranks do."""

    def __init__(self, count: int):
        self.count = count
        self._barrier = threading.Barrier(count, timeout=60)
        self._given: list[Any] = [None] * count

    def gather(self, rank: int, own: Any) -> list[Any]:
        self._given[rank] = own
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        def or_abort(rank: int) -> Any:
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as pool:
            futures = [pool.submit(or_abort, rank) for rank in range(self.count)]
        for future in futures:
            # the others' errors are that this rank has not come
            if not isinstance(future.exception(), threading.BrokenBarrierError):
                future.result()
        return [future.result() for future in futures]


class FakeCritic:
    """A critic that knows every advantage, and writes down which groups it trains on."""

    def __init__(self, backward: Callable[[], None]):
        self.trained: list[int] = []
        self._backward = backward
        self.critic = SimpleNamespace(drop_gradients=self.trained.clear)

    def score(self, batch: Sequence[TrainingGroup], *_: Any) -> None:
        for group in batch:
            group.set_advantages([np.array(0.5)] * 3)

    def backward(self, own: Sequence[TrainingGroup], _num_tokens: int) -> None:
        self._backward()
        self.trained += [group.group_id for group in own]


def log_probs_of(batch: MicroBatch, version: int) -> Tensor:
    return (batch.row.target_ids / -10 - version).float()


def effective(batch: MicroBatch, version: int) -> dict[str, Any]:
    """Returns all that a policy's backward makes of a micro-batch, known or found by itself."""
    own = log_probs_of(batch, version)
    sampled = torch.full_like(own, UNKNOWN)
    if batch.own_logprobs is not None:
        sampled = batch.own_logprobs.nan_to_num(UNKNOWN)
    is_found_now = (sampled == UNKNOWN) & (batch.policy_versions == version)
    return {
        "targets": batch.row.target_ids,
        "old": batch.old_logprobs,
        "advantages": batch.advantages,
        "weights": batch.weights,
        "reference": batch.ref_logprobs,
        "proximal": own if batch.proximal_logprobs is None else batch.proximal_logprobs,
        "sampled": torch.where(is_found_now, own, sampled),
    }


class Simulation:
    """A batch on several ranks. `steps`: what trained in each step. `calls`: backwards of each rank."""

    def __init__(
        self,
        of: Config,
        ranks: int,
        fails: tuple[int, int] | None = None,
        error: Exception = OUT_OF_MEMORY,
    ):
        """fails: the rank and the index of its backward that raises the error."""
        self._of, self._fails, self._error = of, fails, error
        self._ranks = Ranks(ranks)
        self.calls = [0] * ranks
        self.scored: list[int] = []  # tokens of each row, by the reference
        self.steps: list[Found] = self._ranks.run(self._run)[0]

    def _called(self, rank: int) -> None:
        call = self.calls[rank]
        self.calls[rank] += 1
        if (rank, call) == self._fails:
            raise self._error

    def _reference(self, row: Any) -> Tensor:
        self.scored.append(len(row.target_ids))
        return (row.target_ids + 1) / -7

    def _run(self, rank: int) -> list[Found]:
        run = Run(
            self._of,
            self._ranks.count,
            rank,
            unscored,
            SimpleNamespace(score=self._reference),
            critic=FakeCritic(partial(self._called, rank)) if self._of.algorithm.needs_critic else None,
            of_all_ranks=partial(self._ranks.gather, rank),
        )

        def backward(batch: MicroBatch, version: int) -> Tensor:
            self._called(rank)
            run.backward(batch, version)
            return log_probs_of(batch, version)

        run.training.models.policy.backward = backward  # type: ignore[method-assign]
        found = []
        for index in range(len(steps(self._of, 0))):
            own = self._step(run, index)
            found.append(sorted(itertools.chain(*self._ranks.gather(rank, own))))
        return found

    def _step(self, run: Run, index: int) -> Found:
        """Makes a step. Returns what trained on this rank."""
        version = max(0, index - self._of.critic.critic_warmup_steps)
        run.step(index, replace(START, step=index, policy_version=version))
        found: Found = []
        critic: Any = run.training.models.actor_critic
        if critic:
            found += [(group_id, "critic", []) for group_id in critic.trained]
            critic.trained.clear()
        for batch in run.batches:
            for name, values in effective(batch, version).items():
                for group, of_group in split_by_group(batch.groups, values):
                    found.append((group.group_id, name, of_group.tolist()))
        run.batches.clear()
        return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_whose_memory_runs_out_anywhere_trains_as_one_of_half_as_large_micro_batches(
    name: str, ranks: int
) -> None:
    half = Simulation(settings(name, TOKENS // 2), ranks)
    undisturbed = Simulation(settings(name), ranks)
    assert undisturbed.steps == half.steps and all(half.steps)
    for rank, calls in enumerate(undisturbed.calls):
        for call in range(calls):
            halved = Simulation(settings(name), ranks, (rank, call))
            assert sum(halved.calls) > sum(undisturbed.calls), (rank, call)
            assert halved.steps == half.steps, (rank, call)


def test_a_step_of_the_critic_alone_trains_no_policy() -> None:
    first, second = Simulation(settings("critic alone before the policy"), 1).steps
    assert {name for _, name, _ in first} == {"critic"}
    assert {name for _, name, _ in second} > {"critic"}


@pytest.mark.parametrize("name", ["all in two passes", "all in two shuffled passes"])
def test_the_reference_scores_each_group_once_for_all_passes(name: str) -> None:
    run = Simulation(settings(name), 2)
    values: dict[tuple[int, str], Any] = {}
    for step in run.steps:
        values.update({(group, what): of_group for group, what, of_group in step})
    targets = {group: of_group for (group, what), of_group in values.items() if what == "targets"}
    for group, ids in targets.items():
        assert values[group, "reference"] == ((torch.tensor(ids) + 1) / -7).tolist()
    assert sum(run.scored) == sum(map(len, targets.values()))


@pytest.mark.parametrize(
    ("message", "is_of_memory"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
        ("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", False),
    ],
)
def test_libraries_say_that_memory_ran_out_in_their_own_words(message: str, is_of_memory: bool) -> None:
    assert is_out_of_memory(RuntimeError(message)) == is_of_memory


def test_a_kernel_that_no_smaller_batch_helps_ends_the_run() -> None:
    error = torch.OutOfMemoryError("out of resource: shared memory, Required: 114688, Hardware limit: 101376.")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        Simulation(settings("reference"), 2, (1, 0), error)
    assert raised.value is error

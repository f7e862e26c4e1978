"""Memory that runs out in any backward of a batch: what trains does not depend on it.

Every rank of a run is a thread here. Its models write down with which log-probs each group trains.
The policy's log-probs move with its version.
"""

import ast
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config import Config
from common.types import Group
from tests.support.tiny import random_group
from tests.unit.trainer.test_step import START, Run, config
from trainer.data.mini_batches import steps
from trainer.data.tensors import MicroBatch
from trainer.data.training_group import TrainingGroup, split_by_group

TOKENS = 120  # of a micro-batch: about five of the groups below
CORRECTED = {"vllm_importance_sampling_mode": "token_truncate"}
TWICE = {"num_iterations": 2}
MINI_BATCHES = {"steps_per_generation": 2}
SHUFFLED = MINI_BATCHES | TWICE | {"shuffle_mini_batches": True}
SCORED = {"beta": 0.1}  # by the trainer
PLANNED = {"loss_type": "dapo"}  # one plan over all groups of a step, which train as they come else
GAE = {"adv_estimator": "gae"}
SETTINGS: dict[str, dict[str, Any]] = {
    "reference": SCORED,
    "correction": CORRECTED,
    "two passes": TWICE,
    "reference and correction, planned": SCORED | CORRECTED | PLANNED,
    "all in two passes": SCORED | CORRECTED | TWICE,
    "all in two passes, planned": SCORED | CORRECTED | TWICE | PLANNED,
    "all in two passes of mini-batches": SCORED | CORRECTED | TWICE | MINI_BATCHES,
    "all in two shuffled passes": SCORED | CORRECTED | SHUFFLED,
    "critic": SCORED | CORRECTED | TWICE | GAE,
    "critic in two shuffled passes": SCORED | SHUFFLED | GAE,
}


def settings(name: str, tokens: int = TOKENS, critic_warmup_steps: int = 0) -> Config:
    made = config(16, SETTINGS[name], max_tokens_per_micro_batch=tokens)
    critic = made.critic.model_copy(update={"critic_warmup_steps": critic_warmup_steps})
    return made.model_copy(update={"critic": critic})


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
        errors = [error for error in (future.exception() for future in futures) if error]
        # the others' errors are that this rank has not come
        own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        for error in [*own, *errors]:
            raise error
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


@dataclass
class Trained:
    """One rank's part of an optimizer step."""

    values: dict[int, dict[str, str]] = field(default_factory=dict)  # with which each group trained
    critic: list[int] = field(default_factory=list)  # groups on which the critic trained


def log_probs_of(batch: MicroBatch, version: int) -> Tensor:
    return (batch.row.target_ids / -10 - version).float()


def effective(batch: MicroBatch, version: int) -> dict[str, Tensor]:
    """Returns all that a policy's backward makes of a micro-batch, known or found by itself."""
    own = log_probs_of(batch, version)
    nothing = torch.full_like(own, math.nan)
    before = nothing if batch.own_logprobs is None else batch.own_logprobs
    is_now = before.isnan() & (batch.policy_versions == version)
    return {
        "targets": batch.row.target_ids.float(),
        "old": batch.old_logprobs,
        "advantages": batch.advantages,
        "weights": batch.weights,
        "reference": nothing if batch.ref_logprobs is None else batch.ref_logprobs,
        "proximal": own if batch.proximal_logprobs is None else batch.proximal_logprobs,
        "sampled": torch.where(is_now, own, before),
    }


class Simulation:
    """A batch on several ranks. `steps`: [step][rank]. `calls`: backwards of each rank."""

    def __init__(
        self,
        of: Config,
        ranks: int,
        fails: tuple[int, int] | None = None,
        error: Exception | None = None,
    ):
        """fails: the rank and the index of its backward that raises `error`, else one of memory."""
        self._of, self._fails = of, fails
        self._error = error or torch.OutOfMemoryError("CUDA out of memory")
        self._ranks = Ranks(ranks)
        self._lock = threading.Lock()
        self.calls = [0] * ranks
        self.scored = 0  # tokens, by the reference
        of_ranks = self._ranks.run(self._run)
        self.steps: list[tuple[Trained, ...]] = list(zip(*of_ranks, strict=True))

    def _called(self, rank: int) -> None:
        call = self.calls[rank]
        self.calls[rank] += 1
        if (rank, call) == self._fails:
            raise self._error

    def _run(self, rank: int) -> list[Trained]:
        algorithm = self._of.algorithm
        critic = FakeCritic(partial(self._called, rank)) if algorithm.needs_critic else None
        scorer = SimpleNamespace(score=self._reference) if algorithm.beta else None
        of_all = partial(self._ranks.gather, rank)
        ranks = self._ranks.count
        run = Run(self._of, ranks, rank, unscored, scorer, critic=critic, of_all_ranks=of_all)

        def backward(batch: MicroBatch, version: int) -> Tensor:
            self._called(rank)
            run.backward(batch, version)
            return log_probs_of(batch, version)

        run.training.models.policy.backward = backward  # type: ignore[method-assign]
        return [self._step(run, critic, index) for index in range(len(steps(self._of, 0)))]

    def _reference(self, row: Any) -> Tensor:
        with self._lock:
            self.scored += len(row.target_ids)
        return (row.target_ids + 1) / -7

    def _step(self, run: Run, critic: FakeCritic | None, index: int) -> Trained:
        version = max(0, index - self._of.critic.critic_warmup_steps)
        run.step(index, replace(START, step=index, policy_version=version))
        found = Trained(critic=list(critic.trained) if critic else [])
        for batch in run.batches:
            assert found.values.keys().isdisjoint(group.group_id for group in batch.groups)
            for name, values in effective(batch, version).items():
                for group, of_group in split_by_group(batch.groups, values):
                    found.values.setdefault(group.group_id, {})[name] = str(of_group.tolist())
        run.batches.clear()
        if critic:
            critic.trained.clear()
        return found

    def values(self) -> list[dict[int, dict[str, str]]]:
        """Returns what each group trained with in each step, on whichever rank."""
        merged = []
        for of_ranks in self.steps:
            groups = list(itertools.chain.from_iterable(of.values.items() for of in of_ranks))
            assert len(dict(groups)) == len(groups)  # no group trains on two ranks
            merged.append(dict(groups))
        return merged

    def of_critic(self) -> list[list[int]]:
        """Returns on which groups the critic trained in each step."""
        found = []
        for of_ranks in self.steps:
            found.append(sorted(itertools.chain(*(of.critic for of in of_ranks))))
        return found

    def owners(self) -> dict[int, set[int]]:
        """Returns the ranks on which each group trained."""
        found: dict[int, set[int]] = {}
        for of_ranks in self.steps:
            for rank, of in enumerate(of_ranks):
                for group_id in (*of.values, *of.critic):
                    found.setdefault(group_id, set()).add(rank)
        return found


def every_failure(undisturbed: Simulation) -> Iterator[tuple[int, int]]:
    return ((rank, call) for rank, calls in enumerate(undisturbed.calls) for call in range(calls))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_whose_memory_runs_out_anywhere_trains_as_one_of_half_as_large_micro_batches(
    name: str, ranks: int
) -> None:
    half = Simulation(settings(name, TOKENS // 2), ranks)
    undisturbed = Simulation(settings(name), ranks)
    assert undisturbed.values() == half.values() and undisturbed.of_critic() == half.of_critic()
    assert all(map(len, half.values()))
    for fails in every_failure(undisturbed):
        halved = Simulation(settings(name), ranks, fails)
        assert sum(halved.calls) > sum(undisturbed.calls), fails
        assert halved.values() == half.values(), fails
        assert halved.of_critic() == half.of_critic(), fails


REPEATED = [name for name, of in SETTINGS.items() if "num_iterations" in of]
IN_ORDER = [name for name in REPEATED if "shuffle_mini_batches" not in SETTINGS[name]]


@pytest.mark.parametrize("name", IN_ORDER)
def test_no_group_changes_its_rank_between_passes_when_memory_runs_out(name: str) -> None:
    for fails in every_failure(Simulation(settings(name), 2)):
        owners = Simulation(settings(name), 2, fails).owners()
        assert all(len(ranks) == 1 for ranks in owners.values()), fails


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["critic in two shuffled passes", "critic"])
def test_a_step_of_the_critic_alone_may_leave_groups_without_log_probs(name: str, ranks: int) -> None:
    """Its groups have none when the next pass shuffles them among those of other steps."""
    half = Simulation(settings(name, TOKENS // 2, critic_warmup_steps=1), ranks)
    assert [bool(of) for of in half.values()] == [False, *[True] * (len(half.steps) - 1)]
    for fails in every_failure(half):
        halved = Simulation(settings(name, critic_warmup_steps=1), ranks, fails)
        assert without_sampled(halved) == without_sampled(half), fails


def without_sampled(of: Simulation) -> list[dict[int, dict[str, str]]]:
    """Returns what each group trained with, but log-probs that only measure the mismatch."""
    found = of.values()
    for step in found:
        for values in step.values():
            values.pop("sampled", None)
    return found


@pytest.mark.parametrize("name", ["all in two passes", "all in two shuffled passes"])
def test_the_reference_scores_each_row_of_the_first_pass_once_for_all_passes(name: str) -> None:
    run = Simulation(settings(name), 2)
    targets = {}
    for step in run.values():
        for group_id, values in step.items():
            targets[group_id] = ast.literal_eval(values["targets"])
    assert run.scored == sum(map(len, targets.values()))


def test_a_later_pass_whose_log_probs_are_lost_takes_none_from_weights_that_have_moved() -> None:
    scorer = SimpleNamespace(score=lambda row: row.target_ids / -7)
    run = Run(settings("all in two passes"), make=unscored, scorer=scorer)
    run.step(0)
    for group in run.training.batch.slots.taken:
        group.proximal_logprobs = None
    with pytest.raises(AssertionError, match="lost"):
        run.step(1, replace(START, step=1, policy_version=1))


MESSAGES = [
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "Triton Error [CUDA]: out of memory",
    "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
    "HIP error: out of memory",
]
CLASSES = [RuntimeError, *([torch.AcceleratorError] if hasattr(torch, "AcceleratorError") else [])]


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("kind", CLASSES)
def test_errors_of_libraries_that_say_that_memory_ran_out_halve_micro_batches(
    kind: type[Exception], message: str
) -> None:
    name = "all in two passes"
    half = Simulation(settings(name, TOKENS // 2), 1)
    assert Simulation(settings(name), 1, (0, 1), kind(message)).values() == half.values()


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "shape mismatch",
        "out of resource: shared memory, Required: 114688, Hardware limit: 101376.",
    ],
)
@pytest.mark.parametrize("kind", CLASSES)
def test_other_errors_of_a_backward_end_the_run(kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        Simulation(settings("reference"), 2, (1, 0), kind(message))
    assert str(raised.value) == message

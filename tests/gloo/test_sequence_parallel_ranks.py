"""Rows shared by 2 and by 4 real DeepSpeed ranks: the gradient and the numbers of one rank, for every objective."""

from __future__ import annotations

import signal
from functools import cache
from typing import Any

import pytest
from safetensors.torch import load_file

from common.run_folder import step_dir
from tests.gloo.test_exact_resume import history, sha256_of_tree, steps_saved
from tests.support.gloo_data import GROUP_PPO
from tests.support.replay_worker import Life, Seen, Stack, stack
from tests.support.sequence_parallel_worker import LAYOUTS, RANKS, Case
from tests.support.tier import ALL
from tests.support.tiny import VOCAB_SIZE, difference, tiny_model

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def trainers() -> Stack:
    return stack()


@cache
def seen(trainers: Stack, ranks: int) -> Seen:
    """A model of 4 heads, and 2 of keys."""
    folder = trainers.folder / f"shared-{ranks}"
    tiny_model(folder / "model", hidden=128, vocab=VOCAB_SIZE)
    tiny_model(folder / "reference", hidden=128, layers=1, vocab=VOCAB_SIZE)
    (folder / "critic").symlink_to(folder / "reference")
    return trainers.seen("sequence_parallel_worker", folder.name, ranks)


def named(case: Case, layout: tuple[int, int]) -> str:
    return f"{case.name}-sp{layout[0]}-zero{layout[1]}"


every_case = pytest.mark.parametrize(
    ("layout", "case"),
    [pytest.param(layout, case, id=named(case, layout)) for layout, cases in LAYOUTS.items() for case in cases],
)


@every_case
def test_rows_shared_by_ranks_give_the_gradient_of_one_rank(
    trainers: Stack, layout: tuple[int, int], case: Case
) -> None:
    alone, several = seen(trainers, 1), seen(trainers, RANKS)
    name = named(case, layout)
    gradient = several.gradients(name)
    assert difference(gradient, alone.gradients(case.name)) < 1e-6
    assert any("value_gradient" in key for key in gradient) == ("critic" in case.sections)
    found, expected = several.ranks[0][name], alone.ranks[0][case.name]
    assert all(rank[name] == found for rank in several.ranks)
    for key in ("step", "batch", "cursor", "num_tokens", "threshold"):
        assert found["progress"][key] == pytest.approx(expected["progress"][key]), key
    for ours, theirs in zip(found["steps"], expected["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-7)


def test_every_objective_has_a_gradient_of_its_own_so_that_equal_means_something(trainers: Stack) -> None:
    alone = seen(trainers, 1)
    for name in ("sequence", "entropy", "masked", "trainer_scores", *(("dapo", "cispo", "rloo") if ALL else ())):
        assert difference(alone.gradients(name), alone.gradients("grpo")) > 1e-3, name


def test_every_rank_keeps_its_part_of_the_activations_alone(trainers: Stack) -> None:
    """Bytes that the forward of one long row keeps for its backward, parameters aside."""
    (whole,) = seen(trainers, 1).ranks[0]["kept"]
    for halves, quarters in (rank["kept"] for rank in seen(trainers, RANKS).ranks):
        assert 0.45 < halves / whole <= 0.6
        assert 0.2 < quarters / whole <= 0.4  # keys and values of 2 heads are on 4 ranks


# ---- whole runs

STEPS = 10
# with the log-probs of a reference, values and score norms: every forward there is
SECTIONS: dict[str, Any] = {
    "reference": {"on": "trainer"},
    "algorithm": GROUP_PPO["algorithm"] | {"num_iterations": 2, "kl_in_reward": False},
    "critic": {"learning_rate": 2e-3},
}


def train(trainers: Stack, name: str, sp_size: int, armed: dict[int, str]) -> Life:
    """On as many ranks as share a row. armed: TANDEM_FAILPOINT by rank. It resumes if the run has a checkpoint."""
    environment = {rank: {"TANDEM_FAILPOINT": point} for rank, point in armed.items()}
    run = {"resume": bool(steps_saved(trainers.folder / name))}
    trainer = {"max_steps": STEPS, "save_steps": 1, "save_limit": STEPS, "sequence_parallel_size": sp_size}
    return trainers.run(name, sp_size, 2, environment, run=run, trainer=trainer, **SECTIONS)


def test_a_run_whose_rows_two_ranks_share_ends_as_that_of_one_and_resumes_exactly(trainers: Stack) -> None:
    runs = [trainers.folder / name for name in ("shared-by-one", "shared-straight", "shared-broken")]
    for run, sp_size in zip(runs, (1, 2), strict=False):
        life = train(trainers, run.name, sp_size, {})
        assert life.codes == [0] * sp_size, life.logs[0][-3000:]
    for armed in ({1: "trainer.micro_batch:6:kill"}, {0: "checkpoint.committed:2:kill"}, {}):
        life = train(trainers, runs[2].name, 2, armed)
        assert (-signal.SIGKILL in life.codes) == bool(armed), f"{armed}: {life.codes}\n{life.logs[0][-3000:]}"
    alone, straight, broken = (load_file(run / "final" / "model.safetensors") for run in runs)
    assert difference(straight, alone) < 1e-5  # Adam divides each gradient by its own size
    assert broken.keys() == straight.keys() and all(broken[name].equal(straight[name]) for name in broken)
    for step in steps_saved(runs[1]):
        trees = [sha256_of_tree(step_dir(run / "checkpoints", step)) for run in runs[1:]]
        assert trees[0] == trees[1], f"step {step}"
    assert history(runs[1] / "metrics.jsonl") == history(runs[2] / "metrics.jsonl")

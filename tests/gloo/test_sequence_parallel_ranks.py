"""Rows, or layers, shared by 2 and by 4 DeepSpeed ranks: the gradient and the numbers of one, for every objective."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common.types import Group
from model.packing import pack
from tests.gloo.test_exact_resume import EVERY_FORWARD, TWO_KILLS, require_exact_resume, train
from tests.support.gloo_data import BETA, CONSTANT_RATE, DEAD, GAE, GROUP_PPO, REWARDS, VARIANTS, Item, Stream
from tests.support.rank import Case, Worker
from tests.support.replay_worker import RankReports, Trainers
from tests.support.tier import ALL
from tests.support.tiny import VOCAB_SIZE, bytes_kept, difference, in_forks, random_group, tiny_model

pytestmark = pytest.mark.timeout(600)

LONGEST = 64  # tokens of a completion
SLOWLY = {"trainer": {"learning_rate": 1e-6, "max_steps": 4}}  # where a second step must start from the same weights
Layout = tuple[str, int, int]  # ranks share rows or layers, how many, ZeRO stage


def group(group_id: int, beta: float = BETA) -> Group:
    """Some 130 tokens: products of a few rows are rounded otherwise, by more than is allowed here."""
    return random_group(group_id, VOCAB_SIZE, REWARDS[group_id % len(REWARDS)], beta=beta, longest=LONGEST)


def bare(group_id: int) -> Item:
    """For a reference that the trainer scores."""
    return group(group_id, beta=0.0)


def forked(group_id: int) -> Item:
    """Their histories were rewritten."""
    return in_forks(group(group_id))


def uneven(group_id: int) -> Item:
    """Only the first group has work; of 2 data-parallel ranks one has nothing."""
    return random_group(group_id, VOCAB_SIZE, DEAD, longest=LONGEST) if group_id else group(0)


def with_sets(made: Group) -> Group:
    """The same group from a sampler with top_k: each token was one of three, the rest of K filled with −1."""
    rollouts = []
    for r in made.rollouts:
        near = [(r.completion_ids + step) % VOCAB_SIZE for step in (0, 1, 2)]
        sets = np.stack([*near, np.full_like(r.completion_ids, -1)], 1)
        rollouts.append(replace(r, sampling_mask=sets.astype(np.int32)))
    return replace(made, rollouts=tuple(rollouts))


def masked(group_id: int) -> Item:
    return with_sets(group(group_id))


def algorithm(**settings: Any) -> dict[str, Any]:
    return {"algorithm": settings}


EXACT = GROUP_PPO["algorithm"] | {"group_params": {"score": "exact", "segment_loss": "segment"}}
LORA = {"lora": {"r": 4, "alpha": 8}}
CASES: dict[str, tuple[Stream, dict[str, Any]]] = {
    "grpo": (group, {}),
    "forked": (forked, {}),
    "sequence": (group, VARIANTS["sequence"]),
    "entropy": (group, VARIANTS["entropy"]),
    "group_ppo": (group, GROUP_PPO),
    "exact": (group, GAE | algorithm(**EXACT)),
    "uneven": (uneven, algorithm(beta=0.0)),
    "uneven_critic": (uneven, GAE | algorithm(beta=0.0, adv_estimator="gae")),
    "masked": (masked, algorithm(entropy_coef=0.1)),
    "twice": (group, algorithm(num_iterations=2, vllm_importance_sampling_mode="sequence_mask") | SLOWLY),
    "pairs": (group, {"trainer": {"groups_per_micro_batch": 2}}),
    "recomputed": (group, VARIANTS["recomputed"]),
    "trainer_scores": (bare, {"reference": {"on": "trainer", "path": "reference"}}),
    "lora_scores": (bare, LORA | {"reference": {"on": "trainer"}}),
}
RANKS = 4
KEPT = (2, 4)
# dp_size is 2 or 1. An objective sees the whole row in all of them
LAYOUTS: dict[Layout, list[str]] = {("sequence", 2, 1): list(CASES)}
LAYOUTS["tensor", 2, 1] = ["grpo", "exact", "masked", "recomputed", "trainer_scores", "lora_scores"]
LAYOUTS["tensor", 2, 3] = ["uneven_critic", "trainer_scores", "lora_scores"]
LAYOUTS["tensor", 2, 0] = ["uneven"]
if ALL:
    few = ["sequence", "exact", "uneven_critic"]
    for layout in (("sequence", 2, 0), ("sequence", 2, 3), ("sequence", 4, 1), ("sequence", 4, 3), ("tensor", 2, 2)):
        LAYOUTS[layout] = few
    LAYOUTS["tensor", 2, 3] += ["sequence", "exact"]


def case_of(name: str, layout: Layout) -> Case:
    stream, sections = CASES[name]
    kind, size, stage = layout
    trainer = CONSTANT_RATE | {"max_grad_norm": 1e9, f"{kind}_parallel_size": size} | sections.get("trainer", {})
    more = {"trainer": trainer, "sampler": {"max_completion_length": LONGEST}}
    return Case(f"{name}-{kind[0]}p{size}-zero{stage}", stage, stream, sections | more)


ALONE = ("sequence", 1, 1)


def work(folder: Path) -> None:
    worker = Worker(folder)
    shares = worker.collectives.world_size > 1
    for layout, names in LAYOUTS.items() if shares else [(ALONE, CASES)]:
        for name in names:
            worker.one_batch(case_of(name, layout))
    worker.seen["kept"] = [kept(worker, sp_size) for sp_size in (KEPT if shares else (1,))]
    worker.tell()


def kept(worker: Worker, sp_size: int) -> int:
    """Bytes that autograd keeps of the forward of a prompt of 64 tokens and 4 completions of 240."""
    from model.logprobs import load_causal_lm, score_terms
    from model.sequence_parallel import shard

    model = load_causal_lm(str(worker.folder / "model"), "float32", None, False)
    prompt, *completions = np.random.default_rng(0).integers(0, VOCAB_SIZE, (5, 240)).tolist()
    row = pack([(prompt[:64], completions)])
    shares, scored = worker.sharing(sp_size).sequence_group, list[torch.Tensor]()
    found = bytes_kept(model, lambda: scored.append(score_terms(model, shard(row, shares), 1.0, 32)[0]))
    assert len(scored[0]) == 4 * 240
    return found


@cache
def seen(trainers: Trainers, ranks: int) -> RankReports:
    """A model of 4 heads, and 2 of keys, with an output head of its own."""
    from transformers import AutoModelForCausalLM

    folder = trainers.folder / f"shared-{ranks}"
    tiny_model(folder / "model", hidden=128, vocab=VOCAB_SIZE)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(0.9 * model.get_input_embeddings().weight.roll(1, 0))
    model.save_pretrained(folder / "model")
    tiny_model(folder / "reference", hidden=128, layers=1, vocab=VOCAB_SIZE)
    (folder / "critic").symlink_to(folder / "reference")
    return trainers.seen(__name__, folder.name, ranks)


@pytest.mark.parametrize(
    ("layout", "name"),
    [pytest.param(layout, name, id=case_of(name, layout).name) for layout, names in LAYOUTS.items() for name in names],
)
def test_rows_shared_by_ranks_give_the_gradient_of_one_rank(trainers: Trainers, layout: Layout, name: str) -> None:
    alone, several = seen(trainers, 1), seen(trainers, RANKS)
    one, shared = case_of(name, ALONE), case_of(name, layout)
    gradient = several.gradients(shared.name)
    # Adam's first step divides an entry's rounding by the entry
    bound = 5e-6 if layout[0] == "tensor" else 2e-6 if name == "twice" else 1e-6
    assert difference(gradient, alone.gradients(one.name)) < bound
    assert any("value_gradient" in key for key in gradient) == ("critic" in shared.sections)
    found, expected = several.ranks[0][shared.name], alone.ranks[0][one.name]
    assert all(rank[shared.name] == found for rank in several.ranks)
    for key in ("step", "batch", "cursor", "num_tokens", "threshold"):
        assert found["run_state"][key] == pytest.approx(expected["run_state"][key]), key
    for ours, theirs in zip(found["steps"], expected["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-7)


def test_every_rank_keeps_its_part_of_the_activations_alone(trainers: Trainers) -> None:
    """Bytes that the forward of one long row keeps for its backward, parameters aside."""
    (whole,) = seen(trainers, 1).ranks[0]["kept"]
    for halves, quarters in (rank["kept"] for rank in seen(trainers, RANKS).ranks):
        assert 0.45 < halves / whole <= 0.6
        assert 0.2 < quarters / whole <= 0.4  # keys and values of 2 heads are on 4 ranks


def test_a_run_whose_rows_two_ranks_share_ends_as_that_of_one_and_resumes_exactly(trainers: Trainers) -> None:
    one, two = (1, 2, "float32"), (2, 2, "float32")
    shared = EVERY_FORWARD | {"trainer": {"sequence_parallel_size": 2}}
    found = require_exact_resume(trainers, "shared", two, TWO_KILLS, **shared)
    assert train(trainers, "shared-by-one", one, {}, **EVERY_FORWARD).codes == [0]
    ours, alone = (load_file(run / "final" / "model.safetensors") for run in (found, trainers.folder / "shared-by-one"))
    assert difference(ours, alone) < 1e-5  # Adam divides each gradient by its own size

"""Experts that the rows of one rank use and those of another do not: two DeepSpeed ranks train as one does."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.gloo_data import CONSTANT_RATE, Item, group, settings
from tests.support.gloo_worker import fail_once
from tests.support.rank import Worker, master_weights, run_hash
from tests.support.replay_worker import RankReports, Trainers
from tests.support.tier import ALL
from tests.support.tiny import difference

NUM_EXPERTS = 24  # of a layer, more than a rank's tokens use in a step
NUM_STEPS = 3
# ranks would send gradients of a bfloat16 model in 8 bits, and one rank sends none
EXACT = {"communication_data_type": "fp32"}
HALF: dict[str, Any] = {"model": {"dtype": "bfloat16"}, "deepspeed": EXACT}
LORA = {"lora": {"r": 4, "alpha": 12}}
CRITIC = {"algorithm": {"adv_estimator": "gae"}}
CLIPPED = {"trainer": {"max_grad_norm": 0.01}}  # far below every step's norm
# one rank's memory runs out in a step of several micro-batches, and the step begins again with smaller ones
MEMORY = {"trainer": {"max_tokens_per_micro_batch": 60}, "algorithm": {"loss_type": "dapo"}}
OFFLOADED = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
# ZeRO stage and settings of each run, by name
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "clipped-0": (0, CLIPPED),
    "clipped-1": (1, CLIPPED),
    "clipped-half-1": (1, HALF | CLIPPED),
    "critic-1": (1, CRITIC),
    "adapters-half-1": (1, HALF | LORA),
    "memory-half-1": (1, HALF | MEMORY),
}
if ALL:
    CASES |= {
        "plain-0": (0, {}),
        "plain-1": (1, {}),
        "plain-half-1": (1, HALF),
        "critic-0": (0, CRITIC),
        "critic-half-1": (1, HALF | CRITIC),
        "adapters-1": (1, LORA),
        "memory-0": (0, MEMORY),
        "offloaded-1": (1, {"deepspeed": OFFLOADED}),
        "offloaded-half-1": (1, HALF | {"deepspeed": EXACT | OFFLOADED}),
    }


class Experts(torch.nn.Module):
    """Experts one by one, as code from the Hub may have them: a token takes one, and the others have no gradient."""

    def __init__(self, mlp: Any):
        super().__init__()
        weight = mlp.gate_proj.weight
        self.gate = torch.nn.Linear(weight.shape[1], NUM_EXPERTS, bias=False, dtype=weight.dtype)
        self.experts = torch.nn.ModuleList(copy.deepcopy(mlp) for _ in range(NUM_EXPERTS))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        self.used: list[list[int]] = []  # experts of each forward with gradient

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)
        weights, experts = self.gate(tokens).float().softmax(-1).max(-1)
        output = torch.zeros_like(tokens)
        used = experts.unique().tolist()
        for expert in used:
            [places] = (experts == expert).nonzero(as_tuple=True)
            weighted = weights[places, None].to(tokens.dtype) * self.experts[expert](tokens[places])
            output = output.index_add(0, places, weighted)
        if torch.is_grad_enabled():
            self.used.append(used)
        return output.view_as(hidden)


def with_experts(load: Any) -> Any:
    """`load_model` of a model whose layers have single experts in place of their MLP."""

    def loaded(*given: Any, **options: Any) -> Any:
        model, missing = load(*given, **options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for layer in model.base_model.layers:
                layer.mlp = Experts(layer.mlp)
        return model, missing

    return loaded


def experts_of(model: Any) -> dict[str, Experts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Experts)}


def stream(group_id: int) -> Item:
    return group(group_id, beta=0.0)


def work(folder: Path) -> None:
    """What each rank does: three steps of each case."""
    from trainer.engine import critic, policy

    worker = Worker(folder)
    for module in (policy, critic):
        mock.patch.object(module, "load_model", with_experts(module.load_model)).start()
    for name, (stage, sections) in CASES.items():
        train(worker, name, stage, sections)
    worker.tell()


def train(worker: Worker, name: str, stage: int, sections: dict[str, Any]) -> None:
    chosen = sections | {
        "trainer": CONSTANT_RATE | sections.get("trainer", {}),
        "algorithm": {"beta": 0.0} | sections.get("algorithm", {}),
    }
    trainer = worker.trainer(settings(worker.folder, name, stage, **chosen), stream)
    if name.startswith("memory") and worker.collectives.rank == worker.collectives.world_size - 1:
        fail_once(trainer.engine)
    layers = experts_of(trainer.engine.model)
    used = []
    for _ in range(NUM_STEPS):
        trainer.train_batch()
        used.append({layer: list(experts.used) for layer, experts in layers.items()})
        for experts in layers.values():
            experts.used.clear()
    for prefix, model in (("", trainer.engine), ("value_", trainer.critic)):
        if model:
            worker.write(f"{name}/{prefix}weights", master_weights(model))
    worker.tell_steps(name, trainer, used=used, hash=run_hash(trainer))


@cache
def seen(trainers: Trainers, ranks: int) -> RankReports:
    return trainers.seen_anew(__name__, "unused", ranks)


def weights(of: RankReports, name: str) -> dict[str, Tensor]:
    """Of the policy and, under their own names, of the critic."""
    files = sorted((of.folder / name).glob("*weights.safetensors"))
    return {f"{file.stem}/{key}": t for file in files for key, t in of.tensors(f"{name}/{file.stem}").items()}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_of_which_each_uses_other_experts_train_as_one_rank_does(trainers: Trainers, name: str) -> None:
    one, two = seen(trainers, 1), seen(trainers, 2)
    found, expected = weights(two, name), weights(one, name)
    assert any("experts" in key for key in found)
    assert difference(found, expected) < 1e-5
    for ours, theirs in zip(two.ranks[0][name]["steps"], one.ranks[0][name]["steps"], strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    [first, second] = two.ranks
    assert first[name]["hash"] == second[name]["hash"], "the ranks' models differ"
    assert first[name]["steps"] == second[name]["steps"]


def test_the_rows_of_these_steps_leave_experts_unused_in_every_way(trainers: Trainers) -> None:
    """By one rank, by both after a step in which one used them, and by a rank's first micro-batch alone."""
    of_one, of_both, of_first = 0, 0, 0
    ranks = [rank["clipped-1"]["used"] for rank in seen(trainers, 2).ranks]  # by step, layer and micro-batch
    for layer in ranks[0][0]:
        before: set[int] = set()
        for step in range(NUM_STEPS):
            rows = [rank[step][layer] for rank in ranks]
            assert [len(of_rank) for of_rank in rows] == [2, 2]
            first, second = (set().union(*of_rank) for of_rank in rows)
            of_one += len(first ^ second)
            of_both += len(before - first - second)
            of_first += len(set(rows[0][1]) - set(rows[0][0]))
            before = first | second
    assert min(of_one, of_both, of_first) > 0

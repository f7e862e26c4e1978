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
from tests.support.rank import Worker, run_hash
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
        "plain-1": (1, {}),
        "critic-0": (0, CRITIC),
        "adapters-1": (1, LORA),
        "memory-0": (0, MEMORY),
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
        self.used: set[int] = set()  # experts of any forward with gradient

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)
        weights, experts = self.gate(tokens).float().softmax(-1).max(-1)
        output = torch.zeros_like(tokens)
        used = experts.unique().tolist()
        for expert in used:
            shares = weights * (experts == expert)
            output = output + shares[:, None].to(tokens.dtype) * self.experts[expert](tokens)
        if torch.is_grad_enabled():
            self.used |= {*used}
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
    trainer.train_batch()
    used = [sorted(module.used) for module in trainer.engine.model.modules() if isinstance(module, Experts)]
    for _ in range(1, NUM_STEPS):
        trainer.train_batch()
    worker.write_models(name, "weights", trainer)
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
    [first, second] = [rank[name] for rank in two.ranks]
    assert first["hash"] == second["hash"], "the ranks' models differ"
    assert first["steps"] == second["steps"]
    assert first["used"] != second["used"], "in the first step each rank's rows meet other experts"

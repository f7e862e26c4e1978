"""What a rank of test_sequence_parallel_ranks.py does: a batch of every case, its rows whole or shared."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.types import Group, Rollout
from model.packing import pack
from tests.support.gloo_data import BETA, CONSTANT_RATE, DEAD, GAE, GROUP_PPO, REWARDS, VARIANTS, Item, Stream, settings
from tests.support.rank import Worker
from tests.support.tier import ALL
from tests.support.tiny import VOCAB_SIZE, bytes_kept, random_group

LONGEST = 64  # tokens of a completion
SLOWLY = {"trainer": {"learning_rate": 1e-6, "max_steps": 4}}  # where a second step must start from the same weights


def group(group_id: int, beta: float = BETA) -> Group:
    """Some 130 tokens: products of a few rows are rounded otherwise, by more than is allowed here."""
    return random_group(group_id, VOCAB_SIZE, REWARDS[group_id % len(REWARDS)], beta=beta, longest=LONGEST)


def uneven(group_id: int) -> Item:
    """Only the first group has work; of 2 data-parallel ranks one has nothing."""
    return random_group(group_id, VOCAB_SIZE, DEAD, longest=LONGEST) if group_id else group(0)


@dataclass(frozen=True)
class Case:
    name: str
    stream: Stream = group
    sections: dict[str, Any] = field(default_factory=dict)


def masked(group_id: int) -> Item:
    """As `group`, from a sampler with top_k: each token was one of three, the rest of K filled with −1."""
    made = group(group_id)
    rng = np.random.default_rng(1000 + group_id)

    def with_mask(r: Rollout) -> Rollout:
        others = rng.integers(0, VOCAB_SIZE, (len(r.completion_ids), 2))
        sets = np.column_stack([r.completion_ids, others, np.full(len(r.completion_ids), -1)])
        distinct = [np.unique(row[:-1]) for row in sets]
        padded = np.stack([np.pad(ids, (0, 4 - len(ids)), constant_values=-1) for ids in distinct])
        return replace(r, sampling_mask=padded.astype(np.int32))

    return replace(made, rollouts=tuple(map(with_mask, made.rollouts)))


def _algorithm(**settings: Any) -> dict[str, Any]:
    return {"algorithm": settings}


EXACT = GAE | _algorithm(**GROUP_PPO["algorithm"] | {"group_params": {"score": "exact", "segment_loss": "segment"}})
LORA = {"lora": {"r": 4, "alpha": 8}}
TWICE = {"num_iterations": 2, "vllm_importance_sampling_mode": "sequence_mask"}
LATER = {"steps_per_generation": 2, "vllm_importance_sampling_mode": "token_truncate"}
CASES = [
    Case("grpo"),
    Case("sequence", sections=VARIANTS["sequence"]),
    Case("entropy", sections=VARIANTS["entropy"]),
    Case("group_ppo", sections=GROUP_PPO),
    Case("exact", sections=EXACT),
    Case("uneven", uneven, _algorithm(beta=0.0)),
    Case("uneven_critic", uneven, GAE | _algorithm(beta=0.0, adv_estimator="gae")),
    Case("masked", masked, _algorithm(entropy_coef=0.1)),
    Case("twice", sections=_algorithm(**TWICE) | SLOWLY),
    Case("later", sections=_algorithm(**LATER) | SLOWLY),
    Case("flat", sections={"trainer": {"packing": "flat", "groups_per_micro_batch": 2}}),
    Case("recomputed", sections={"model": {"gradient_checkpointing": True}, "trainer": {"groups_per_micro_batch": 2}}),
    Case("trainer_scores", lambda g: group(g, beta=0.0), {"reference": {"on": "trainer", "path": "reference"}}),
    Case("lora_scores", lambda g: group(g, beta=0.0), LORA | {"reference": {"on": "trainer"}}),
]
RANKS = 4
KEPT = (2, 4)
# (sp_size, ZeRO stage); dp_size is 2 or 1. An objective sees the whole row in all of them
LAYOUTS = {(2, 1): CASES}
if ALL:
    few = [case for case in CASES if case.name in ("sequence", "exact", "uneven_critic")]
    CASES += [Case(name, sections=VARIANTS[name]) for name in ("dapo", "dr_grpo", "cispo", "own")]
    CASES += [
        Case(name, sections=_algorithm(adv_estimator=name, kl_in_reward=True))
        for name in ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    ]
    CASES += [
        Case("bnpo", sections=_algorithm(loss_type="bnpo", delta=1.5, kl_estimator="k1")),
        Case("gae", sections=GAE),
        Case("lora", sections=LORA | {"model": {"gradient_checkpointing": True}}),
    ]
    LAYOUTS |= {(4, 3): CASES} | dict.fromkeys(((2, 0), (2, 3), (4, 1), (4, 2)), few)


class SequenceWorker(Worker):
    @cache  # noqa: B019 process groups are made once
    def sharing(self, sp_size: int) -> Any:
        """The exchange among ranks of which so many share a row."""
        from trainer.engine.ranks import connect

        return connect(settings(self.folder, "start", 1, trainer={"sequence_parallel_size": sp_size}))

    def step(self, name: str, case: Case, sp_size: int, stage: int) -> None:
        self.exchange = self.sharing(sp_size)
        sections = {"trainer": {}, "reference": {}, "sampler": {"max_completion_length": LONGEST}} | case.sections
        trainer = CONSTANT_RATE | {"max_grad_norm": 1e9, "sequence_parallel_size": sp_size} | sections["trainer"]
        if "path" in sections["reference"]:
            sections["reference"] = sections["reference"] | {"path": str(self.folder / "reference")}
        config = settings(self.folder, name, stage, **sections | {"trainer": trainer})
        trainer = self.trainer(config, case.stream)
        if config.reference_on == "trainer":
            models = trainer.batch._models
            trainer.batch._models = replace(models, reference=self.reference(config, trainer.engine))
        trainer.train_batch()
        self.write_models(name, "gradient", trainer)
        self.tell_steps(name, trainer)

    def reference(self, config: Any, engine: Any) -> Any:
        """As trainer/start.py makes it."""
        from model.reference import Reference

        policy = engine.model if config.reference_is_base and engine.stage < 3 else None
        return Reference(config, torch.device("cpu"), policy, self.exchange.sequence_group)

    def kept(self, sp_size: int) -> int:
        """Bytes that autograd keeps of the forward of a prompt of 64 tokens and 4 completions of 240."""
        from model.logprobs import load_causal_lm, score_terms
        from model.sequence_parallel import shard

        model = load_causal_lm(str(self.folder / "model"), "float32", None, False)
        rng = np.random.default_rng(0)
        tokens = lambda n: rng.integers(0, VOCAB_SIZE, n).tolist()  # noqa: E731
        row = pack([(tokens(64), [tokens(240) for _ in range(4)])])
        group, scored = self.sharing(sp_size).sequence_group, list[torch.Tensor]()
        kept = bytes_kept(model, lambda: scored.append(score_terms(model, shard(row, group), 1.0, 32)[0]))
        assert len(scored[0]) == 4 * 240
        return kept


def work(folder: Path) -> None:
    worker = SequenceWorker(folder)
    shares = worker.exchange.world_size > 1
    for (sp_size, stage), cases in LAYOUTS.items() if shares else [((1, 1), CASES)]:
        for case in cases:
            name = f"{case.name}-sp{sp_size}-zero{stage}" if sp_size > 1 else case.name
            worker.step(name, case, sp_size, stage)
    worker.seen["kept"] = [worker.kept(sp_size) for sp_size in (KEPT if shares else (1,))]
    worker.tell()

"""What a rank of test_gloo.py does: every scenario for the stages of ZeRO, and then everything from its checkpoints."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import PeerEnded, UserError
from model.cpu.cores import LENT_CORES
from tests.support.gloo_data import (
    CONSTANT_RATE,
    GAE,
    GROUP_PPO,
    HALF_STAGES,
    LAYOUTS,
    MANY,
    MICRO_BATCHES,
    REFERENCE_TWICE,
    REFERENCES,
    STAGES,
    SUMS,
    VARIANTS,
    WHOLE_LAYOUTS,
    Item,
    Stream,
    dead,
    enormous,
    group,
    group_ppo,
    half_dead,
    infinite_loss,
    poisoned,
    settings,
    uneven,
)
from tests.support.rank import Worker, master_weights, run_hash, state_hash


class GlooWorker(Worker):
    def lent_cores(self) -> None:
        """To all ranks, or as far as rank 0 alone was told: it decides for all."""
        for name, stage, ranks in (("lent", 1, range(self.exchange.world_size)), ("lent3", 3, range(1))):
            if self.exchange.rank in ranks:
                os.environ[LENT_CORES] = "0,1"
            self.one_batch(name, stage, group, trainer={"max_staleness": 1})
            os.environ.pop(LENT_CORES, None)

    def references(self) -> None:
        """The same groups: scored before they come, and scored here at every stage."""
        from model.reference import Reference

        where = {"reference": {"path": str(self.folder / "reference")}}
        here = {"reference": where["reference"] | {"on": "trainer"}}
        scorer = Reference(settings(self.folder, "scorer", 1, **where), torch.device("cpu"))
        calls: list[int] = []

        def scored(group_id: int) -> Item:
            bare = group(group_id, beta=0.0)
            refs = scorer.logprobs(bare.prompt_ids, [r.completion_ids for r in bare.rollouts])
            pairs = zip(bare.rollouts, refs, strict=True)
            return dataclasses.replace(bare, rollouts=tuple(dataclasses.replace(r, ref_logprobs=x) for r, x in pairs))

        def counted(row: Any) -> Tensor:
            calls.append(len(row.lengths))
            return scorer_score(row)

        for name, sections in (("", {}), ("_twice", REFERENCE_TWICE)):
            self.one_batch(f"sampler_scores{name}", 1, scored, **where, **sections)
        scorer_score, scorer.score = scorer.score, counted
        stream = lambda g: group(g, beta=0.0)  # noqa: E731
        for stage in STAGES:
            if (self.exchange.world_size, stage) in WHOLE_LAYOUTS:
                self.one_batch(f"trainer_scores{stage}", stage, stream, scorer, **here, **REFERENCES[stage])
        calls.clear()
        self.one_batch("trainer_scores_twice", 1, stream, scorer, **here, **REFERENCE_TWICE)
        self.seen["trainer_scores_twice"]["calls"] = len(calls)

    def skip(self, stage: int, name: str, stream: Stream, dtype: str = "float32", **sections: dict[str, Any]) -> None:
        """A step that is not finite, then a good one; and the good one alone."""
        sections = {"model": {"dtype": dtype}, "trainer": CONSTANT_RATE} | sections
        config = settings(self.folder, f"{name}{stage}", stage, **sections)
        trainer = self.trainer(config, stream)
        hashes = [run_hash(trainer, has_moments=False)]
        trainer.train_batch()
        hashes.append(run_hash(trainer, has_moments=False))
        trainer.train_batch()
        hashes.append(run_hash(trainer))
        alone = self.trainer(config, group)
        alone.train_batch()
        self.tell_steps(f"{name}{stage}", trainer, hashes=hashes, alone=run_hash(alone))

    def begin(self, stage: int) -> None:
        """bfloat16, before the first step: what the optimizer steps, and the model."""
        name = f"begin{stage}"
        engine = self.trainer(settings(self.folder, name, stage, model={"dtype": "bfloat16"}), group).engine
        self.write(f"{name}/masters", master_weights(engine))
        self.write(f"{name}/model", dict(engine.full_parameters(lambda _: True)))

    def half(self, stage: int, kind: str = "half", **sections: dict[str, Any]) -> None:
        """bfloat16: a checkpoint after the first of two steps."""
        name = f"{kind}{stage}"
        trainer = self.trainer(settings(self.folder, name, stage, model={"dtype": "bfloat16"}, **sections), group)
        hashes = []
        for _ in range(2):
            trainer.train_batch()
            hashes.append(run_hash(trainer))
            if len(hashes) == 1:
                trainer.saver.save_if_due(trainer.progress)
        self.tell_steps(name, trainer, hashes=hashes)

    def accumulate(self, stage: int, accumulation: str) -> None:
        """bfloat16: the gradient of the same 32 groups in 1, 4 and 16 micro-batches per rank."""
        deepspeed = {"zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": accumulation}}
        for count in MICRO_BATCHES:
            at_once = 32 // (self.exchange.world_size * count)
            trainer = {"prompts_per_step": 32, "groups_per_micro_batch": at_once, "logprob_chunk_size": 1024}
            name = f"sum_{accumulation}_{stage}_{count}"
            self.one_batch(name, 1, group, model={"dtype": "bfloat16"}, trainer=trainer, deepspeed=deepspeed)

    def warm_up(self) -> None:
        """Two batches of two updates; in the first three updates only the critic learns."""
        sections = {
            "algorithm": GAE["algorithm"] | {"num_iterations": 2},
            "critic": GAE["critic"] | {"critic_warmup_steps": 3},
            "trainer": CONSTANT_RATE | {"max_steps": 4},
            "data": {"eval": "unused.jsonl"},
            "eval": {"steps": 1},
        }
        trainer = self.trainer(settings(self.folder, "warm_up", 1, **sections), group)
        hashes = [[state_hash(m, has_moments=False) for m in (trainer.engine, trainer.critic)]]
        due = []
        for _ in range(2):
            trainer.publish(evaluate=False)
            trainer.train_batch()
            due.append(trainer._evaluates_now())
            hashes.append([state_hash(m, has_moments=False) for m in (trainer.engine, trainer.critic)])
        self.tell_steps("warm_up", trainer, hashes=hashes, due=due)

    def end(self) -> None:
        """Rank 0 finds that the user must change something while the others wait for groups."""

        def stream(group_id: int) -> Item:
            raise UserError(f"group {group_id}: the rewards file is gone")

        try:
            self.trainer(settings(self.folder, "end", 1), stream).train_batch()
        except (UserError, PeerEnded) as error:
            self.seen["ended"] = [type(error).__name__, getattr(error, "exit_code", None)]

    def at_stage(self, stage: int) -> None:
        """What depends on it."""
        self.train(f"train{stage}", stage)
        if (self.exchange.world_size, stage) not in WHOLE_LAYOUTS:
            return
        no_kl = {"algorithm": {"beta": 0.0}}
        self.begin(stage)
        self.one_batch(f"uneven{stage}", stage, uneven, **no_kl)
        self.one_batch(f"dead{stage}", stage, dead, **no_kl)
        self.skip(stage, "nan", poisoned)
        self.skip(stage, "inf", infinite_loss)
        self.train(f"critic{stage}", stage, **GAE)
        self.skip(stage, "critic_inf", infinite_loss, algorithm={"adv_estimator": "gae"})
        self.skip(stage, "value_inf", enormous, **GAE)
        if stage in (0, 1):
            self.skip(stage, "nan_half", poisoned, "bfloat16")

    def at_one_stage(self) -> None:
        """What does not, at the default one of several ranks; and what gathers under ZeRO-3."""
        without_kl = {"algorithm": {"beta": 0.0, "adv_estimator": "gae"}}
        for stage in (1, 3):
            self.one_batch(f"critic_uneven{stage}", stage, uneven, **without_kl)
        self.half(1, "critic_half", **GAE)
        self.skip(1, "critic_nan_half", poisoned, "bfloat16", **GAE)
        self.warm_up()
        self.train("segments1", 1, **GROUP_PPO)
        self.one_batch("gae", 1, group, **GAE)
        self.one_batch("size_1", 1, group, **group_ppo(group_max_size=1))
        self.one_batch("literal", 1, group, **group_ppo(segment_rule="literal", threshold_lr=0.0))
        for name, sections in VARIANTS.items():
            self.one_batch(name, 1, group, **sections)
        self.lent_cores()
        for handling in ("skip", "resample"):
            self.one_batch(handling, 1, half_dead, algorithm={"dead_groups": handling})
        self.one_batch("all_dead", 1, dead, algorithm={"dead_groups": "resample", "beta": 0.0})
        for stage in HALF_STAGES:
            self.half(stage)
        for stage, accumulation in SUMS:
            self.accumulate(stage, accumulation)


def first(folder: Path) -> None:
    worker = GlooWorker(folder)
    ranks = worker.exchange.world_size
    for stage in [stage for of, stage in LAYOUTS if of == ranks]:
        worker.at_stage(stage)
    exact = {"score": "exact", "segment_loss": "segment"}
    algorithm = {"beta": 0.0, "adv_estimator": "group_ppo", "group_params": exact}
    worker.one_batch("exact3", 3, uneven, algorithm=algorithm)
    if ranks in MANY:
        worker.at_one_stage()
        worker.references()
        worker.end()
    worker.tell()


def resume(folder: Path) -> None:
    worker = GlooWorker(folder)
    ranks, flags = worker.exchange.world_size, watch_loading()
    for stage in [stage for of, stage in LAYOUTS if of == ranks]:
        worker.resume(f"train{stage}", stage)
        if (ranks, stage) in WHOLE_LAYOUTS:
            worker.resume(f"critic{stage}", stage, **GAE)
    if ranks in MANY:
        half = {"model": {"dtype": "bfloat16"}}
        worker.resume("segments1", 1, **GROUP_PPO)
        worker.resume("critic_half1", 1, **half, **GAE)
        for stage in HALF_STAGES:
            worker.resume(f"half{stage}", stage, **half)
    worker.seen["weights_only"] = flags
    worker.tell()


def watch_loading() -> list[Any]:
    """From now on, the `weights_only` of every torch.load."""
    flags: list[Any] = []
    load = torch.load

    def watched(*arguments: Any, **options: Any) -> Any:
        flags.append(options.get("weights_only"))
        return load(*arguments, **options)

    torch.load = watched
    return flags

"""Runs the trainer's engine and loop on hand-made groups, under the real `deepspeed` launcher over gloo.

    deepspeed --num_gpus 2 --module tests.support.gloo_worker <folder> first | resume

One start runs every scenario for every ZeRO stage, because a start costs ten seconds and a scenario half of one. The
samplers are replaced by one that hands out groups at once; all else is the real thing. Every rank writes what it
saw to <folder>/rank<r>.json and rank 0 its tensors beside it; test_gloo.py judges them.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from common import exits
from common.config import Config
from common.errors import PeerEnded, UserError
from common.types import Group
from common.wire import Received
from model.cpu.cores import LENT_CORES
from model.tokenizer import load_tokenizer
from tests.support.gloo_data import (
    CONSTANT_RATE,
    GAE,
    GROUP_PPO,
    HALF_STAGES,
    MICRO_BATCHES,
    NUM_STEPS,
    REFERENCE_TWICE,
    REFERENCES,
    STAGES,
    SUMS,
    TURN_STAGES,
    VARIANTS,
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
    turns,
    uneven,
)
from tests.support.protocol_helpers import received
from trainer.link.source import Statistics

HANGS_AFTER_S = 120


def rank_zero(stream: Stream) -> Any:
    """What rank 0 has, with groups that are always there and records that nobody keeps."""

    def ignore(*_: Any) -> None:
        return None

    def take(group_ids: Sequence[int]) -> list[Received]:
        items = [stream(g) for g in group_ids]  # some streams repeat an earlier group
        return [
            received(dataclasses.replace(item, group_id=g) if isinstance(item, Group) else item)
            for item, g in zip(items, group_ids, strict=True)
        ]

    source = SimpleNamespace(
        incarnation="feed",
        take=take,
        commit=ignore,
        refill=ignore,
        samplers_rest=lambda: True,
        versions_in_use=list,
        take_statistics=lambda: Statistics({}, 0, {}),
    )
    log = SimpleNamespace(log=ignore, log_samples=ignore, log_eval=ignore, sync=lambda: None)
    display = SimpleNamespace(step=ignore, note=ignore, advice=lambda *_: {})
    return SimpleNamespace(source=source, log=log, display=display, recorder=None, sync=lambda: None)


class Worker:
    def __init__(self, folder: Path):
        from trainer.engine.deepspeed_model import init_distributed
        from trainer.engine.ranks import connect

        config = settings(folder, "start", 1)
        init_distributed(config)
        self.folder = folder
        self.exchange = connect(config)
        self.tokenizer = load_tokenizer(config.model.path)
        self.seen: dict[str, Any] = {}

    def trainer(self, config: Config, stream: Stream, reference: Any = None) -> Any:
        from trainer.engine.critic import Critic
        from trainer.engine.policy import PolicyEngine
        from trainer.save.checkpoint import Progress
        from trainer.start import assemble

        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)  # anew for every run
        where = self.exchange.world_size, self.exchange.sequence_group
        engine = PolicyEngine(config, *where)
        progress = Progress("run", 0, 0, 0, 0, 0, 0, {})
        at = rank_zero(stream) if self.exchange.rank == 0 else None
        critic = Critic(config, *where) if config.algorithm.needs_critic else None
        trainer = assemble(config, engine, self.exchange, self.tokenizer, progress, at, reference, critic)
        trainer.results = []
        advance = trainer._advance

        def record(result: Any, sums: Any, last: bool) -> None:
            values = trainer.actor_critic.metrics() if trainer.actor_critic else {}
            trainer.results.append(
                dataclasses.asdict(result) | {"loss": sums["loss"], "tokens": sums["tokens"]} | values
            )
            advance(result, sums, last)

        trainer._advance = record
        return trainer

    def train(self, stage: int, kind: str = "train", **sections: dict[str, Any]) -> None:
        """Three steps with clipping and a schedule; a checkpoint after each, a published version at the end."""
        name = f"{kind}{stage}"
        trainer = self.trainer(settings(self.folder, name, stage, **sections), group)
        hashes = []
        for step in range(NUM_STEPS):
            trainer.train_batch()
            if step == 0:
                self.write(f"{name}/gradient", moments(trainer.engine, "exp_avg"))
                if trainer.critic:
                    self.write(f"{name}/value_gradient", moments(trainer.critic, "exp_avg"))
            trainer.saver.save_if_due(trainer.progress)
            hashes.append(run_hash(trainer))
        self.write(f"{name}/weights", master_weights(trainer.engine))
        if trainer.critic:
            self.write(f"{name}/value_weights", master_weights(trainer.critic))
        trainer.publish(evaluate=False)
        published = dataclasses.asdict(trainer.publisher.published)
        self.seen[name] = {"steps": trainer.results, "hashes": hashes, "published": published}

    def one_batch(self, name: str, stage: int, stream: Stream, scorer: Any = None, **sections: dict[str, Any]) -> None:
        trainer = self.trainer(settings(self.folder, name, stage, **sections), stream, scorer)
        trainer.train_batch()
        self.write(f"{name}/gradient", moments(trainer.engine, "exp_avg"))
        self.write(f"{name}/weights", master_weights(trainer.engine))
        if trainer.critic:
            self.write(f"{name}/value_gradient", moments(trainer.critic, "exp_avg"))
            self.write(f"{name}/value_weights", master_weights(trainer.critic))
        self.seen[name] = {"steps": trainer.results, "progress": dataclasses.asdict(trainer.progress)}

    def lent_cores(self) -> None:
        """To all ranks, or as far as rank 0 alone was told: it decides for all."""
        for name, stage, ranks in (("lent", 1, range(self.exchange.world_size)), ("lent3", 3, range(1))):
            if self.exchange.rank in ranks:
                os.environ[LENT_CORES] = "0,1"
            self.one_batch(name, stage, group, trainer={"max_staleness": 1})
            os.environ.pop(LENT_CORES, None)

    def variants(self) -> None:
        for name, sections in VARIANTS.items():
            self.one_batch(name, 1, group, **sections)
        for stage in TURN_STAGES:
            self.one_batch(f"turns{stage}", stage, turns)
            self.one_batch(f"turns_critic{stage}", stage, turns, **GAE)
            self.one_batch(f"turns_segments{stage}", stage, turns, **GROUP_PPO)
        self.lent_cores()

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
        for stage, sections in REFERENCES.items():
            stream = lambda g: group(g, beta=0.0)  # noqa: E731
            self.one_batch(f"trainer_scores{stage}", stage, stream, scorer, **here, **sections)
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
        progress = dataclasses.asdict(trainer.progress)
        alone = self.trainer(config, group)
        alone.train_batch()
        self.seen[f"{name}{stage}"] = {
            "steps": trainer.results,
            "hashes": hashes,
            "alone": run_hash(alone),
            "progress": progress,
        }

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
        self.seen[name] = {"steps": trainer.results, "hashes": hashes}

    def accumulate(self, stage: int, accumulation: str) -> None:
        """bfloat16: the gradient of the same 32 groups in 1, 4 and 16 micro-batches per rank."""
        deepspeed = {"zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": accumulation}}
        for count in MICRO_BATCHES:
            at_once = 32 // (self.exchange.world_size * count)
            trainer = {"prompts_per_step": 32, "groups_per_micro_batch": at_once, "logprob_chunk_size": 1024}
            name = f"sum_{accumulation}_{stage}_{count}"
            self.one_batch(name, 1, group, model={"dtype": "bfloat16"}, trainer=trainer, deepspeed=deepspeed)

    def halves(self) -> None:
        """All of bfloat16 but the critic's."""
        for stage in (0, 1):
            self.skip(stage, "nan_half", poisoned, "bfloat16")
        for stage in STAGES:
            self.begin(stage)
        for stage in HALF_STAGES:
            self.half(stage)
        for stage, accumulation in SUMS:
            self.accumulate(stage, accumulation)

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
        progress = dataclasses.asdict(trainer.progress)
        self.seen["warm_up"] = {"steps": trainer.results, "hashes": hashes, "progress": progress, "due": due}

    def resume(self, stage: int, name: str, dtype: str = "float32", **sections: dict[str, Any]) -> None:
        """The newest valid checkpoint of an earlier start, and one more step."""
        from trainer.save import checkpoint, resume

        config = settings(self.folder, f"{name}{stage}", stage, model={"dtype": dtype}, **sections)
        said: list[str] = []
        trainer = self.trainer(config, group)
        before = run_hash(trainer, has_moments=False)
        found = resume.newest_valid(self.folder / f"{name}{stage}" / "checkpoints", said.append)
        assert found is not None
        trainer.progress = resume.read_progress(found, self.exchange.world_size, stage, {})
        checkpoint.restore(trainer.engine, found, trainer.critic)
        hashes = [run_hash(trainer)]
        trainer.train_batch()
        hashes.append(run_hash(trainer))
        trainer.saver.save_if_due(trainer.progress)
        self.seen[f"{name}{stage}"] = {
            "said": said,
            "found": found.name,
            "before": before,
            "hashes": hashes,
            "steps": trainer.results,
            "progress": dataclasses.asdict(trainer.progress),
        }

    def end(self) -> None:
        """Rank 0 finds that the user must change something while the others wait for groups."""

        def stream(group_id: int) -> Item:
            raise UserError(f"group {group_id}: the rewards file is gone")

        try:
            self.trainer(settings(self.folder, "end", 1), stream).train_batch()
        except (UserError, PeerEnded) as error:
            self.seen["ended"] = [type(error).__name__, getattr(error, "exit_code", None)]

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        if self.exchange.rank == 0:
            path = self.folder / f"{name}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({key: t.clone().contiguous() for key, t in tensors.items()}, path)


def moments(engine: Any, which: str) -> dict[str, Tensor]:
    """Adam's `exp_avg` or `exp_avg_sq` of every parameter, whole, on every rank."""
    from deepspeed.utils import safe_get_full_optimizer_state

    if engine.stage == 0:
        state = engine.ds.basic_optimizer.state
        return {name: state[p][which] for name, p in stage_0_parameters(engine).items()}
    if engine.stage in (1, 2):  # DeepSpeed links the state when only the first parameter group has one
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    return {name: safe_get_full_optimizer_state(p, which) for name, p in engine.model.named_parameters()}


def master_weights(engine: Any) -> dict[str, Tensor]:
    """The optimizer's own float32 parameters, by DeepSpeed's debugging interface and not by ours."""
    from deepspeed.utils import safe_get_full_fp32_param

    if engine.stage == 0:
        return {name: p.detach() for name, p in stage_0_parameters(engine).items()}
    return {name: safe_get_full_fp32_param(p) for name, p in engine.model.named_parameters()}


def stage_0_parameters(engine: Any) -> dict[str, Tensor]:
    """What the optimizer steps: the model's own parameters, or with bfloat16 their float32 copies."""
    named = dict(engine.model.named_parameters())
    if not hasattr(engine.optimizer, "fp32_groups"):
        return named
    halves = [p for group in engine.optimizer.fp16_groups for p in group]
    masters = [p for group in engine.optimizer.fp32_groups for p in group]
    master_of = {id(half): master for half, master in zip(halves, masters, strict=True)}
    return {name: master_of[id(p)] for name, p in named.items()}


def state_hash(engine: Any, has_moments: bool = True) -> str:
    """SHA-256 of weights, both moments (none before the first step) and the learning rate: all the next step needs."""
    digest = hashlib.sha256(repr(engine.learning_rate).encode())
    parts = [master_weights(engine), dict(engine.full_parameters(lambda _: True))]
    parts += [moments(engine, which) for which in ("exp_avg", "exp_avg_sq") if has_moments]
    for part in parts:
        for name in sorted(part):
            digest.update(name.encode())
            digest.update(part[name].float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def run_hash(trainer: Any, has_moments: bool = True) -> str:
    """Of the policy and, where there is one, of the critic."""
    models = [trainer.engine] + ([trainer.critic] if trainer.critic else [])
    return "-".join(state_hash(model, has_moments) for model in models)


def watch_loading() -> list[Any]:
    """From now on, the `weights_only` of every torch.load."""
    flags: list[Any] = []
    load = torch.load

    def watched(*arguments: Any, **options: Any) -> Any:
        flags.append(options.get("weights_only"))
        return load(*arguments, **options)

    torch.load = watched
    return flags


def main(folder: Path, start: str) -> None:
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)  # a deadlock ends with every rank's stack
    torch.set_num_threads(1)
    worker = Worker(folder)
    began = time.monotonic()
    if start == "first":
        for stage in STAGES:
            worker.train(stage)
            worker.one_batch(f"uneven{stage}", stage, uneven, algorithm={"beta": 0.0})
            worker.one_batch(f"dead{stage}", stage, dead, algorithm={"beta": 0.0})
            worker.skip(stage, "nan", poisoned)
            worker.skip(stage, "inf", infinite_loss)
            worker.train(stage, "critic", **GAE)
            worker.skip(stage, "critic_inf", infinite_loss, algorithm={"adv_estimator": "gae"})
            worker.skip(stage, "value_inf", enormous, **GAE)
        worker.half(1, "critic_half", **GAE)
        worker.skip(1, "critic_nan_half", poisoned, "bfloat16", **GAE)
        worker.one_batch("critic_uneven", 1, uneven, algorithm={"beta": 0.0, "adv_estimator": "gae"})
        worker.one_batch("critic3_uneven", 3, uneven, algorithm={"beta": 0.0, "adv_estimator": "gae"})
        worker.warm_up()
        worker.train(1, "segments", **GROUP_PPO)
        worker.one_batch("gae", 1, group, **GAE)
        worker.one_batch("size_1", 1, group, **group_ppo(group_max_size=1))
        worker.one_batch("literal", 1, group, **group_ppo(segment_rule="literal", threshold_lr=0.0))
        exact = {"score": "exact", "segment_loss": "segment"}
        algorithm = {"beta": 0.0, "adv_estimator": "group_ppo", "group_params": exact}
        worker.one_batch("exact3", 3, uneven, algorithm=algorithm)
        worker.variants()
        for handling in ("skip", "resample"):
            worker.one_batch(handling, 1, half_dead, algorithm={"dead_groups": handling})
        worker.references()
        worker.one_batch("all_dead", 1, dead, algorithm={"dead_groups": "resample", "beta": 0.0})
        worker.halves()
        worker.end()
    else:
        worker.seen["weights_only"] = watch_loading()
        for stage in STAGES:
            worker.resume(stage, "train")
            worker.resume(stage, "critic", **GAE)
        worker.resume(1, "segments", **GROUP_PPO)
        worker.resume(1, "critic_half", "bfloat16", **GAE)
        for stage in HALF_STAGES:
            worker.resume(stage, "half", "bfloat16")
    worker.seen["seconds"] = time.monotonic() - began
    path = folder / f"{start}-rank{worker.exchange.rank}.json"
    path.write_text(json.dumps(worker.seen, indent=1))
    worker.exchange.barrier()
    exits.leave(0)


if __name__ == "__main__":
    *_, folder, start = sys.argv
    main(Path(folder), start)

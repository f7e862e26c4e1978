"""A rank of the tests with DeepSpeed: the trainer's engine and loop on hand-made groups, over gloo.

The samplers are replaced by one that hands out groups at once; all else is the real thing. One start runs every case of
a test file, because a start costs more than a case. Every rank writes what it saw to <folder>/rank<r>.json and rank 0
its tensors beside it.
"""

import dataclasses
import faulthandler
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.config import Config
from common.types import Group
from common.wire.wire import Received
from model.tokenizer import load_tokenizer
from tests.support.gloo_data import NUM_STEPS, Stream, group, settings
from tests.support.protocol_helpers import received
from trainer.link.source import Statistics

HANGS_AFTER_S = 120
SLOW_S = 0.05


@dataclass(frozen=True)
class Case:
    """One batch of rollouts at a ZeRO stage. sections: settings over the common ones. slow: a rank that takes long."""

    name: str
    stage: int = 1
    stream: Stream = group
    sections: dict[str, Any] = field(default_factory=dict)
    slow: int | None = None


def rank_zero(stream: Stream) -> Any:
    """What rank 0 has, with groups that are always there and records that nobody keeps."""

    def ignore(*_: Any) -> None:
        return None

    def receive(group_ids: Sequence[int]) -> list[Received]:
        items = [stream(g) for g in group_ids]  # some streams repeat an earlier group
        return [
            received(dataclasses.replace(item, group_id=g) if isinstance(item, Group) else item)
            for item, g in zip(items, group_ids, strict=True)
        ]

    source = SimpleNamespace(
        incarnation="feed",
        receive=receive,
        commit=ignore,
        refill=ignore,
        versions_in_use=list,
        drain_statistics=lambda: Statistics({}, 0, {}),
    )
    log = SimpleNamespace(log=ignore, log_samples=ignore, log_eval=ignore)
    display = SimpleNamespace(step=ignore, note=ignore, advice=lambda *_: {})
    return SimpleNamespace(source=source, log=log, display=display, recorder=None, sync=lambda: None)


class Worker:
    """A rank, with the models in <folder> and what it will tell in `seen`."""

    def __init__(self, folder: Path, dist_backend: str = "gloo"):
        from trainer.engine.process_group import init_distributed

        init_distributed(settings(folder, "start", 1, trainer={"dist_backend": dist_backend}))
        self.folder = folder
        self.collectives = self.sharing(1)
        self.tokenizer = load_tokenizer(str(folder / "model"))
        self.seen: dict[str, Any] = {}

    @cache  # noqa: B019 process groups are made once
    def sharing(self, sp_size: int, tp_size: int = 1) -> Any:
        """The collectives among ranks of which so many share a row, or each layer."""
        from trainer.engine.ranks import connect

        sizes = {"sequence_parallel_size": sp_size, "tensor_parallel_size": tp_size}
        return connect(settings(self.folder, "start", 1, trainer=sizes))

    def tell(self) -> None:
        """What it saw, at the end."""
        (self.folder / f"rank{self.collectives.rank}.json").write_text(json.dumps(self.seen, indent=1))
        self.collectives.sum_over_ranks([0.0])  # a barrier

    def trainer(self, config: Config, stream: Stream) -> Any:
        """A run on this rank. results: what each of its steps was; scored: rows of its reference."""
        from trainer import start
        from trainer.engine.policy import PolicyEngine
        from trainer.loop import Trainer
        from trainer.save.checkpoint import RunState

        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)  # a deadlock ends with every rank's stack
        self.collectives = self.sharing(config.trainer.sequence_parallel_size, config.trainer.tensor_parallel_size)
        engine = PolicyEngine(config, self.collectives.world_size, self.collectives.sequence_group).start()
        progress = RunState("run", 0, 0, 0, 0, 0, 0, {})
        at = rank_zero(stream) if self.collectives.rank == 0 else None
        critic = start._critic(config, self.collectives, len(self.tokenizer))
        reference: Any = start._reference(config, engine, self.collectives, len(self.tokenizer))
        trainer: Any = Trainer(config, engine, self.collectives, self.tokenizer, progress, at, reference, critic)
        trainer.scored = []
        if reference:
            score = reference.score
            reference.score = lambda row: trainer.scored.append(row) or score(row)
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

    def tell_steps(self, name: str, trainer: Any, **more: Any) -> None:
        self.seen[name] = {"steps": trainer.results, "run_state": dataclasses.asdict(trainer.run_state)} | more

    def train(self, name: str, stage: int, **sections: dict[str, Any]) -> Any:
        """Three steps with clipping and a schedule; a checkpoint after each, a published version at the end."""
        trainer, hashes = self.trainer(settings(self.folder, name, stage, **sections), group), []
        for step in range(NUM_STEPS):
            trainer.train_batch()
            if step == 0:
                self.write_models(name, "gradient", trainer)
            trainer.saver.save_if_due(trainer.run_state)
            hashes.append(run_hash(trainer))
        self.write_models(name, "weights", trainer)
        trainer.publish(evaluate=False)
        self.tell_steps(name, trainer, hashes=hashes, published=dataclasses.asdict(trainer.publisher.published))
        return trainer

    def one_batch(self, case: Case) -> Any:
        trainer = self.trainer(settings(self.folder, case.name, case.stage, **case.sections), case.stream)
        backward = trainer.engine.backward

        def slowly(*arguments: Any) -> Any:
            time.sleep(SLOW_S)
            return backward(*arguments)

        if self.collectives.rank == case.slow:
            trainer.engine.backward = slowly
        trainer.train_batch()
        for what in ("gradient", "weights"):
            self.write_models(case.name, what, trainer)
        self.tell_steps(case.name, trainer, scored=len(trainer.scored))
        return trainer

    def write_models(self, name: str, what: str, trainer: Any) -> None:
        """gradient: Adam's exp_avg, (1 − beta1) · gradient after one step. weights: the optimizer's own."""
        for prefix, model in (("", trainer.engine), ("value_", trainer.critic)):
            if model:
                found = moments(model, "exp_avg") if what == "gradient" else master_weights(model)
                self.write(f"{name}/{prefix}{what}", found)

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        if self.collectives.rank == 0:
            path = self.folder / f"{name}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({key: t.clone().contiguous() for key, t in tensors.items()}, path)

    def resume(self, name: str, stage: int, found: Path | None = None, **sections: dict[str, Any]) -> Any:
        """A checkpoint of an earlier start, by default the newest valid one, and one more step."""
        from trainer.save import checkpoint, resume

        said: list[str] = []
        trainer = self.trainer(settings(self.folder, name, stage, **sections), group)
        before = run_hash(trainer, has_moments=False)
        found = found or resume.newest_valid(self.folder / name / "checkpoints", self.collectives, said.append)
        assert found is not None
        trainer.run_state = resume.read_run_state(found, {})
        checkpoint.restore(trainer.engine, found, trainer.critic)
        hashes = [run_hash(trainer)]
        trainer.train_batch()
        hashes.append(run_hash(trainer))
        trainer.saver.save_if_due(trainer.run_state)
        self.tell_steps(f"{name}/resumed", trainer, said=said, found=found.name, before=before, hashes=hashes)
        return trainer


def trained(engine: Any) -> dict[str, Tensor]:
    return {name: p for name, p in engine.model.named_parameters() if p.requires_grad}


def moments(engine: Any, which: str) -> dict[str, Tensor]:
    """Adam's `exp_avg` or `exp_avg_sq` of every trained parameter, whole, on every rank."""
    from deepspeed.utils import safe_get_full_optimizer_state

    if engine.stage == 0:
        state = engine.ds.basic_optimizer.state
        return {name: whole(p, state[p][which]) for name, p in trained(engine).items()}
    if engine.stage in (1, 2):  # DeepSpeed links the state when only the first parameter group has one
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    return {name: whole(p, safe_get_full_optimizer_state(p, which)) for name, p in trained(engine).items()}


def master_weights(engine: Any) -> dict[str, Tensor]:
    """The optimizer's own float32 parameters, by DeepSpeed's debugging interface and not by ours."""
    from deepspeed.utils import safe_get_full_fp32_param

    if engine.stage == 0:
        return {name: whole(p, p.detach()) for name, p in trained(engine).items()}
    return {name: whole(p, safe_get_full_fp32_param(p)) for name, p in trained(engine).items()}


def whole(parameter: Any, own: Tensor) -> Tensor:
    """Joined from all tensor-parallel ranks, if they have a part each of this parameter."""
    from deepspeed.utils import groups

    from trainer.engine.deepspeed_insides import is_split
    from trainer.engine.optimizer import full_shape

    if not is_split(parameter):
        return own
    group = groups.get_tensor_model_parallel_group()
    parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, [a == b for a, b in zip(own.shape, full_shape(parameter), strict=True)].index(False))


def state_hash(engine: Any, has_moments: bool = True) -> str:
    """SHA-256 of weights, both moments (none before the first step) and the learning rate: all the next step needs."""
    digest = hashlib.sha256(repr(float(engine.optimizer.param_groups[0]["lr"])).encode())
    parts = [master_weights(engine), dict(engine.gathered_tensors(engine.tensors, lambda _: True))]
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

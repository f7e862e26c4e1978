"""What a rank of test_collectives.py does: one run per ZeRO stage and dtype, every collective recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.collective_recorder import CollectiveRecorder
from tests.support.gloo_data import GAE, NUM_STEPS, STAGES, group, infinite_loss, poisoned, settings
from tests.support.rank import Worker
from tests.support.tier import ALL

SHARDED = STAGES if ALL else (1, 3)
GROUPS = {"trainer": {"prompts_per_step": 8}}  # on 2 ranks: four micro-batches of one group


def record(worker: Worker, name: str, stage: int, **sections: dict[str, Any]) -> list[dict[str, Any]]:
    """A run's start, a good step, a published version, a checkpoint, and a step that is not finite."""
    with CollectiveRecorder() as recorder:
        with recorder.phase("start"):
            trainer = worker.trainer(settings(worker.folder, name, stage, **GROUPS, **sections), group)
        for model in (trainer.engine, trainer.critic):
            if model:
                watch(recorder, model)
        with recorder.phase("loop"):
            trainer.train_batch()
        with recorder.phase("publish"):
            trainer.publish(evaluate=False)
            trainer.publisher.finish()
        with recorder.phase("checkpoint"):
            trainer.saver.save_if_due(trainer.progress)
    bad = infinite_loss if trainer.critic else poisoned
    with CollectiveRecorder() as overflow, overflow.phase("overflow"):
        worker.trainer(settings(worker.folder, f"{name}_bad", stage, **GROUPS, **sections), bad).train_batch()
    return recorder.table() + overflow.table()


def device_waits(worker: Worker) -> int:
    """How often DeepSpeed waits for its device in the micro-batches of three steps; its timers begin with the third."""
    from deepspeed.accelerator import get_accelerator

    trainer = worker.trainer(settings(worker.folder, "waits", 1, model={"dtype": "bfloat16"}), group)
    backward = trainer.engine.backward
    calls: list[int] = []
    inside: list[int] = []

    def counted(*arguments: Any) -> Any:
        before = len(calls)
        found = backward(*arguments)
        inside.append(len(calls) - before)
        return found

    trainer.engine.backward = counted
    get_accelerator().synchronize = lambda *_: calls.append(1)
    for _ in range(NUM_STEPS):
        trainer.train_batch()
    return sum(inside)


def watch(recorder: CollectiveRecorder, model: Any) -> None:
    """Tells a micro-batch from the step that ends them."""

    def inside(phase: str, call: Any) -> Any:
        def recorded(*arguments: Any, **options: Any) -> Any:
            with recorder.phase(phase):
                return call(*arguments, **options)

        return recorded

    model.backward, model.step = inside("micro-batch", model.backward), inside("step", model.step)


def work(folder: Path) -> None:
    worker = Worker(folder)
    for stage in SHARDED:
        for dtype in ("float32", "bfloat16"):
            name = f"{dtype}{stage}"
            worker.seen[name] = record(worker, name, stage, model={"dtype": dtype})
    worker.seen["critic1"] = record(worker, "critic1", 1, **GAE)
    worker.seen["waits"] = device_waits(worker)
    worker.tell()

"""Policy, critic and reference start and step on a simulated CUDA device as on the CPU.

One process has the device and another has none; both run every case. What is asked of the device, and what it cannot
show (speed, memory, what runs at once), is in tests/support/simulated_device.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from common.config import Config
from common.paths import ROOT
from tests.gloo.test_mixture_ranks import group as replayed
from tests.gloo.test_sequence_parallel_ranks import with_sets
from tests.gloo.test_vision_ranks import with_images
from tests.support import simulated_device
from tests.support.gloo_data import CONSTANT_RATE, GAE, OWN, REWARDS, SCORED, Item, Stream, bare, group, settings
from tests.support.mixtures import mixture_folder
from tests.support.rank import Worker, master_weights
from tests.support.speed import limit
from tests.support.tiny import difference, in_forks, random_group, tiny_model, tiny_reward_model
from tests.support.tiny_vision import WORDS, tiny_vision_model

pytestmark = pytest.mark.timeout(600)


# ---- the cases


def stream_of_images(model: Path) -> Stream:
    return lambda group_id: with_images(random_group(group_id, WORDS, REWARDS[group_id % len(REWARDS)]), model)


@dataclasses.dataclass(frozen=True)
class Start:
    """A case. sections: settings over the common ones."""

    stage: int  # of ZeRO
    sections: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: str = "model"
    zero: dict[str, Any] = dataclasses.field(default_factory=dict)  # more of deepspeed.zero_optimization
    capability: tuple[int, int] | None = None  # of the device, by default one for which functions are compiled
    change: Callable[[Any], Item] | None = None  # of every group

    def config(self, folder: Path, name: str) -> Config:
        given = {section: dict(values) for section, values in self.sections.items()}
        given["trainer"] = CONSTANT_RATE | given.get("trainer", {})
        given["model"] = {"path": str(folder / self.model)} | given.get("model", {})
        given["deepspeed"] = {"zero_optimization": {"stage": self.stage} | self.zero}
        given["data"] = {"max_prompt_length": 16}  # of the rehearsal
        if self.model == "qwen2_5_vl":
            given["data"] |= {"image_key": "image"}
        if self.model == "qwen2_5_vl" or "router_replay" in given.get("algorithm", {}):
            given["algorithm"] = {"beta": 0.0} | given.get("algorithm", {})
        return settings(folder, name, self.stage, **given)

    def stream(self, folder: Path) -> Stream:
        if self.model == "qwen2_5_vl":
            return stream_of_images(folder / self.model)
        if self.sections.get("algorithm", {}).get("router_replay"):
            return replayed
        plain = bare if "reference" in self.sections else group
        change = self.change
        return plain if change is None else lambda group_id: change(plain(group_id))


OLD = (7, 5)  # for which nothing is compiled
HALF = {"model": {"dtype": "bfloat16"}}
REPLAY = {"algorithm": {"router_replay": True}}
LORA = {"lora": {"r": 4}}
MERGED = {"lora": {"r": 4, "sync": "merged", "alpha": 4, "target_modules": ["q_proj", "v_proj"]}}
OFF = {"offload_optimizer": {"device": "cpu"}}
SCHEDULE = {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}
SCHEDULE |= {"learning_rate": 3e-3, "max_steps": 7, "warmup_steps": 0}

CASES: dict[str, Start] = {
    **{f"ZeRO {stage} float32": Start(stage) for stage in (0, 1, 3)},
    **{f"ZeRO {stage} bfloat16": Start(stage, HALF) for stage in (1, 3)},
    **{f"router_replay ZeRO {stage}": Start(stage, REPLAY, "qwen3_moe") for stage in (0, 3)},
    "router_replay of a hybrid": Start(3, REPLAY, "qwen3_5_moe_text"),
    **{f"adapters ZeRO {stage}": Start(stage, LORA) for stage in (0, 3)},
    "merged adapters": Start(1, MERGED | HALF),
    "recomputed": Start(1, {"model": {"gradient_checkpointing": True}}),
    "separate": Start(0, {"trainer": {"packing": "separate"}}),
    "logits in one chunk": Start(1, {"trainer": {"logprob_chunk_size": 4096}}),
    "entropy": Start(1, {"algorithm": {"entropy_coef": 0.5}}),
    "own loss": Start(1, {"algorithm": {"adv_estimator": f"{OWN}:above_the_mean", "loss": f"{OWN}:clipped"}}),
    "turns that fork": Start(1, change=in_forks),
    "sampling sets": Start(1, change=with_sets),
    "an old card, sinks": Start(1, {}, "gpt_oss", capability=OLD),
    "an old card, forks": Start(1, change=in_forks, capability=OLD),
    "no decay, clipped": Start(0, {"trainer": {"weight_decay": 0.0, "max_grad_norm": 0.1}}),
    "schedule": Start(1, {"trainer": SCHEDULE}),
    "images": Start(1, {}, "qwen2_5_vl"),
    "frozen tower ZeRO 3": Start(3, {"model": {"freeze_vision_tower": True}}, "qwen2_5_vl"),
    "logits with a cap ZeRO 3": Start(3, {}, "gemma2"),
    "windows": Start(1, HALF, "gemma3_text"),
    "sinks": Start(1, {}, "gpt_oss"),
    "optimizer off the device": Start(2, {}, zero=OFF),
    "weights off the device": Start(3, REPLAY, "qwen3_moe", zero=OFF | {"offload_param": {"device": "cpu"}}),
    **{f"critic ZeRO {stage}": Start(stage, GAE) for stage in (0, 3)},
    **{f"reference ZeRO {stage}": Start(stage, {"reference": SCORED}) for stage in (0, 3)},
    "reference is the base": Start(3, LORA | {"reference": {"on": "trainer"}}),
}


# ---- in the processes


def work(worker: Worker) -> None:
    """Runs every case, also after one that failed."""
    import torch.nn.functional as F

    for name, start in CASES.items():
        try:
            # ZeRO 3 replaces F.linear for the rest of the process
            with card(start.capability), mock.patch.object(F, "linear", F.linear):
                worker.seen[name] = run(worker, folder_of(name), start)
        except Exception:
            worker.seen[name] = {"error": traceback.format_exc()}
    worker.tell()


def run(worker: Worker, name: str, start: Start) -> dict[str, Any]:
    """Starts a case's models and uses them as a run does.

    A rehearsal, a step of real rows, steps of fillers before and after a checkpoint, which is restored, a step that
    must not be applied, scores, a version.
    """
    import torch

    from trainer.data import tensors
    from trainer.rehearsal import rehearse
    from trainer.save import checkpoint, resume

    config = start.config(worker.folder, name)
    trainer = worker.trainer(config, start.stream(worker.folder))
    engine, rows = trainer.engine, list[Any]()
    rehearse(trainer)
    backward = engine.backward
    engine.backward = lambda batch, *more: rows.append(batch.row) or backward(batch, *more)
    trainer.train_batch()
    engine.backward = backward
    worker.write_models(name, "gradient", trainer)

    engine.backward(tensors.micro_batch([], tensors.step_denominator([], 1, config), config.algorithm))
    is_filler_applied = engine.step().applied
    trainer.saver.save_if_due(trainer.run_state)
    saved = weights_of(engine)
    engine.backward(tensors.micro_batch([], tensors.step_denominator([], 1, config), config.algorithm))
    engine.step()
    moved = weights_of(engine)
    found = resume.newest_valid(config.run.output_dir / "checkpoints", worker.collectives, print)
    checkpoint.restore(engine, found, trainer.critic)
    restored = weights_of(engine)
    engine.make_gradients_nan()
    is_poison_applied = engine.step().applied

    scores = {"policy": engine.score(rows[0], config.sampler.temperature), "norms": engine.score_norms(rows[0])}
    if config.reference.path:
        reference = trainer.step_trainer.models.reference
        reference.replace(str(worker.folder / "critic"))
        scores["reference"] = reference.score(rows[0]).cpu()
    worker.write(f"{name}/scores", scores)
    worker.write(f"{name}/weights", dict(engine.gathered_tensors(engine.tensors, lambda _: True)))
    trainer.publish(evaluate=False)
    return {
        "device": str(engine.device),
        "parameters": sorted({getattr(p, "ds_tensor", p).device.type for p in engine.model.parameters()}),
        "steps": trainer.results,
        "applied": [is_filler_applied, is_poison_applied],
        "base": engine.base_checksums() if config.lora.r else {},
        "moved": any(not torch.equal(moved[key], saved[key]) for key in saved),
        "restored": all(torch.equal(restored[key], saved[key]) for key in saved),
    }


def weights_of(engine: Any) -> dict[str, Any]:
    """Returns copies of the optimizer's weights on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in master_weights(engine).items()}


@contextlib.contextmanager
def card(capability: tuple[int, int] | None) -> Iterator[None]:
    """Lets the device be of this compute capability in the context."""
    import torch

    if capability is None:
        yield
        return
    with mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability):
        yield


def folder_of(name: str) -> str:
    return name.replace(" ", "-").replace(",", "")


# ---- in the test


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the folders of what the rank with the device and the one without it told."""
    if reason := simulated_device.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("device")
    write_models(folder / "models")
    device = str(simulated_device.library())
    started = {"cuda": started_in(folder / "cuda", device), "cpu": started_in(folder / "cpu")}
    try:
        for where, process in started.items():
            code = process.wait(timeout=limit(500))
            assert code == 0, f"{where}: {(folder / where / 'log').read_text()[-3000:]}"
    finally:
        for process in started.values():
            process.kill()
    return {where: folder / where for where in started}


def write_models(folder: Path) -> None:
    for name in ("model", "critic", "reference"):
        tiny_model(folder / name)
    tiny_reward_model(folder / "critic", folder / "model")
    for family in sorted({start.model for start in CASES.values()} - {"model", "qwen2_5_vl"}):
        mixture_folder(folder / family, family)
    tiny_vision_model(folder / "qwen2_5_vl", "qwen2_5_vl")


def started_in(place: Path, *device: str) -> subprocess.Popen[bytes]:
    place.mkdir()
    for model in (place.parent / "models").iterdir():
        (place / model.name).symlink_to(model)
    command = [sys.executable, "-m", "tests.support.device_worker", __name__, str(place), *device]
    # memory that is used again, instead of a call of the system for every tensor
    memory = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(2 << 30)}
    given = os.environ | memory | {"OMP_NUM_THREADS": "1"}
    with (place / "log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, env=given, stdout=log, stderr=log)


@cache
def told(place: Path) -> dict[str, Any]:
    return json.loads((place / "rank0.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_models_start_and_step_on_the_device_as_on_the_cpu(places: dict[str, Path], name: str) -> None:
    found, expected = told(places["cuda"])[name], told(places["cpu"])[name]
    for what in (expected, found):
        assert "error" not in what, what["error"][-4000:]
    start, is_half = CASES[name], CASES[name].sections.get("model", {}).get("dtype") == "bfloat16"
    assert found["device"] == "cuda:0" and expected["device"] == "cpu"
    assert found["parameters"] == (["cpu"] if "offload_param" in start.zero else ["cuda"])
    assert found["applied"] == expected["applied"] == [True, False], "a filler is applied, what is not finite is not"
    assert found["moved"] and found["restored"], "a checkpoint brings back what a later step changed"
    assert found["base"] == expected["base"] and bool(found["base"]) == ("lora" in start.sections)
    [ours], [theirs] = found["steps"], expected["steps"]
    assert ours == pytest.approx(theirs, rel=3e-2 if is_half else 1e-4)
    written = sorted((places["cpu"] / folder_of(name)).glob("*.safetensors"))
    assert len(written) >= 3  # gradients, scores and weights
    for file in written:
        of_device = load_file(places["cuda"] / folder_of(name) / file.name)
        assert difference(of_device, load_file(file)) < (5e-2 if is_half else 2e-4), file.name

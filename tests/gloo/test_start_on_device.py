"""Policy, critic and reference start and step on a simulated CUDA device as on the CPU, with all that a start reads.

One process has the device and another has none; both run every case. What is asked of the device, and what it cannot
show (speed, memory, what runs at once), is in tests/support/simulated_device.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from common.config import Config
from common.paths import ROOT
from tests.gloo.test_mixture_ranks import MIXTURE
from tests.gloo.test_mixture_ranks import group as routed
from tests.gloo.test_sequence_parallel_ranks import with_sets
from tests.gloo.test_vision_ranks import FAMILY
from tests.gloo.test_vision_ranks import stream as with_images_in
from tests.support import simulated_device
from tests.support.gloo_data import CONSTANT_RATE, GAE, OWN, SCORED, Item, Stream, bare, group, settings
from tests.support.mixtures import mixture_folder
from tests.support.rank import Worker, master_weights
from tests.support.speed import limit
from tests.support.tier import ALL
from tests.support.tiny import difference, in_forks, tiny_model, tiny_reward_model
from tests.support.tiny_vision import tiny_vision_model

pytestmark = pytest.mark.timeout(600)


def forked(group_id: int) -> Item:
    """Their histories were rewritten."""
    return in_forks(group(group_id))


def filtered(group_id: int) -> Item:
    """From a sampler with top_k."""
    return with_sets(group(group_id))


# ---- the cases


COMPILES, OLD = (9, 0), (7, 5)  # compute capabilities: functions are compiled for the first, nothing for the second


@dataclasses.dataclass(frozen=True)
class Start:
    """A case. sections: settings over the common ones."""

    stage: int  # of ZeRO
    sections: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: str = "model"
    zero: dict[str, Any] = dataclasses.field(default_factory=dict)  # more of deepspeed.zero_optimization
    capability: tuple[int, int] = COMPILES
    stream: Stream = group

    def config(self, folder: Path, name: str) -> Config:
        ours: dict[str, Any] = {
            "trainer": CONSTANT_RATE,
            "model": {"path": str(folder / self.model)},
            "data": {"max_prompt_length": 16},  # of the rehearsal
            "deepspeed": {"zero_optimization": {"stage": self.stage} | self.zero},
        }
        both = self.sections | {section: given | self.sections.get(section, {}) for section, given in ours.items()}
        return settings(folder, name, self.stage, **both)


SEEING = {"data": {"image_key": "image"}, "algorithm": {"beta": 0.0}}
REPLAY = {"algorithm": {"router_replay": True, "beta": 0.0}}
sees = functools.partial(Start, model=FAMILY, stream=with_images_in(range(64), range(64)))
replays = functools.partial(Start, model=MIXTURE, stream=routed)

WANTED = "TANDEM_TEST_CASES"  # names of the cases that the processes run
HALF = {"model": {"dtype": "bfloat16"}}
RECOMPUTED = {"model": {"gradient_checkpointing": True}}
SEPARATE = {"trainer": {"packing": "separate"}}
LORA = {"lora": {"r": 4}}
MERGED = {"lora": {"r": 4, "sync": "merged", "alpha": 4, "target_modules": ["q_proj", "v_proj"]}}
BASE = LORA | {"reference": {"on": "trainer"}}
FROZEN = SEEING | {"model": {"freeze_vision_tower": True}}
OFF = {"offload_optimizer": {"device": "cpu"}}
ALL_OFF = OFF | {"offload_param": {"device": "cpu"}}
SGD = {"deepspeed": {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}}
SCHEDULE = {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}
SCHEDULE |= {"learning_rate": 3e-3, "max_steps": 7, "warmup_steps": 0}

CASES: dict[str, Start] = {
    **{f"ZeRO {stage} float32": Start(stage) for stage in (0, 1, 2, 3)},
    **{f"ZeRO {stage} bfloat16": Start(stage, HALF) for stage in (1, 2, 3)},
    **{f"router_replay ZeRO {stage}": replays(stage, REPLAY) for stage in (0, 1, 2, 3)},
    "router_replay recomputed": replays(3, REPLAY | RECOMPUTED),
    "router_replay bfloat16": replays(3, REPLAY | HALF),
    "router_replay of a hybrid": replays(3, REPLAY, model="qwen3_5_moe_text"),
    "router_replay with sinks": replays(3, REPLAY, model="gpt_oss"),
    **{f"adapters ZeRO {stage}": Start(stage, LORA) for stage in (0, 3)},
    "merged adapters": Start(1, MERGED | HALF),
    "recomputed": Start(1, RECOMPUTED),
    "recomputed ZeRO 3": Start(3, RECOMPUTED),
    "separate": Start(0, SEPARATE),
    "separate ZeRO 3": Start(3, SEPARATE),
    "logits in one chunk": Start(1, {"trainer": {"logprob_chunk_size": 4096}}),
    "layers not compiled": Start(1, {"trainer": {"compile_layers": False}}),
    "entropy": Start(1, {"algorithm": {"entropy_coef": 0.5}}),
    "own loss": Start(1, {"algorithm": {"adv_estimator": f"{OWN}:above_the_mean", "loss": f"{OWN}:clipped"}}),
    "turns that fork": Start(1, stream=forked),
    "turns that fork ZeRO 3": Start(3, stream=forked),
    "sampling sets": Start(1, stream=filtered),
    "an old card": Start(1, capability=OLD),
    "an old card, sinks": Start(1, {}, "gpt_oss", capability=OLD),
    "an old card, images": sees(1, SEEING, capability=OLD),
    "an old card, forks": Start(1, stream=forked, capability=OLD),
    "no decay, clipped": Start(0, {"trainer": {"weight_decay": 0.0, "max_grad_norm": 0.1}}),
    "schedule": Start(1, {"trainer": SCHEDULE}),
    "images": sees(1, SEEING),
    "images ZeRO 3": sees(3, SEEING),
    "frozen tower": sees(1, FROZEN),
    "frozen tower ZeRO 3": sees(3, FROZEN),
    "logits with a cap": Start(1, {}, "gemma2"),
    "logits with a cap ZeRO 3": Start(3, {}, "gemma2"),
    "windows": Start(1, HALF, "gemma3_text"),
    "sinks": Start(1, {}, "gpt_oss"),
    "optimizer off the device": Start(2, {}, zero=OFF),
    "optimizer off the device bfloat16": Start(1, HALF, zero=OFF),
    "weights off the device": Start(3, {}, zero=ALL_OFF),
    "weights off the device, router_replay": replays(3, REPLAY, zero=ALL_OFF),
    "another optimizer": Start(0, SGD),
    **{f"critic ZeRO {stage}": Start(stage, GAE) for stage in (0, 1, 3)},
    "critic bfloat16": Start(1, GAE | HALF),
    **{f"reference ZeRO {stage}": Start(stage, {"reference": SCORED}, stream=bare) for stage in (0, 3)},
    **{f"reference is the base ZeRO {stage}": Start(stage, BASE, stream=bare) for stage in (1, 3)},
}

if not ALL:  # those that differ from another case in the stage of ZeRO or the dtype alone
    for _name in ("ZeRO 2 float32", "ZeRO 2 bfloat16", "router_replay ZeRO 2", "router_replay bfloat16",
                  "recomputed ZeRO 3", "separate ZeRO 3", "turns that fork ZeRO 3", "images ZeRO 3", "critic ZeRO 1",
                  "critic bfloat16", "an old card, images", "optimizer off the device bfloat16"):  # fmt: skip
        del CASES[_name]

# Settings that a start reads, and a case that gives each another value than most.
READ: dict[str, str] = {
    "model.path": "sinks",
    "model.dtype": "ZeRO 1 bfloat16",
    "model.freeze_vision_tower": "frozen tower",
    "model.gradient_checkpointing": "recomputed",
    "lora.r": "adapters ZeRO 0",
    "lora.alpha": "merged adapters",
    "lora.target_modules": "merged adapters",
    "lora.sync": "merged adapters",
    "algorithm.router_replay": "router_replay ZeRO 3",
    "algorithm.entropy_coef": "entropy",
    "critic.path": "critic ZeRO 0",
    "critic.learning_rate": "critic ZeRO 0",
    "reference.path": "reference ZeRO 3",
    "deepspeed": "optimizer off the device",
    "trainer.packing": "separate",
    "trainer.logprob_chunk_size": "logits in one chunk",
    "trainer.compile_layers": "layers not compiled",
    "trainer.weight_decay": "no decay, clipped",
    "trainer.max_grad_norm": "no decay, clipped",
    "trainer.learning_rate": "schedule",
    "trainer.lr_scheduler_type": "schedule",
    "trainer.lr_scheduler_kwargs": "schedule",
    "trainer.warmup_steps": "schedule",
    "trainer.max_steps": "schedule",
}
NOT_OF_THE_DEVICE: dict[str, str] = {
    "model.revision": "names files",
    "model.trust_remote_code": "names files",
    "critic.revision": "names files",
    "reference.revision": "names files",
    "run.seed": "seeds numbers that are drawn on the CPU",
    "critic.critic_warmup_steps": "a number of steps",
    "trainer.prompts_per_step": "a number of groups",
    "trainer.groups_per_micro_batch": "a number of groups",
    "trainer.max_tokens_per_micro_batch": "a number of tokens",
    "trainer.sequence_parallel_size": "the device has one rank",
    "trainer.tensor_parallel_size": "the device has one rank",
}


# ---- in the processes


class Reads:
    """Notes the settings that are read while a model is loaded and started, such as "trainer.packing"."""

    def __init__(self) -> None:
        self.names = set[str]()
        self._depth = 0
        fields = Config.model_fields
        self._of_kind = {fields[name].annotation: name for name in fields if name not in ("deepspeed", "vllm")}

    def install(self) -> None:
        """From now on: in every load and start of this process."""
        from trainer.engine.critic import Critic
        from trainer.engine.deepspeed_model import DeepSpeedModel
        from trainer.engine.policy import PolicyEngine

        for kind, section in {**self._of_kind, Config: ""}.items():
            kind.__getattribute__ = self._reading(section, kind.model_fields)  # type: ignore[union-attr]
        for model, name in ((PolicyEngine, "__init__"), (Critic, "__init__"), (DeepSpeedModel, "start")):
            setattr(model, name, self._during(getattr(model, name)))

    def _reading(self, section: str, fields: Any) -> Any:
        def read(settings: Any, name: str) -> Any:
            if self._depth and name in fields and (section or name not in self._of_kind.values()):
                self.names.add(f"{section}.{name}".lstrip("."))
            return object.__getattribute__(settings, name)

        return read

    def _during(self, function: Any) -> Any:
        @functools.wraps(function)
        def noted(*given: Any, **named: Any) -> Any:
            self._depth += 1
            try:
                return function(*given, **named)
            finally:
                self._depth -= 1

        return noted


def work(worker: Worker) -> None:
    """Runs every case, also after one that failed."""
    import torch
    import torch.nn.functional as F

    reads = Reads()
    reads.install()
    for name, start in CASES.items():
        if name not in os.environ[WANTED].split("|"):
            continue
        try:
            with (
                mock.patch.object(torch.cuda, "get_device_capability", return_value=start.capability),
                mock.patch.object(F, "linear", F.linear),  # which ZeRO 3 replaces for the rest of the process
            ):
                worker.seen[name] = run(worker, folder_of(name), start)
        except Exception:
            worker.seen[name] = {"error": traceback.format_exc()}
    worker.seen["read"] = sorted(reads.names)
    worker.tell()


def run(worker: Worker, name: str, start: Start) -> dict[str, Any]:
    """Starts a case's models and uses them as a run does.

    A rehearsal, a step of real rows, steps of fillers before and after a checkpoint, which is restored, a step that
    must not be applied, scores, a version.
    """
    import torch

    from model.checksum import Checksums
    from trainer.data import tensors
    from trainer.rehearsal import rehearse
    from trainer.save import checkpoint, resume

    config = start.config(worker.folder, name)
    trainer = worker.trainer(config, start.stream)
    engine, rows = trainer.engine, list[Any]()
    rehearse(trainer)
    backward = engine.backward
    engine.backward = lambda batch, *more: rows.append(batch.row) or backward(batch, *more)
    trainer.train_batch()
    engine.backward = backward
    if "optimizer" not in config.deepspeed:
        worker.write_models(name, "gradient", trainer)

    filler = tensors.micro_batch([], tensors.step_denominator([], 1, config), config.algorithm)
    engine.backward(filler)
    is_filler_applied = engine.step().applied
    trainer.saver.save_if_due(trainer.run_state)
    saved = weights_of(engine)
    engine.backward(filler)
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
    whole = dict(engine.gathered_tensors(engine.tensors, lambda _: True))
    worker.write(f"{name}/weights", whole)
    on_device, on_host = Checksums(), Checksums()
    for key, _ in engine.gathered_tensors(engine.tensors, lambda _: True, on_device.add):
        on_host.add(key, whole[key])
    trainer.publish(evaluate=False)
    return {
        "device": str(engine.device),
        "parameters": sorted({getattr(p, "ds_tensor", p).device.type for p in engine.model.parameters()}),
        "steps": trainer.results,
        "applied": [is_filler_applied, is_poison_applied],
        "checksums_agree": on_device.infos() == on_host.infos(),
        "base": engine.base_checksums() if config.lora.r else {},
        "scored": len(trainer.scored),
        "moved": any(not torch.equal(moved[key], saved[key]) for key in saved),
        "restored": all(torch.equal(restored[key], saved[key]) for key in saved),
    }


def weights_of(engine: Any) -> dict[str, Any]:
    """Returns copies of the optimizer's weights on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in master_weights(engine).items()}


def folder_of(name: str) -> str:
    return name.replace(" ", "-").replace(",", "")


# ---- in the test


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    """Returns the folders of what the rank with the device and the one without it told of the chosen tests' cases."""
    if reason := simulated_device.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("device")
    write_models(folder / "models")
    ours = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params["name"] for item in ours if hasattr(item, "callspec")]
    wanted = "|".join(chosen if len(chosen) == len(ours) else CASES)
    device = str(simulated_device.library())
    started = {"cuda": started_in(folder / "cuda", wanted, device), "cpu": started_in(folder / "cpu", wanted)}
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
    for family in sorted({start.model for start in CASES.values()} - {"model", FAMILY}):
        mixture_folder(folder / family, family)
    tiny_vision_model(folder / FAMILY, FAMILY)


def started_in(place: Path, wanted: str, *device: str) -> subprocess.Popen[bytes]:
    place.mkdir()
    for model in (place.parent / "models").iterdir():
        (place / model.name).symlink_to(model)
    command = [sys.executable, "-m", "tests.support.device_worker", __name__, str(place), *device]
    # memory that is used again, instead of a call of the system for every tensor
    memory = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(2 << 30)}
    given = os.environ | memory | {"OMP_NUM_THREADS": "1", WANTED: wanted}
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
    assert found["checksums_agree"] and expected["checksums_agree"]
    assert found["moved"] and found["restored"], "a checkpoint brings back what a later step changed"
    assert found["base"] == expected["base"] and bool(found["base"]) == ("lora" in start.sections)
    assert found["scored"] == expected["scored"] and bool(found["scored"]) == ("reference" in start.sections)
    [ours], [theirs] = found["steps"], expected["steps"]
    assert ours == pytest.approx(theirs, rel=3e-2 if is_half else 1e-4)
    written = sorted(path.name for path in (places["cpu"] / folder_of(name)).glob("*.safetensors"))
    assert {"scores.safetensors", "weights.safetensors"} <= {*written}
    for file in written:
        pair = [load_file(places[where] / folder_of(name) / file) for where in ("cuda", "cpu")]
        assert difference(*pair) < (5e-2 if is_half else 2e-4), file


def test_every_setting_that_a_start_reads_has_a_case(places: dict[str, Path]) -> None:
    read = {*told(places["cuda"])["read"]}
    assert read - READ.keys() - NOT_OF_THE_DEVICE.keys() == set()
    assert {*READ.values()} <= CASES.keys()

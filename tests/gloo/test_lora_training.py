"""Adapters trained by real DeepSpeed ranks over gloo, ZeRO 0 to 3, against peft under plain torch.

The yardstick is peft's own model in float64 on one process: dense forwards, the oracle's loss, torch's AdamW.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.files import run_folder, weights
from model.files import lora
from model.files.lora import published_name
from tests.gloo.test_gloo import require_canary
from tests.support.gloo_data import NUM_STEPS
from tests.support.plain_training import BETA1, PLAIN_ROUNDING, PlainTraining
from tests.support.rank import Worker
from tests.support.replay_worker import RankReports, stack
from tests.support.tier import ALL
from tests.support.tiny import VOCAB_SIZE, difference, tiny_model
from trainer.engine.exported import adapters

LORA = {"lora": {"r": 4, "alpha": 12}}
MERGED = {"lora": LORA["lora"] | {"sync": "merged"}, "model": {"gradient_checkpointing": True}}
# ZeRO stage and settings of three steps, by name
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (3, {}),
    "half": (1, {"model": {"dtype": "bfloat16"}}),
    "critic": (1, {"algorithm": {"adv_estimator": "group_ppo"}}),
    "merged": (1, MERGED),
}
if ALL:
    VARIANTS |= {f"zero{stage}": (stage, {}) for stage in (0, 1, 2)} | {"merged3": (3, MERGED)}
RUNS = [(2, name) for name in VARIANTS] + [(1, name) for name in VARIANTS if ALL and name.startswith("zero")]

every_run = pytest.mark.parametrize(("ranks", "name"), RUNS)
# all others train what plain peft trains
every_exact_run = pytest.mark.parametrize(("ranks", "name"), [run for run in RUNS if run[1] not in ("half", "critic")])


def work(folder: Path) -> None:
    """What each rank does: trains adapters, straight and from the checkpoint before the last."""
    worker = Worker(folder)
    for name, (stage, sections) in VARIANTS.items():
        if (worker.collectives.world_size, name) not in RUNS:
            continue
        engine = worker.train(name, stage, **LORA | sections).engine
        worker.write(f"{name}/adapters", dict(engine.gathered_tensors(adapters(engine.model), lambda _: True)))
        found = run_folder.step_dir(folder / name / "checkpoints", NUM_STEPS - 1)
        worker.resume(name, stage, found, **LORA | sections)
    worker.tell()


@cache
def reports(ranks: int) -> RankReports:
    """Of one start per number of ranks, when a test first asks for it."""
    tiny_model(stack().folder / f"lora-{ranks}" / "model", vocab=VOCAB_SIZE)
    return stack().seen(__name__, f"lora-{ranks}", ranks)


def checkpoint(ranks: int, name: str) -> Path:
    return run_folder.step_dir(reports(ranks).folder / name / "checkpoints", NUM_STEPS)


def published(ranks: int, name: str) -> weights.Published:
    return weights.Published(**reports(ranks).ranks[0][name]["published"])


def base_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(reports(2).folder / "model", dtype=torch.float32)


def peft_model(ranks: int, name: str) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(base_model(), checkpoint(ranks, name))


class PeftTraining(PlainTraining):
    """peft as its documentation shows it, with its own random start under the run's seed."""

    def load(self, model: Path) -> Any:
        from peft import LoraConfig, get_peft_model

        base = super().load(model)
        torch.manual_seed(0)
        r, alpha = LORA["lora"]["r"], LORA["lora"]["alpha"]
        given = LoraConfig(r=r, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(base, given)

    def adapters(self, of: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Under the names of peft's file."""
        from peft import get_peft_model_state_dict

        state = None if of is None else {name: t.clone() for name, t in of.items()}
        found = get_peft_model_state_dict(self.model, state_dict=state, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in found.items()}


@pytest.fixture(scope="module")
def plain() -> PeftTraining:
    return PeftTraining(reports(2).folder / "model").train()


@every_exact_run
def test_three_steps_give_pefts_gradient_losses_norms_and_adapters(plain: PeftTraining, ranks: int, name: str) -> None:
    found = {str(published_name(k)): t / (1 - BETA1) for k, t in reports(ranks).tensors(f"{name}/gradient").items()}
    expected = plain.adapters(plain.gradient)
    assert difference(found, expected) < PLAIN_ROUNDING
    for step, numbers in zip(reports(ranks).ranks[0][name]["steps"], plain.steps, strict=True):
        for key, value in numbers.items():
            assert step[key] == pytest.approx(value, rel=2e-5), key
    assert difference(reports(ranks).tensors(f"{name}/adapters"), plain.adapters()) < 1e-5


@every_run
def test_a_resumed_run_is_bit_identical_to_one_that_was_never_stopped(ranks: int, name: str) -> None:
    for seen in reports(ranks).ranks:
        straight, resumed = seen[name], seen[f"{name}/resumed"]
        assert resumed["hashes"] == straight["hashes"][NUM_STEPS - 2 :]
        assert resumed["steps"] == straight["steps"][-1:]
        assert len(set(straight["hashes"])) == NUM_STEPS


@every_run
def test_a_checkpoint_loads_in_peft_with_its_tokenizer_and_holds_no_base_weights(ranks: int, name: str) -> None:
    from transformers import AutoTokenizer

    folder = checkpoint(ranks, name)
    parameters = peft_model(ranks, name).named_parameters()
    found = {n.replace(".default", ""): p.detach() for n, p in parameters if "lora_" in n}
    expected = reports(ranks).tensors(f"{name}/adapters")
    assert_equal(found, {key: t.float() for key, t in expected.items()})
    assert len(AutoTokenizer.from_pretrained(folder)) == VOCAB_SIZE
    trained = sum(t.numel() for t in expected.values())
    state = sum(path.stat().st_size for path in (folder / "trainer" / "state").iterdir())
    assert state < 24 * trained + ranks * 40_000, "beside the adapters, their copies and moments, only names"


@pytest.mark.parametrize(("ranks", "name"), [run for run in RUNS if "merged" not in run[1]])
def test_a_published_version_is_a_peft_folder_of_the_trained_adapters(ranks: int, name: str) -> None:
    version = published(ranks, name)
    manifest = weights.read_manifest(version)
    assert sorted(manifest.files) == [lora.SETTINGS, lora.WEIGHTS]
    found = load_file(Path(version.weights_dir) / lora.WEIGHTS)
    assert found.keys() == manifest.tensors.keys()
    assert_equal(found, reports(ranks).tensors(f"{name}/adapters"))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["merged", *["merged3"] * ALL])
def test_a_merged_version_is_what_peft_merges(name: str) -> None:
    version = published(2, name)
    files = [Path(version.weights_dir) / name for name in weights.read_manifest(version).files]
    found = {key: t for file in files for key, t in load_file(file).items()}
    named = {key: p.detach() for key, p in peft_model(2, name).merge_and_unload().named_parameters()}
    assert difference(found, named) < 1e-7


@pytest.mark.parametrize(("ranks", "name"), [(2, "zero3"), (2, "merged")])
def test_the_canary_is_pefts_log_probs_under_the_published_adapters(ranks: int, name: str) -> None:
    require_canary(peft_model(ranks, name), weights.read_manifest(published(ranks, name)).canary)

"""Both processes on drawings and text: three steps of the quick start with real vLLM and DeepSpeed, and a replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from common.ports import free_port
from examples.drawings import Drawings
from model.images import read_vision
from report.run_log import read_jsonl
from tests.support.metrics_page import unexplained
from tests.support.pupils import files_of
from tests.support.speed import limit
from tests.support.tier import full
from trainer.link import recording

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/quickstart_vlm.yaml"
HARDLY_TAUGHT = Drawings(num_train=64, num_test=16, num_clean_steps=20, num_careless_steps=0, batch_size=16)
SMALLER = ("trainer.max_steps=3", "trainer.prompts_per_step=4", "sampler.num_generations=4", "trainer.save_steps=null")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "quickstart_vlm"
    files_of(HARDLY_TAUGHT, folder)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for row in rows[::3]:  # text alone
        row.update(images=[], question=row["question"].removeprefix("<image>"))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("freeze", [False, pytest.param(True, marks=full)], ids=["trained", "frozen"])
def test_three_steps_on_drawings_with_the_tower(freeze: bool, task: Path, tmp_path: Path) -> None:
    files = [f"model.path={task}/model", f"data.train={task}/train.jsonl", f"data.eval={task}/test.jsonl"]
    given = [f"run.output_dir={tmp_path / 'run'}", f"model.freeze_vision_tower={str(freeze).lower()}", *files]
    # a reward that tells completions apart: a model that was hardly taught gives no right answer
    (tmp_path / "reward.py").write_text(
        "def few_letters(completions, **columns):\n    return [-len(text) / 100 for text in completions]\n"
    )
    given.append(f"rewards.reward_funcs=[boxed, {tmp_path}/reward.py:few_letters]")
    given += ["run.record=true", *SMALLER]
    given += [] if freeze else ["algorithm.beta=0.01", "reference.on=sampler"]
    command = [sys.executable, "-m", "launcher.run", CONFIG, *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(400))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert max(m["sync/canary_max_diff"] for m in metrics) <= 1e-4
    assert abs(metrics[0]["ratio/mean"] - 1) <= 1e-3 and all(m["grad_norm"] > 0 for m in metrics)
    assert freeze or metrics[0]["kl"] < 1e-6 < metrics[2]["kl"]
    groups = [recorded.group for recorded, _ in recording.read(tmp_path / "run" / recording.FILE)]
    assert {bool(group.images) for group in groups} == {False, True}, "rows of text alone train beside others"
    assert unexplained({name for m in metrics for name in m}) == [], "docs/metrics.md"
    assert [record["eval_id"] for record in read_jsonl(tmp_path / "run" / "eval.jsonl")] == ["v0", "v3"]
    before, after = (load_file(folder / "model.safetensors") for folder in (task / "model", tmp_path / "run" / "final"))
    assert before.keys() == after.keys()
    towers = {name for name in before if "visual." in name}
    assert towers and len(towers) < len(before)
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved - towers and bool(moved & towers) != freeze
    check_final(tmp_path / "run" / "final", task)
    assert read_vision(str(tmp_path / "run" / "final")) == read_vision(str(task / "model"))
    check_replay(tmp_path / "run", given)


def check_final(folder: Path, task: Path) -> None:
    """transformers loads it as the published models, in a process that knows nothing of Tandem, and so may anyone."""
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2_5_vl"
    assert (folder / "preprocessor_config.json").is_file() or (folder / "processor_config.json").is_file()
    code = f"""
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
model, info = AutoModelForImageTextToText.from_pretrained({str(folder)!r}, output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], info
pictures = Qwen2VLImageProcessorPil.from_pretrained({str(folder)!r})
image = pictures(images=[Image.open({str(task / "images" / "test-0000.png")!r})], return_tensors="pt")
text = "<|im_start|>user\\n<|vision_start|>" + "<|image_pad|>" * 9 + "<|vision_end|>Which shape is red?<|im_end|>\\n"
ids = AutoTokenizer.from_pretrained({str(folder)!r})(text, return_tensors="pt")["input_ids"]
kinds = (ids == model.config.image_token_id).int()
print(model.generate(input_ids=ids, mm_token_type_ids=kinds, max_new_tokens=2, do_sample=False, **image).shape[1])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip().isdigit(), done.stderr[-3000:]


def check_replay(run: Path, given: list[str]) -> None:
    """The recording alone gives the same weights, bit for bit: it holds the images, and no file of theirs is read."""
    folder = run.with_name("replayed")
    there = [f"run.replay={run / recording.FILE}", f"run.output_dir={folder}", "data.train=no such rows"]
    command = [sys.executable, "training_worker.py", "--config", CONFIG, *given, *there]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    environment = os.environ | rank | {"MASTER_PORT": str(free_port())}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit(200), check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found, expected = (load_file(each / "final" / "model.safetensors") for each in (folder, run))
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)

"""Two or three steps by `launcher.run`, with real vLLM and DeepSpeed: a tool, images, recipes, two ranks, two hosts."""

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from common.config import load
from common.durable import run_tag
from common.paths import ROOT
from common.wire.ports import free_port
from examples.calculator import Calculator
from examples.drawings import Drawings
from model.files.images import read_vision
from report.run_log import read_jsonl
from sampler.prompts.dataset import mixed_index
from tests.support import namespaces, own_process
from tests.support.judge_server import Server
from tests.support.metrics_page import unexplained
from tests.support.pupils import files_of
from tests.support.recipes import NAMES, PAGE, RECIPES, TINY, beside, local, of_page
from tests.support.tier import full
from tests.support.tiny import tiny_model, tiny_reward_model
from trainer.link import recording

pytestmark = pytest.mark.timeout(900)

SMALLER = ("trainer.max_steps=3", "trainer.prompts_per_step=4", "sampler.num_generations=4", "trainer.save_steps=null")
KNOWS_HOW_TO_CALL = Calculator(num_train=64, num_test=16, num_clean_steps=80, num_careless_steps=0)
# Tells completions apart where a model gives no right answer: equal rewards have no gradient.
REWARD = """
def few_letters(completions, **columns):
    return [-len(c if isinstance(c, str) else c[0]["content"]) / 100 for c in completions]
"""


def trained(config: str, folder: Path, *words: str, env: Mapping[str, str] = os.environ) -> list[dict[str, Any]]:
    """Runs it in folder/run. Its metrics, of every step once, with weights that the sampler has proved.

    Nothing is left elsewhere, also of processes that were killed: no file, socket or memory, of ours or of vLLM.
    """
    (folder / "reward.py").write_text(REWARD)
    command = [sys.executable, "-m", "launcher.run", config, f"run.output_dir={folder}/run", *words]
    with tempfile.TemporaryDirectory(prefix="t-") as elsewhere:
        own = {name: value for name, value in env.items() if name != "TORCHINDUCTOR_CACHE_DIR"}  # set by torch here
        own_process.run(command, 400, env={**own, "TMPDIR": elsewhere})
        memory = Path("/dev/shm").glob(f"{run_tag(folder / 'run')}*")
        assert [*Path(elsewhere).iterdir(), *memory] == []
    metrics = read_jsonl(folder / "run" / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, len(metrics) + 1))
    # a trainer that finds all groups of a step kept does not hear of a sampler in it
    assert max(m["sync/canary_max_diff"] for m in metrics if not m.get("link/kept")) <= 1e-4
    assert abs(metrics[0]["ratio/mean"] - 1) <= 1e-3, "only what the model wrote is trained, as it was sampled"
    assert unexplained({name for m in metrics for name in m}) == [], "docs/metrics.md"
    assert (folder / "run" / "final" / "model.safetensors").exists()
    return metrics


def test_three_steps_with_a_calculator(tmp_path: Path) -> None:
    files = files_of(KNOWS_HOW_TO_CALL, tmp_path / "task")
    metrics = trained("configs/quickstart_tools.yaml", tmp_path, *files, *SMALLER)
    assert len(metrics) == 3
    assert sum(m["rollout/tool_calls"] for m in metrics) > 0 and sum(m["rollout/observed_tokens"] for m in metrics) > 0
    asked = [s for s in read_jsonl(tmp_path / "run" / "samples.jsonl") if "<tool_response>" in json.dumps(s)]
    assert asked, "an answer of the calculator stands in a sample"


AGENT = ("rollout.tools=[]", "rollout.max_turns=7", "rewards.reward_funcs=[environment]", "rewards.full_marks={}")


@pytest.mark.parametrize("kind", ["function", "command"])
def test_two_steps_of_an_agent_that_only_knows_the_openai_package(kind: str, tmp_path: Path) -> None:
    files = files_of(replace(KNOWS_HOW_TO_CALL, context_length=512), tmp_path / "task")
    folder = "tests/support/agents"
    agent = f"{folder}/assistant.py:solve" if kind == "function" else f"[{sys.executable}, {folder}/program.py]"
    more = ["trainer.max_steps=2", "run.record=true", "sampler.max_completion_length=200", "vllm.max_model_len=512"]
    words = [*files, *SMALLER, *AGENT, *more, f"rollout.agent={agent}"]
    metrics = trained("configs/quickstart_tools.yaml", tmp_path, *words)
    assert len(metrics) == 2 and all(m["grad_norm"] > 0 for m in metrics)
    assert sum(m["rollout/tool_calls"] for m in metrics) > 0


def test_two_sources_and_a_kill_between_two_steps(tmp_path: Path) -> None:
    """One with a calculator, one of single turns that another reward scores: the groups are those of a whole run."""
    files = files_of(Calculator(num_train=32, num_test=16, num_clean_steps=40, num_careless_steps=0), tmp_path / "task")
    short = f"{tmp_path}/reward.py:few_letters"
    tools = {"path": f"{tmp_path}/task/train.jsonl", "name": "tools", "weight": 3, "rewards": ["answer", "thrift"]}
    held_out = {"path": f"{tmp_path}/task/test.jsonl", "name": "plain"}
    train = [tools, held_out | {"weight": 1, "rewards": ["few_letters"], "rollout": {}}]
    words = [*files, *SMALLER, "trainer.max_steps=2", "trainer.save_steps=1", "run.record=true"]
    words += [f"data.train={json.dumps(train)}", f"data.eval={json.dumps([held_out])}"]
    words += [f"rewards.reward_funcs=[answer, examples/calculator_tool.py:thrift, {short}]"]
    env = os.environ | {"TANDEM_FAILPOINT": "trainer.micro_batch:2:kill"}  # of each life: before the second step
    metrics = trained("configs/quickstart_tools.yaml", tmp_path, *words, env=env)
    groups = [recorded.group for recorded, _ in recording.read(tmp_path / "run" / recording.FILE)]
    assert [g.group_id for g in groups] == list(range(8))
    assert [g.problem_index for g in groups] == [mixed_index(g, 0, [(3, 32), (1, 16)]) for g in range(8)]
    assert [g.source for g in groups] == ["plain", "tools", "tools", "tools"] * 2
    for rollout in (r for g in groups for r in g.rollouts):
        assert list(rollout.rewards) == ["answer", "thrift", "few_letters"]
    assert all(r.turns == 1 and math.isnan(r.rewards["answer"]) for g in groups[::4] for r in g.rollouts)
    assert all(math.isnan(r.rewards["few_letters"]) for g in groups if g.source == "tools" for r in g.rollouts)
    assert [(m["sources/tools/groups"], m["sources/plain/groups"]) for m in metrics] == [(3, 1), (3, 1)]
    assert "hit 2: kill" in (tmp_path / "run" / "logs" / "trainer.log").read_text()
    assert [record["n"] for record in read_jsonl(tmp_path / "run" / "eval.jsonl")] == [16, 16]


# ---- images

DRAWINGS = "configs/quickstart_vlm.yaml"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "quickstart_vlm"
    files_of(Drawings(num_train=64, num_test=16, num_clean_steps=20, num_careless_steps=0, batch_size=16), folder)
    rows = read_jsonl(folder / "train.jsonl")
    for row in rows[::3]:  # text alone
        row.update(images=[], question=row["question"].removeprefix("<image>"))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("freeze", [False, pytest.param(True, marks=full)], ids=["trained", "frozen"])
def test_three_steps_on_drawings_with_the_tower(freeze: bool, task: Path, tmp_path: Path) -> None:
    given = [f"model.path={task}/model", f"data.train={task}/train.jsonl", f"data.eval={task}/test.jsonl"]
    given += [f"model.freeze_vision_tower={str(freeze).lower()}", "run.record=true", *SMALLER]
    given += [f"rewards.reward_funcs=[boxed, {tmp_path}/reward.py:few_letters]"]
    given += [] if freeze else ["algorithm.beta=0.01", "reference.on=sampler"]
    metrics, run = trained(DRAWINGS, tmp_path, *given), tmp_path / "run"
    assert len(metrics) == 3 and all(m["grad_norm"] > 0 for m in metrics)
    assert freeze or metrics[0]["kl"] < 1e-6 < metrics[2]["kl"]
    groups = [recorded.group for recorded, _ in recording.read(run / recording.FILE)]
    assert {bool(group.images) for group in groups} == {False, True}, "rows of text alone train beside others"
    assert [record["eval_id"] for record in read_jsonl(run / "eval.jsonl")] == ["v0", "v3"]
    before, after = (load_file(folder / "model.safetensors") for folder in (task / "model", run / "final"))
    assert before.keys() == after.keys()
    towers = {name for name in before if "visual." in name}
    assert towers and len(towers) < len(before)
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved - towers and bool(moved & towers) != freeze
    assert read_vision(str(run / "final")) == read_vision(str(task / "model"))
    check_final(run / "final", task)
    check_replay(run, given)


def check_final(folder: Path, task: Path) -> None:
    """transformers loads it as the published models, in a process that knows nothing of Tandem, and so may anyone."""
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
    assert own_process.run([sys.executable, "-c", code], cwd="/").strip().isdigit()


def check_replay(run: Path, given: list[str]) -> None:
    """The recording alone gives the same weights, bit for bit: it holds the images, and no file of theirs is read."""
    folder = run.with_name("replayed")
    there = [f"run.replay={run / recording.FILE}", f"run.output_dir={folder}", "data.train=no such rows"]
    command = [sys.executable, "training_worker.py", "--config", DRAWINGS, *given, *there]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    own_process.run(command, 200, env=os.environ | rank | {"MASTER_PORT": str(free_port())})
    found, expected = (load_file(each / "final" / "model.safetensors") for each in (folder, run))
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)


# ---- recipes, with a tiny model


@pytest.mark.parametrize(
    "name", ["rloo_qwen2.5_1.5b", *(pytest.param(n, marks=full) for n in NAMES if "rloo" not in n)]
)
def test_two_steps_of_a_recipe(name: str, tmp_path: Path) -> None:
    tiny_model(tmp_path / "model", hidden=128)  # four heads
    config = load(RECIPES / f"{name}.yaml")
    rewards = [*config.rewards.reward_funcs, f"{tmp_path}/reward.py:few_letters"]
    changes = [*local(tmp_path), *TINY, f"rewards.reward_funcs={json.dumps(rewards)}", "rewards.reward_weights=null"]
    changes.append(f"trainer.num_ranks={config.ranks_per_row}")
    if config.algorithm.soft_punish_cache:
        changes.append("algorithm.soft_punish_cache=4")
    if config.algorithm.steps_per_generation > 1:
        changes.append("algorithm.steps_per_generation=2")
    metrics = trained(f"configs/recipes/{name}.yaml", tmp_path, *changes)
    assert len(metrics) == 2 and all(m["grad_norm"] > 0 for m in metrics)


@full
@pytest.mark.parametrize("heading", PAGE)
def test_two_steps_of_a_recipe_of_the_page(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_reward_model(tmp_path / "reward", tiny_model(tmp_path / "model"))
    recipe = of_page(heading, tmp_path)
    rewards = () if "reward_funcs" in PAGE[heading] else (f"rewards.reward_funcs=[{tmp_path}/reward.py:few_letters]",)
    with Server() as judge:
        monkeypatch.setenv("OPENAI_BASE_URL", judge.url)
        assert len(trained(recipe, tmp_path, *beside(heading, tmp_path), *rewards)) == 2
    assert bool(judge.answered) == ("judge:" in PAGE[heading])


@full
@pytest.mark.parametrize("what", ["recipe", "notebook"])
def test_python_of_the_page_and_of_the_notebook_runs_as_it_stands(what: str, tmp_path: Path) -> None:
    if what == "notebook":
        (tmp_path / ".cache").mkdir()
        (tmp_path / ".cache" / "quickstart").symlink_to(ROOT / ".cache" / "quickstart")
        cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    else:
        (tmp_path / "my.yaml").touch()
        tiny_model(tmp_path / "model")
        text = PAGE["From Python"].split("```python")[1].split("```")[0]
        code = [text.replace('"trainer.max_steps=20"', f"*{[*local(tmp_path), *TINY]}")]
    run = f"import sys; sys.path.append({str(ROOT)!r})\nfor cell in {code}: exec(cell, globals())"
    own_process.run([sys.executable, "-c", run], 400, cwd=tmp_path)


# ---- two ranks


@full
def test_twenty_steps_of_five_prompts_on_two_ranks_are_on_policy_and_leave_their_checkpoints(tmp_path: Path) -> None:
    """ZeRO 3, and five groups, which no two ranks share evenly, with few tokens a micro-batch."""
    tiny_model(tmp_path / "model")
    words = [*local(tmp_path), *TINY[:1], "model.builder=null", "trainer.num_ranks=2", "trainer.max_steps=20"]
    words += ["trainer.prompts_per_step=5", "trainer.max_tokens_per_micro_batch=400", "trainer.save_steps=10"]
    words += ["deepspeed.zero_optimization.stage=3", "algorithm.beta=0.04", "sampler.num_generations=4"]
    words += [f"rewards.reward_funcs=[{tmp_path}/reward.py:few_letters]", "sampler.max_completion_length=16"]
    metrics = trained("configs/quickstart.yaml", tmp_path, *words)
    assert len(metrics) == 20 and metrics[-1]["policy_version"] == 20
    assert all(m["staleness/mean"] == 0 and m["grad_norm"] > 0 and 0 < m["rank_imbalance"] < 1 for m in metrics)
    assert abs(metrics[0]["kl"]) <= 1e-6 and metrics[-1]["kl"] > 1e-7, "the policy moved away from its reference"
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step_000010", "step_000020"] and not [*(tmp_path / "run").rglob(".tmp-*")]


# ---- `launch.sh run --hosts`: ranks on two hosts, real vLLM on the second, an encrypted link between them


@full
def test_a_run_over_two_hosts_trains_publishes_and_ends_with_its_final_model(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    tiny_model(tmp_path / "model")
    (tmp_path / "hosts").write_text(f"{hosts[0]} slots=1\n{hosts[1]} slots=1 samplers=1\n")
    words = [*local(tmp_path), *TINY[:1], *SMALLER, "model.builder=null", "sampler.max_completion_length=8"]
    words += [f"rewards.reward_funcs=[{tmp_path}/reward.py:few_letters]", "--hosts", str(tmp_path / "hosts")]
    env = os.environ | namespaces.ENVIRONMENT | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    assert len(trained("configs/quickstart.yaml", tmp_path, *words, env=env)) == 3
    names = {path.name for path in (tmp_path / "run" / "logs" / "hosts").iterdir()}
    assert names == {f"{hosts[0]}-trainer.log", f"{hosts[1]}-trainer.log", f"{hosts[1]}-sampler.log"}

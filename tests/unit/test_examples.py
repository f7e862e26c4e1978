"""The quick starts: problems, tokenizer, warm start, build. What a model learns is the end-to-end tests' business."""

import functools
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common import config
from common.config import PromptTemplate
from common.paths import ROOT
from environments import Done
from environments.tools import schemas
from examples import countdown
from examples.calculator import Calculator, ToolProblem, conversation, turns_of, without_calculator
from examples.calculator_tool import calculator as compute
from examples.calculator_tool import thrift
from examples.countdown_reward import equation
from examples.drawings import completion as described
from examples.example import build, is_wanted, stamp, warm_start
from examples.quickstart import MIXTURE, completion, prompt_ids
from examples.search import Lookup, facts
from examples.search_tool import search
from examples.thinking import Story
from examples.thinking import completion as thought
from examples.thinking_environment import StoryTurns
from sampler.prompts.chat_template import render
from sampler.prompts.dataset import load_data
from sampler.prompts.messages import as_messages
from sampler.turns.turns import TurnTemplate
from tests.support.examples import TINY
from tests.support.tiny import dense_logprobs

PRODUCT = ToolProblem("product", 76, 49, "Ken has 76 boxes with 49 pens each. How many pens?")
every = pytest.mark.parametrize("name", TINY)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name -> the folder that is built, once."""

    @functools.cache
    def built(name: str) -> Path:
        folder = tmp_path_factory.mktemp("cache") / name
        assert build(TINY[name], folder, report=lambda line: None)
        return folder

    return built


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder / "model"))


# --- problems

# What decides whether a problem is held out: the same for every seed.
DECIDES = {
    "quickstart": lambda p: (p.kind, p.numbers),
    "quickstart_tools": lambda p: (p.a, p.b) if p.kind == "product" else p.question,
    "quickstart_search": lambda p: p.town if p.kind == "lookup" else p.question,
    "quickstart_countdown": lambda p: p.nums,
    "quickstart_thinking": lambda p: (p.start, p.changes),
    "quickstart_vlm": lambda p: (p.image().tobytes(), p.question),
}


@every
def test_no_held_out_problem_is_trained_on_with_any_seed(name: str) -> None:
    example, key = TINY[name], DECIDES[name]
    test, train = example.split("test", 300), example.split("train", 3000)
    other = replace(example, seed=5).split("train", 1000)
    assert len({repr(p) for p in test}) == 300 and len({repr(p) for p in train}) == 3000
    assert not {key(p) for p in test} & {key(p) for p in [*train, *other]}
    assert example.split("train", 100) == train[:100] != other[:100]


# --- what the pupil is shown

# What a pupil is shown of a problem: wrong or laid out wrongly as often as asked.
SHOWN: dict[str, tuple[Any, str]] = {
    "quickstart": (completion, "223192327ac731b0"),
    "quickstart_tools": (
        lambda p, rng, **spoiled: [turns_of(p, rng, by_heart=0.5, **spoiled), without_calculator(p, rng)],
        "a666071495618e6f",
    ),
    "quickstart_search": (
        lambda p, rng, **spoiled: [turns_of(p, rng, by_heart=1.0, **spoiled), without_calculator(p, rng)],
        "5ab5bfc87b0f28e8",
    ),
    "quickstart_countdown": (countdown.solution, "54452938da488d53"),
    "quickstart_thinking": (
        lambda p, rng, **spoiled: [
            thought(replace(p, changes=p.changes[:n], thinks=n < 3), rng, **spoiled) for n in (1, 2, 3)
        ],
        "3054a2d26aeaeb8f",
    ),
    "quickstart_vlm": (described, "885b81c0459f8a0e"),
}


@every
def test_problems_and_what_is_shown_of_them_are_those_of_the_published_figures(name: str) -> None:
    """A digest: whoever means to change them measures the pages' figures again."""
    rng, (show, digest) = random.Random(0), SHOWN[name]
    problems = [problem for split in ("train", "test") for problem in TINY[name].split(split, 500)]
    chances = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, 0.5)]
    shown = [show(p, rng, wrong=w, malformed=m) for p in problems for w, m in chances]
    shown += [problem.image().tobytes() for problem in problems[::50] if name == "quickstart_vlm"]
    assert hashlib.sha256(repr([problems, shown]).encode()).hexdigest()[:16] == digest


def test_the_calculator_and_its_cost() -> None:
    assert [compute(e) for e in ("76*49", " 7 + 5", "9-4")] == ["3724", "12", "5"]
    with pytest.raises(ValueError, match="two numbers"):
        compute("__import__('os')")
    said, answer = {"role": "assistant", "content": "…"}, {"role": "tool", "content": "4"}
    assert thrift([[said, answer, said], [said], "text"]) == [-0.2, 0.0, 0.0]


@pytest.mark.parametrize(
    ("written", "reward"),
    [
        ("7+14-3", 1.0),
        (" 14 - (3 - 7) ", 1.0),
        ("7+14-3=18", 1.0),
        ("18", 0.0),
        ("7+14", 0.0),
        ("7+14-3+3-3", 0.0),
        ("7*14/3", 0.0),
        ("7/(14-14)", 0.0),
        ("7+(14-3", 0.0),
        ("7**14//3", 0.0),
        ("__import__('os')", 0.0),
    ],
)
def test_an_equation_of_countdown_uses_each_number_once_and_makes_the_target(written: str, reward: float) -> None:
    completion = f"<think>7+14=21, 21-3=18</think><answer>{written}</answer>"
    assert equation([completion], [18], [[7, 14, 3]]) == [reward]
    assert equation([f"The answer is {written}"], [18], [[7, 14, 3]]) == [0.0]


def test_the_pupil_of_countdown_is_asked_as_the_config_asks(folder_of: Any) -> None:
    rows = f"data.train={folder_of('quickstart_countdown')}/train.jsonl"
    given = config.load(ROOT / "configs/quickstart_countdown.yaml", [rows])
    [first, *_] = load_data("data.train", given.data.train, given.data)
    [message] = as_messages(first, given.data, given.prompt)
    assert message["content"] == countdown.PROMPT.format(**first.columns)


def test_a_search_finds_the_line_of_each_question() -> None:
    for thing, town, year in facts():
        problem = Lookup("lookup", year, 0, "When?", thing, town)
        assert search(problem.expression) == f"The {thing} of {town} was built in {year}."
    assert len(facts()) == 1200
    with pytest.raises(ValueError, match="no line of the register"):
        search("2+2")


STORY = Story("Ken", "pens", 12, ((6, 5), (4, 1), (2, 6)))


def test_a_story_asks_three_totals_and_gives_a_point_for_each_that_stands_behind_the_thought() -> None:
    row = STORY.row()
    assert row["question"] == "Ken has 12 pens, buys 6 and gives away 5. How many now?"
    assert (row["then"][1], row["totals"]) == ("Ken buys 2 and gives away 6. How many now?", [13, 16, 12])
    told = StoryTurns()
    assert told.reset(**row) is None, "the row's own prompt"
    assert told.step("<think>12+6=18,18-5=13</think>13") == (row["then"][0], 1.0)
    assert told.step("<think>13+4=17,17-1=16</think>15") == (row["then"][1], 0.0)
    assert told.step("12") == Done(1.0), "without a thought"


def test_every_turn_of_a_story_follows_a_history_that_was_rewritten(folder_of: Any) -> None:
    """The template drops the thought, and the model is taught behind what it leaves."""
    tokenizer = tokenizer_of(folder_of("quickstart_thinking"))
    written = functools.partial(render, tokenizer, prompt=PromptTemplate())
    ask = [{"role": "user", "content": STORY.questions[0]}]
    template = TurnTemplate.of(written, lambda text: tokenizer(text)["input_ids"], ask, ["user"])
    assert "A thought." in template.rewrites
    first = thought(replace(STORY, changes=STORY.changes[:1]), random.Random(0), wrong=0.0)
    more = [{"role": "user", "content": STORY.questions[1]}]
    followed = written([*ask, {"role": "assistant", "content": first}, *more])
    assert tokenizer(followed)["input_ids"] == prompt_ids(replace(STORY, changes=STORY.changes[:2]).messages, tokenizer)
    assert first.startswith("<think>12+6=18") and "<think>" not in followed
    quiet = written(ask, arguments={"enable_thinking": False})
    assert quiet == written(ask) + "<think></think>"


def test_the_warm_start_teaches_the_tokens_that_a_run_samples_and_no_other(folder_of: Any) -> None:
    tokenizer = tokenizer_of(folder_of("quickstart_tools"))
    tools = schemas({"calculator": compute})
    rendered = functools.partial(render, tokenizer, prompt=PromptTemplate(), tools=tools)
    ask = [{"role": "user", "content": PRODUCT.question}]
    template = TurnTemplate.of(rendered, lambda text: tokenizer(text)["input_ids"], ask, ["tool"])
    turns = turns_of(PRODUCT, random.Random(0), by_heart=0, wrong=0, malformed=0)
    shown = conversation(compute, PRODUCT, turns, template.tokenize(rendered(ask)), template, tokenizer.eos_token_id)
    call, answer = ({"role": "assistant", "content": turn} for turn in turns)
    said = [*ask, call, {"role": "tool", "content": "3724"}, answer]
    whole = tokenizer.apply_chat_template(said, tools=tools, tokenize=False)
    assert tokenizer.decode(shown.token_ids) + "\n" == whole
    taught = [i for i, is_taught in zip(shown.token_ids, shown.is_taught, strict=True) if is_taught]
    assert tokenizer.decode(taught) == f"{turns[0]}<|im_end|>{turns[1]}<|im_end|>"
    assert len(shown.token_ids) < 130, "the configuration's lengths hold it"


def test_the_loss_is_that_of_the_answers_tokens_alone() -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from examples.warm_start import asked, loss_of

    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=32, intermediate_size=32, **shape))
    prompts, answers = [[3, 4, 5], [6, 7]], [[8, 2], [9, 1, 10, 2]]
    alone = torch.cat([dense_logprobs(model, *each) for each in zip(prompts, answers, strict=True)])  # unpadded
    shown = [asked(prompt).plus(answer, True) for prompt, answer in zip(prompts, answers, strict=True)]
    assert loss_of(model, shown, pad_id=0).item() == pytest.approx(-alone.mean().item(), abs=1e-5)


# --- tokenizer and prompts

# name: a text as its pieces; a message, and what the template writes of it
TOKENS: dict[str, tuple[str, Any, str]] = {
    "quickstart": ("<think> 1 2 + 7 = 1 9 </think> <answer> 1 9 </answer>", "2+2?", "2+2?"),
    "quickstart_tools": ("<tool_call> 1 9 </tool_call>", "2+2?", "2+2?"),
    "quickstart_search": ("<tool_call> 1 9 </tool_call>", "2+2?", "2+2?"),
    "quickstart_countdown": ("<think> 1 2 + 7 = 1 9 </think> <answer> 1 2 + 7 </answer>", "2+2?", "2+2?"),
    "quickstart_thinking": ("<think> 1 2 + 7 = 1 9 </think> 1 9", "2+2?", "2+2?"),
    "quickstart_vlm": (
        r"<think> 2 Ġred Ġcircle </think> \boxed{ 2 }",
        [{"type": "image"}, {"type": "text", "text": "2+2?"}],
        "<|vision_start|><|image_pad|><|vision_end|>2+2?",
    ),
}


@every
def test_the_tokenizer_keeps_digits_and_tags_whole_and_any_text_comes_back(name: str, folder_of: Any) -> None:
    tokenizer = tokenizer_of(folder_of(name))
    pieces, content, turn = TOKENS[name]
    text = pieces.replace(" ", "").replace("Ġ", " ")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces.split()
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    for strange in ("Grüße, 東京 🙂\n\ttab", "a  b <b> <|x|>", "Ken's 1,234.50"):
        assert tokenizer.decode(tokenizer(strange, add_special_tokens=False)["input_ids"]) == strange
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@every
def test_the_sampler_makes_the_prompts_that_the_warm_start_was_taught_and_they_fit(name: str, folder_of: Any) -> None:
    from model.files.images import decode_patches, read_vision
    from model.tokenizer import load_tokenizer
    from sampler.prompts.prompts import make_prompt

    folder, settings = folder_of(name), config.load(ROOT / "configs" / f"{name}.yaml")
    tokenizer = load_tokenizer(str(folder / "model"))
    vision = read_vision(str(folder / "model")) if settings.data.image_key else None
    problems = load_data("data.eval", str(folder / "test.jsonl"), settings.data)
    few = replace(TINY[name], batch_size=1, **({"without_tools": 1.0} if isinstance(TINY[name], Calculator) else {}))
    for problem, made in zip(problems, few.split("test", 20), strict=True):
        prompt = make_prompt(problem, tokenizer, settings, vision)
        if isinstance(made, Story):  # its first turn
            made = replace(made, changes=made.changes[:1])
        (shown,) = few.lessons([made], tokenizer)(random.Random(0), 0.0, 0.0)
        asked = shown.is_taught.index(True)
        assert prompt.token_ids.tolist() == shown.token_ids[:asked] and not any(shown.is_taught[:asked])
        assert asked <= settings.data.max_prompt_length
        assert len(shown.token_ids) - asked <= settings.sampler.max_completion_length
        for image in prompt.images:
            assert prompt.token_ids.tolist().count(vision.image) == 84 * 84 // 28**2
            assert (decode_patches(image, vision.form) == shown.patches.numpy()).all()
    needed = settings.data.max_prompt_length + settings.sampler.max_completion_length
    assert needed <= settings.vllm["max_model_len"] <= TINY[name].context_length


# --- the build


@every
def test_the_build_writes_what_the_configuration_reads(name: str, folder_of: Any, tmp_path: Path) -> None:
    folder, settings, example = folder_of(name), config.load(ROOT / "configs" / f"{name}.yaml"), TINY[name]
    for path in (settings.data.train, settings.data.eval, settings.model.path):
        assert str(path).startswith(f"{example.folder}/") and (folder / Path(path).relative_to(example.folder)).exists()
    for split, size in (("train", 60), ("test", 20)):
        rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        problems = example.split(split, size)
        assert rows == [example.row(problem, f"{split}-{i:04d}", tmp_path) for i, problem in enumerate(problems)]


@every
def test_the_warm_start_is_the_same_twice_and_moves_every_matrix(name: str) -> None:
    import torch

    example = replace(TINY[name], num_layers=1)
    problems = example.split("train", 16)
    tokenizer = example.train_tokenizer(problems)
    one, two = (warm_start(example, problems, tokenizer, print).state_dict() for _ in range(2))
    assert all(torch.equal(one[key], two[key]) for key in one)
    torch.manual_seed(example.seed)
    start = example.random_model(tokenizer).state_dict()
    assert all(not torch.equal(one[key], start[key]) for key in one if key.endswith("weight"))


def test_lesson_one_is_clean_and_lesson_two_spoiled_at_a_lower_rate(folder_of: Any) -> None:
    from examples.warm_start import asked, teach

    example = replace(TINY["quickstart"], num_clean_steps=40, num_careless_steps=2, num_layers=1)
    model = example.random_model(tokenizer_of(folder_of("quickstart")))
    given, before, moved, said = [], model.model.norm.weight.detach().clone(), [], []

    def lessons(rng: random.Random, wrong: float, malformed: float) -> list[Any]:
        given.append((wrong, malformed))
        now = model.model.norm.weight.detach()
        moved.append((now - before).abs().max().item())
        before.copy_(now)
        return [asked([1, 2]).plus([3], True)]

    assert not teach(model, example, lessons, 0, said.append).training
    assert given == [(0.0, 0.0)] * 40 + [(0.25, 0.45)] * 2
    assert moved[1] == pytest.approx(example.learning_rate / 20, rel=0.02), "a warm-up over 20 steps"
    assert max(moved[30:]) < example.learning_rate
    assert float(re.search(r"step 42/42  loss ([\d.]+)", said[-1])[1]) < 0.1  # log(vocabulary) is 6


def test_another_setting_or_unfinished_folder_is_built_again_and_a_failed_build_changes_nothing(tmp_path: Path) -> None:
    folder, lines = tmp_path / "quickstart", []
    one = replace(TINY["quickstart"], num_train=20, num_test=5, num_clean_steps=1, num_careless_steps=0, num_layers=1)
    two = replace(one, num_train=21)
    (tmp_path / ".tmp-quickstart").mkdir()
    (tmp_path / ".tmp-quickstart" / "half").write_text("what a killed build left")
    assert build(one, folder, lines.append) and not build(one, folder, lines.append)
    assert (folder / "stamp").read_text() == stamp(one) != stamp(two)
    assert not (folder / "half").exists()
    assert build(two, folder, lines.append)
    assert len((folder / "train.jsonl").read_text().splitlines()) == 21
    (folder / "stamp").unlink()
    assert build(two, folder, lines.append)
    with pytest.raises((ZeroDivisionError, ValueError)):
        build(replace(two, hidden_size=48), folder, lines.append)  # no KV head
    assert (folder / "stamp").read_text() == stamp(two) and not build(two, folder, lines.append)


@every
def test_each_is_a_command_that_imports_no_torch_where_all_is_there(name: str, tmp_path: Path) -> None:
    example = type(TINY[name])()
    folder = tmp_path / example.folder
    folder.mkdir(parents=True)
    (folder / "stamp").write_text(stamp(example))
    command = [sys.executable, "-X", "importtime", "-m", type(example).__module__]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, [*folder.iterdir()]) == (0, "", [folder / "stamp"])
    assert not re.search(r"\| +(torch|transformers)$", done.stderr, re.MULTILINE)
    folder.with_name(f"{folder.name}.lock").mkdir()
    assert subprocess.run(command, cwd=tmp_path, env=env).returncode == 0, "another user may have made it"
    (folder / "stamp").unlink()
    assert subprocess.run(command, cwd=tmp_path, env=env, capture_output=True).returncode != 0


def test_a_run_on_another_model_and_other_rows_builds_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert is_wanted(folder, [])
    assert is_wanted(folder, ["own/model", str(folder / "train.jsonl")])
    assert not is_wanted(folder, ["own/model", str(tmp_path / "made_by_me" / "train.jsonl")])


def test_the_mixture_has_a_quick_start_with_its_own_config_and_a_million_parameters(folder_of: Any) -> None:
    settings = config.load(ROOT / "configs" / f"{MIXTURE.folder.name}.yaml", [])
    assert Path(settings.model.path) == MIXTURE.folder / "model" and settings.model.builder == "examples.quickstart"
    model = MIXTURE.random_model(tokenizer_of(folder_of("quickstart")))
    assert (model.config.model_type, model.config.num_experts) == ("qwen3_moe", 8)
    assert 0.7e6 < sum(p.numel() for p in model.parameters()) < 1.3e6

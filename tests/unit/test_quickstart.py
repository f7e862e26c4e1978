"""The quick start: problems, tokenizer, warm start, build. What the model learns is the end-to-end test's business."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common import config, durable, errors
from examples.quickstart import problems
from examples.quickstart.build import build, stamp
from examples.quickstart.settings import QuickStart, WarmStart

ROOT = Path(__file__).resolve().parents[2]
TINY = QuickStart(
    num_train=200, num_test=40, warm_start=WarmStart(num_clean_steps=3, num_careless_steps=2, batch_size=8)
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "quickstart"
    assert build(folder, TINY, report=lambda line: None)
    return folder


def total(question: str) -> int:
    """The answer from the text alone: what the owner of the asked-for things has after each event."""
    event = re.compile(
        r"has (?P<boxes>\d+) boxes with (?P<each>\d+) (?P<boxed>[a-z]+) each|has (?P<has>\d+) (?P<things>[a-z]+)"
        r"|buys (?P<buys>\d+) more|gives away (?P<gives>\d+)"
    )
    have = 0
    for match in event.finditer(question):
        found = {key: int(value) for key, value in match.groupdict().items() if value and value.isdigit()}
        have += found.get("has", 0) + found.get("boxes", 0) * found.get("each", 0)
        have += found.get("buys", 0) - found.get("gives", 0)
    return have


def test_rows_have_the_columns_of_gsm8k_and_end_with_the_gold_number():
    for problem in problems.split("train", 300, seed=0):
        row = problem.row()
        assert list(row) == ["question", "answer"]
        assert row["question"].endswith("?")
        reasoning, mark, gold = row["answer"].rpartition("\n#### ")
        assert mark and re.fullmatch(r"\d+", gold) and reasoning


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Ken has 7 pens, buys 5 more and gives away 3. How many pens are left?", 9),
        ("Tom is 4. Ken has 6 boxes with 7 pens each. How many pens does Ken have?", 42),
        ("Ken has 9 pens and gives away 2. Tom has 8. How many pens are left?", 7),
    ],
)
def test_the_oracle_of_these_tests_answers_as_a_person_would(question: str, expected: int):
    assert total(question) == expected


@pytest.mark.parametrize("kind", problems.KINDS)
def test_gold_answers_follow_from_the_text_of_the_question(kind: str):
    found = [p for p in problems.split("train", 2000, seed=1) + problems.split("test", 500, seed=1) if p.kind == kind]
    assert len(found) > 50
    for problem in found:
        assert problem.result == total(problem.question), problem.question
        assert problem.row()["answer"].endswith(f"#### {total(problem.question)}")
        assert 0 <= problem.result <= 81


def test_every_step_of_the_reasoning_is_true_and_the_last_gives_the_answer():
    operations = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
    for problem in problems.split("train", 2000, seed=2):
        for step in problem.steps:
            a, sign, b, result = re.fullmatch(r"(\d+)([+*-])(\d+)=(\d+)", step).groups()
            assert operations[sign](int(a), int(b)) == int(result)
        assert problem.steps[-1].endswith(f"={problem.result}")


def test_no_held_out_problem_shares_its_question_or_its_kind_and_numbers_with_training():
    train, test = problems.split("train", 8192, seed=0), problems.split("test", 512, seed=0)
    assert (len(train), len(test)) == (8192, 512)
    assert not {p.question for p in train} & {p.question for p in test}
    assert not {(p.kind, p.numbers) for p in train} & {(p.kind, p.numbers) for p in test}
    assert {p.kind for p in test} == set(problems.KINDS)
    assert len({p.question for p in test}) == 512


def test_the_numbers_that_decide_the_split_are_those_of_the_question():
    for problem in problems.split("test", 300, seed=0):
        assert sorted(problem.numbers) == sorted(int(n) for n in re.findall(r"\d+", problem.question))


def test_the_same_seed_gives_the_same_rows_and_another_seed_gives_others():
    assert problems.split("train", 100, seed=3) == problems.split("train", 100, seed=3)
    assert problems.split("train", 100, seed=3) != problems.split("train", 100, seed=4)


def test_the_first_held_out_problem_is_the_same_on_every_machine():
    written = 'from examples.quickstart.problems import split; print(split("test", 1, 0)[0].question)'
    seen = {
        subprocess.run(
            [sys.executable, "-c", written], cwd=ROOT, env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_completions_are_wrong_and_malformed_exactly_when_asked():
    from examples.quickstart.warm_start import completion

    row = {"question": "?", "answer": "7+5=12\n12-3=9\n#### 9"}
    rng = random.Random(0)
    assert completion(row, rng, wrong=0, malformed=0) == "<think>7+5=12, 12-3=9</think><answer>9</answer>"
    wanted = re.compile(r"<think>7\+5=12, 12-3=(\d+)</think><answer>(\d+)</answer>")
    wrong = [wanted.fullmatch(completion(row, rng, wrong=1, malformed=0)).groups() for _ in range(100)]
    assert all(answer != "9" for _, answer in wrong)
    assert {step == "9" for step, _ in wrong} == {True, False}  # slips of copying and slips of calculation
    malformed = [completion(row, rng, wrong=0, malformed=1) for _ in range(100)]
    assert not any(wanted.fullmatch(text) for text in malformed) and len(set(malformed)) == 7
    assert all(re.findall(r"\d+", text)[-1] == "9" for text in malformed)


def test_a_wrong_completion_for_zero_is_never_zero():
    from examples.quickstart.warm_start import completion

    row, rng = {"answer": "4-4=0\n#### 0"}, random.Random(0)
    assert not any(completion(row, rng, wrong=1, malformed=0).endswith(">0</answer>") for _ in range(100))


def test_the_tokenizer_takes_one_token_per_digit_and_tag_and_any_text_comes_back(built: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(built / "model"))
    text = "<think>12+7=19</think><answer>19</answer>"
    pieces = ["<think>", "1", "2", "+", "7", "=", "1", "9", "</think>", "<answer>", "1", "9", "</answer>"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    for strange in ("Grüße, 東京 🙂\n\ttab", "a  b <b> <|x|>", "Ken's 1,234.50"):
        assert tokenizer.decode(tokenizer(strange, add_special_tokens=False)["input_ids"]) == strange


def test_the_chat_template_of_the_saved_tokenizer_gives_chatml_and_its_special_ids(built: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(built / "model"))
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "2+2?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False).endswith("2+2?<|im_end|>\n")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (ids.count(start), ids.count(end)) == (3, 2)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "system\nS\nuser\n2+2?\nassistant\n"


def test_the_built_folder_loads_as_a_tied_float32_qwen2_that_fits_its_tokenizer(built: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(built / "model"), dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(str(built / "model"))
    assert type(model).__name__ == "Qwen2ForCausalLM" and model.dtype is torch.float32
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert 0.5e6 < sum(p.numel() for p in model.parameters()) < 1.5e6
    ids = torch.tensor([tokenizer("Ken has 7 pens.")["input_ids"]])
    assert torch.isfinite(model(input_ids=ids).logits).all()


def test_the_loss_is_that_of_the_answers_tokens_alone():
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from examples.quickstart.warm_start import answer_loss

    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=32, intermediate_size=32, **shape))
    prompts, answers = [[3, 4, 5], [6, 7]], [[8, 2], [9, 1, 10, 2]]
    terms = []
    for prompt, answer in zip(prompts, answers, strict=True):  # one by one, unpadded
        for i, token in enumerate(answer):
            logits = model(input_ids=torch.tensor([prompt + answer[:i]])).logits[0, -1]
            terms.append(-torch.log_softmax(logits, -1)[token].item())
    assert answer_loss(model, prompts, answers, pad_id=0).item() == pytest.approx(sum(terms) / 6, abs=1e-5)


def test_the_warm_start_lowers_the_loss():
    from examples.quickstart.tokenizer import train_tokenizer
    from examples.quickstart.warm_start import train

    rows = [problem.row() for problem in problems.split("train", 64, seed=0)]
    lines: list[str] = []
    how = WarmStart(num_clean_steps=60, num_careless_steps=0, batch_size=8, num_layers=1, hidden_size=64)
    train(rows, train_tokenizer(rows, 512, 256), how, seed=0, report=lines.append)
    last = float(re.search(r"step 60/60  loss ([\d.]+)", lines[-1]).group(1))
    assert last < 3.0  # log(vocabulary) is 6


def test_the_build_writes_what_the_quick_start_configuration_reads(built: Path):
    settings = config.load(ROOT / "configs" / "quickstart.yaml")
    for path in (settings.data.train, settings.data.eval, settings.model.path):
        assert path.startswith(".cache/quickstart/") and (built / Path(path).relative_to(".cache/quickstart")).exists()
    rows = [json.loads(line) for line in (built / "test.jsonl").read_text().splitlines()]
    assert rows == [problem.row() for problem in problems.split("test", 40, seed=0)]
    assert len((built / "train.jsonl").read_text().splitlines()) == 200


def test_every_prompt_fits_the_quick_start_configuration(built: Path):
    from transformers import AutoTokenizer

    from examples.quickstart.warm_start import _prompt_ids

    settings = config.load(ROOT / "configs" / "quickstart.yaml")
    tokenizer = AutoTokenizer.from_pretrained(str(built / "model"))
    longest = max(len(_prompt_ids(p.question, tokenizer)) for p in problems.split("train", 1000, seed=0))
    assert longest <= settings.data.max_prompt_length
    needed = settings.data.max_prompt_length + settings.sampler.max_completion_length
    assert needed <= settings.vllm["max_model_len"] <= TINY.warm_start.context_length


def test_a_second_build_does_nothing_and_imports_no_torch(built: Path):
    before = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    again = (
        "import sys; from pathlib import Path; from examples.quickstart.build import build\n"
        "from examples.quickstart.settings import QuickStart, WarmStart\n"
        f"was_built = build(Path({str(built)!r}), {TINY!r}, print)\n"
        "print(was_built, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", again], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*")} == before


def test_another_setting_or_an_unfinished_folder_is_built_again(tmp_path: Path):
    folder, lines = tmp_path / "quickstart", []
    one = QuickStart(
        num_train=20, num_test=5, warm_start=WarmStart(num_clean_steps=1, num_careless_steps=0, batch_size=2)
    )
    two = QuickStart(num_train=21, num_test=5, warm_start=one.warm_start)
    (tmp_path / ".tmp-quickstart").mkdir()
    (tmp_path / ".tmp-quickstart" / "half").write_text("what a killed build left")
    assert build(folder, one, lines.append) and not build(folder, one, lines.append)
    assert (folder / "stamp").read_text() == stamp(one) != stamp(two)
    assert not (folder / "half").exists()
    assert build(folder, two, lines.append)
    assert len((folder / "train.jsonl").read_text().splitlines()) == 21
    (folder / "stamp").unlink()
    assert build(folder, two, lines.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quickstart", "quickstart.lock"]


def test_a_build_that_fails_leaves_the_old_folder_alone(built: Path):
    broken = QuickStart(num_train=20, num_test=5, warm_start=WarmStart(hidden_size=48, num_clean_steps=1))  # no KV head
    before = (built / "stamp").read_text()
    with pytest.raises((ZeroDivisionError, ValueError)):
        build(built, broken, report=lambda line: None)
    assert (built / "stamp").read_text() == before
    assert not build(built, TINY, report=lambda line: None)


def test_two_builds_at_once_are_refused_with_the_name_of_the_first(tmp_path: Path):
    with (
        durable.lock(tmp_path / "quickstart.lock", RuntimeError),
        pytest.raises(errors.UserError, match=r"is being built by another process \(pid \d+\)"),
    ):
        build(tmp_path / "quickstart", TINY, report=lambda line: None)

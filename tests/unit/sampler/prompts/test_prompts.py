"""Problems through the chat template: text, token ids, what rewards get as prompts, and what is filtered."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import Config
from common.errors import UserError
from common.paths import ROOT
from common.types import Problem
from launcher import check_rewards, plan
from model.tokenizer import load_tokenizer
from sampler.data_source import prompts_of
from sampler.prompts.many_prompts import make_prompts
from sampler.prompts.prompts import make_prompt
from tests.support.configs import config_of
from tests.support.tiny import tiny_model
from tests.support.vision import byte_tokenizer

CHATML = ROOT / "configs" / "templates" / "chatml.jinja"


@pytest.fixture(scope="module")
def tokenizer():
    """As base models have it, without a chat template."""
    return byte_tokenizer("<|im_start|>", "<|im_end|>")


def problem(question, **columns):
    return Problem(0, {"question": question, "answer": "#### 4", **columns})


def made(tokenizer, question, columns=None, chat_template=CHATML, **template):
    """The prompt of a row, through prompt.… of these settings."""
    config = config_of(prompt={"chat_template": chat_template, **template})
    return make_prompt(problem(question, **(columns or {})), tokenizer, config)


ASK, MINE = {"role": "user", "content": "2+2?"}, {"role": "system", "content": "Mine."}
ADD, PREFILLED = {"role": "system", "content": "Add."}, {"role": "assistant", "content": "<think>"}
EXAMPLES = [{"user": "1+1?", "assistant": "#### 2"}, {"assistant": "#### 6", "user": "3+3?"}]
SHOTS = [{"role": role, "content": example[role]} for example in EXAMPLES for role in ("user", "assistant")]
SHAREGPT = [{"from": "system", "value": "Add."}, {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
# of the Orz data as it is read: both messages have the fields of each
ORZ = [
    {"from": "human", "value": "2+2?", "ground_truth": None},
    {"from": "assistant", "value": None, "ground_truth": {"value": "4"}},
]
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


@pytest.mark.parametrize(
    ("row", "template", "turns", "for_rewards"),
    [
        ("2+2?", {"system": "Add."}, [ADD, ASK], "2+2?"),
        ([ASK], {"system": "Add."}, [ADD, ASK], [ADD, ASK]),
        ([MINE, ASK], {"system": "Add."}, [MINE, ASK], [MINE, ASK]),
        ("2+2?", {"system": "Add.", "examples": EXAMPLES}, [ADD, *SHOTS, ASK], "2+2?"),
        ([MINE, ASK], {"system": "Add.", "examples": EXAMPLES}, [MINE, *SHOTS, ASK], [MINE, *SHOTS, ASK]),
        (SHAREGPT, {}, [ADD, ASK], [ADD, ASK]),
        (ORZ, {}, [ASK], [ASK]),
        ([ASK, PREFILLED], {}, [ASK, PREFILLED], [ASK, PREFILLED]),
        ([{"from": "gpt", "value": "<think>"}], {}, [PREFILLED], [PREFILLED]),  # a row is never left without a message
        (" 2+2? ", {"format": "{{ content | trim }} ({{ level }}) \\boxed{}.\n"}, ["2+2? (easy) \\boxed{}."], " 2+2? "),
        (TALK, {"format": "<{{ content }}>"}, [*TALK[:2], "<c>"], [*TALK[:2], {"role": "user", "content": "<c>"}]),
    ],
)
def test_a_row_becomes_turns_and_rewards_get_text_or_messages(tokenizer, tmp_path, row, template, turns, for_rewards):
    template = dict(template)
    if "format" in template:
        (tmp_path / "format.jinja").write_text(template.pop("format"))
        template["format_prompt"] = tmp_path / "format.jinja"
    turns = [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in turns]
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    text = text.removesuffix("<|im_end|>\n") if turns[-1] is PREFILLED else text + "<|im_start|>assistant\n"
    prompt = made(tokenizer, row, {"level": "easy"}, **template)
    assert (prompt.text, prompt.for_rewards) == (text, for_rewards)


def test_rewards_of_several_turns_get_messages(tokenizer):
    template, answer = {"chat_template": CHATML, "system": "Add."}, {"reward_funcs": ["answer"]}
    several_turns = config_of(prompt=template, rollout={"tools": ["my.py:f"]}, rewards=answer)
    assert make_prompt(problem("2+2?"), tokenizer, several_turns).for_rewards == [ADD, ASK]


def test_token_ids_are_the_text_one_to_one_without_added_tokens(tokenizer):
    prompt = made(tokenizer, "2+2?")
    # user + newline, four letters of the question, newline, assistant + newline, and three marks
    assert len(prompt.token_ids) == 5 + 4 + 1 + 10 + 3
    assert prompt.token_ids.dtype == np.int32
    assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_a_tokenizer_that_loses_spaces_is_told_of(capsys):
    from tokenizers import pre_tokenizers

    made, rows = byte_tokenizer("<|im_start|>", "<|im_end|>"), [problem("2 + 2 ?")]
    make_prompts(rows, made, config_of(prompt={"chat_template": CHATML}))
    assert "becomes" not in capsys.readouterr().err
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    make_prompts(rows, made, config_of(prompt={"chat_template": CHATML}))
    assert "the tokenizer changes row 0's prompt: '<|im_start|>user\\n2 + 2 ?" in capsys.readouterr().err


def test_the_prompt_column_and_template_arguments_come_from_the_config(tokenizer, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0].content }}{{ mood }}")
    template = {"chat_template": path, "chat_template_kwargs": {"mood": "!"}}
    row = Problem(0, {"ask": "2+2", "answer": "4"})
    assert make_prompt(row, tokenizer, config_of(data={"prompt_key": "ask"}, prompt=template)).text == "2+2!"


@pytest.mark.parametrize(("prompt_key", "content"), [(None, "Use [1, 5, 7] to make 12."), ("target", "12, [1, 5, 7].")])
def test_a_prompt_is_made_of_any_columns_and_numbers_are_text(tokenizer, prompt_key, content):
    form = "Use {{ nums }} to make {{ target }}." if prompt_key is None else "{{ content }}, {{ nums }}."
    row = Problem(0, {"target": 12, "nums": [1, 5, 7]})
    settings = {"prompt_key": prompt_key, "answer_key": None}
    config = config_of(data=settings, prompt={"format_prompt": form, "chat_template": CHATML})
    prompt = make_prompt(row, tokenizer, config)
    assert f"user\n{content}<" in prompt.text
    assert prompt.for_rewards == (content if prompt_key is None else "12")


def test_a_prompt_of_no_column_needs_a_template():
    with pytest.raises(ValueError, match=r"data\.prompt_key null needs prompt\.format_prompt"):
        config_of(data={"prompt_key": None})


@pytest.mark.parametrize(
    ("name", "words"),
    [("think_answer", ("<think>", "<answer>")), ("qwen_r1", ("<think>", "<answer>", "\\boxed{}")), ("chatml", ())],
)
def test_the_shipped_chat_templates_give_a_base_model_its_task(tokenizer, name, words):
    template = {"chat_template": ROOT / f"configs/templates/{name}.jinja"}
    text = made(tokenizer, "2+2?", **template).text
    assert all(word in text for word in words)
    assert text.endswith("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")
    own = made(tokenizer, "2+2?", **template, system="Mine.").text
    assert own.startswith("<|im_start|>system\nMine.<|im_end|>\n<|im_start|>user") and own.count("system") == 1


def test_the_shipped_format_prompt_asks_for_a_box(tokenizer):
    text = made(tokenizer, "2+2?", format_prompt=ROOT / "configs/templates/boxed_prompt.jinja").text
    assert "<|im_start|>user\n2+2?\n\nReason" in text and "\\boxed{}.<|im_end|>" in text


@pytest.mark.parametrize(
    ("setting", "content", "said"),
    [
        ("chat_template", None, r"x\.jinja: No such file"),
        ("chat_template", "{{ raise_exception('roles must alternate') }}", r"x\.jinja\) fails on a prompt: roles must"),
        ("format_prompt", None, r"prompt\.format_prompt .*x\.jinja: No such file"),
        ("format_prompt", "{{ problem }}", r"x\.jinja fails on row 0: 'problem' is undefined; .* content, question"),
    ],
)
def test_a_template_that_is_absent_or_fails_is_named(tokenizer, tmp_path, setting, content, said):
    if content:
        (tmp_path / "x.jinja").write_text(content)
    with pytest.raises(UserError, match=said):
        made(tokenizer, "2+2?", **{setting: tmp_path / "x.jinja"})


WORDLESS = ["", " \n", [{"role": "user", "content": ""}]]
NO_TEXT = [None, [3], [], {}, [{"role": "user"}], ["2+2?"], [{"role": "user", "content": [1]}]]


@pytest.mark.parametrize("raw", WORDLESS + NO_TEXT)
def test_a_row_without_a_word_or_that_is_neither_text_nor_messages_is_named(tokenizer, raw):
    said = "no word" if raw in WORDLESS else ".*, expected text"
    with pytest.raises(UserError, match=rf"row 0: data\.prompt_key 'question' holds {said}"):
        made(tokenizer, raw)


def test_prompts_longer_than_the_limit_are_filtered_and_counted_and_one_must_be_left(tokenizer):
    # 19 tokens besides the question
    problems = [Problem(i, {"question": "x" * n, "answer": "4"}) for i, n in enumerate((1, 11, 12, 3, 50))]

    def limited(length):
        settings = config_of(data={"max_prompt_length": length}, prompt={"chat_template": CHATML})
        return make_prompts(problems, tokenizer, settings)

    prompts, num_filtered = limited(30)
    assert [(p.problem.index, len(p.token_ids)) for p in prompts] == [(0, 20), (1, 30), (3, 22)] and num_filtered == 2
    with pytest.raises(UserError, match=r"all 5 are longer than data.max_prompt_length 5 .*max_prompt_length: 69"):
        limited(5)


def test_without_a_template_in_the_config_the_tokenizers_own_renders(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match=r"set prompt.chat_template: configs/templates/chatml\.jinja"):
        made(loaded, "2+2?", chat_template=None)
    loaded.chat_template = CHATML.read_text()
    expected, prompt = made(tokenizer, "2+2?"), made(loaded, "2+2?", chat_template=None)
    assert prompt.text == expected.text and prompt.token_ids.tolist() == expected.token_ids.tolist()


def test_a_folder_without_a_tokenizer_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer that loads"):
        load_tokenizer(str(tmp_path))


def test_rows_that_make_no_prompt_are_named_together_and_a_few_are_left_out(tokenizer, tmp_path, capsys):
    (tmp_path / "f.jinja").write_text("{{ content }}{{ hint.text }}")
    broken = {3: {"question": "\ud83d?", "hint": {"text": ""}}, 1500: {"question": "?", "hint": {"text": "\udc00"}}}
    broken |= {7: {"question": [], "hint": {"text": ""}}, 1999: {"question": "?", "hint": None}}
    rows = [Problem(i, broken.get(i, {"question": f"{i}?", "hint": {"text": ""}})) for i in range(2000)]
    given = {"chat_template": CHATML, "format_prompt": tmp_path / "f.jinja"}
    prompts, num_filtered = make_prompts(rows, tokenizer, config_of(prompt=given))
    assert [prompt.problem.index for prompt in prompts] == [i for i in range(2000) if i not in broken]
    alone = make_prompt(rows[1998], tokenizer, config_of(prompt=given))
    assert prompts[-1].token_ids.tolist() == alone.token_ids.tolist()
    said = capsys.readouterr().err
    named = ("row 3: half a character", "row 7: data.prompt_key", "row 1500: half a", "row 1999: prompt.f")
    assert num_filtered == 0 and all(part in said for part in ("4 of 2000 rows", *named))
    with pytest.raises(UserError, match=r"prompts: 4 of 2000 .* data\.max_bad_rows=0\.002\n  row 3:"):
        make_prompts(rows, tokenizer, config_of(prompt=given, data={"max_bad_rows": 0.001}))


# ---- a token that was added to the tokenizer alone: no row that holds it may reach an engine


def added(folder: Path) -> tuple[Any, Config]:
    """Tokenizer and settings of a model that knows every token but <added>."""
    tokenizer = load_tokenizer(str(tiny_model(folder)))
    tokenizer.add_tokens(["<added>"])
    return tokenizer, config_of({"path": str(folder)})


def rows(count: int, *odd: int) -> list[Problem]:
    return [Problem(i, {"question": "1 + 1 <added>" if i in odd else "1 + 1", "answer": "2"}) for i in range(count)]


def test_few_rows_are_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, config = added(tmp_path)
    prompts = prompts_of("data.train", rows(40, 7, 12), tokenizer, config)
    assert [p.problem.index for p in prompts] == [i for i in range(40) if i not in (7, 12)]
    assert "2 prompts of data.train hold a token" in (said := capsys.readouterr().err)
    assert "such as '<added>' (rows 7, 12): they are left out" in said
    assert len(prompts_of("data.train", rows(3), tokenizer, config)) == 3
    assert capsys.readouterr().err == "", "no row has the token"


@pytest.mark.parametrize("template", [False, True])
def test_many_end_the_run_with_what_to_do(tmp_path: Path, template: bool) -> None:
    """In every row because the chat template writes it, or in 4 of 40."""
    tokenizer, config = added(tmp_path)
    if template:
        tokenizer.chat_template = "{{ messages[0].content }}<added>"
    found = rows(40) if template else rows(40, 1, 2, 3, 4)
    with pytest.raises(UserError, match=r"(4|40) prompts .* '<added>' \(rows .*resize_token_embeddings\(\d+\)"):
        prompts_of("data.train", found, tokenizer, config)


@pytest.mark.parametrize("command", [lambda *a: list(plan._prompt_lines(*a)), check_rewards._round_trip])
def test_plan_and_check_say_it_too(tmp_path: Path, command: Callable[..., Any]) -> None:
    tokenizer, config = added(tmp_path)
    tokenizer.chat_template = "{{ messages[0].content }}<added>"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"4 prompts of data\.train.* hold a token"):
        command(config, rows(4))

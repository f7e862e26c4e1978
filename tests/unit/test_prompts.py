"""Problems through the chat template: text, token ids, what rewards get as prompts, and what is filtered."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.config import PromptTemplate
from common.errors import UserError
from common.types import Problem
from model.tokenizer import load_tokenizer
from sampler.prompts import make_prompt, make_prompts
from tests.support.configs import config_of
from tests.support.speed import limit
from tests.support.vision import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
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
        (" 2+2? ", {"format": "{{ content | trim }} ({{ level }}) \\boxed{}.\n"}, ["2+2? (easy) \\boxed{}."], " 2+2? "),
        (TALK, {"format": "<{{ content }}>"}, [*TALK[:2], "<c>"], [*TALK[:2], {"role": "user", "content": "<c>"}]),
    ],
)
def test_a_row_becomes_turns_and_rewards_get_its_string_or_all_messages(
    tokenizer, tmp_path, row, template, turns, for_rewards
):
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


def test_half_an_example_is_refused():
    with pytest.raises(ValueError, match=r"an example has user; write \{user: …, assistant: …\}"):
        PromptTemplate(examples=[{"user": "1+1?"}])


def test_the_prompt_column_and_template_arguments_come_from_the_config(tokenizer, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0].content }}{{ mood }}")
    template = {"chat_template": path, "chat_template_kwargs": {"mood": "!"}}
    row = Problem(0, {"ask": "2+2", "answer": "4"})
    assert make_prompt(row, tokenizer, config_of(data={"prompt_key": "ask"}, prompt=template)).text == "2+2!"


def test_a_format_prompt_that_names_no_column_lists_those_there(tokenizer, tmp_path):
    path = tmp_path / "format.jinja"
    path.write_text("{{ problem }}")
    with pytest.raises(UserError, match=r"format\.jinja fails on row 0: 'problem' is undefined; .* content, question"):
        made(tokenizer, "2+2?", format_prompt=path)
    with pytest.raises(UserError, match=r"prompt\.format_prompt .*no\.jinja: No such file"):
        made(tokenizer, "2+2?", format_prompt=tmp_path / "no.jinja")


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


def test_a_tokenizer_without_chat_template_says_what_to_set(tokenizer):
    with pytest.raises(UserError) as error:
        made(tokenizer, "2+2?", chat_template=None)
    assert "set prompt.chat_template: configs/templates/chatml.jinja" in str(error.value)
    assert (ROOT / "configs/templates/chatml.jinja").is_file()


def test_a_template_that_is_absent_or_fails_is_named(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"absent\.jinja: No such file"):
        made(tokenizer, "2+2?", chat_template=tmp_path / "absent.jinja")
    (tmp_path / "bad.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"bad.jinja\) fails on a prompt: roles must alternate"):
        made(tokenizer, "2+2?", chat_template=tmp_path / "bad.jinja")


@pytest.mark.parametrize("raw", [None, 3, [], {}, [{"role": "user"}], ["2+2?"], [{"role": "user", "content": [1]}]])
def test_a_row_that_is_neither_text_nor_messages_is_named(tokenizer, raw):
    with pytest.raises(UserError, match=r"row 0: data\.prompt_key 'question' holds .*, expected text"):
        made(tokenizer, raw)


def limited(max_prompt_length):
    return config_of(data={"max_prompt_length": max_prompt_length}, prompt={"chat_template": CHATML})


def test_prompts_longer_than_the_limit_are_filtered_and_counted(tokenizer):
    # 19 tokens besides the question
    problems = [Problem(i, {"question": "x" * n, "answer": "4"}) for i, n in enumerate((1, 11, 12, 3, 50))]
    prompts, num_filtered = make_prompts(problems, tokenizer, limited(30))
    assert [prompt.problem.index for prompt in prompts] == [0, 1, 3]
    assert [len(prompt.token_ids) for prompt in prompts] == [20, 30, 22]
    assert num_filtered == 2


def test_no_prompt_left_says_which_limit_would_keep_all(tokenizer):
    with pytest.raises(UserError) as error:
        make_prompts([problem("x"), problem("xxx")], tokenizer, limited(5))
    assert "all 2 are longer than data.max_prompt_length 5" in str(error.value)
    assert str(error.value).endswith("set data.max_prompt_length: 22")


def test_a_saved_tokenizer_loads_and_renders_with_its_own_template(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    loaded.chat_template = CHATML.read_text()
    expected = made(tokenizer, "2+2?")
    prompt = made(loaded, "2+2?", chat_template=None)
    assert prompt.text == expected.text and prompt.token_ids.tolist() == expected.token_ids.tolist()


def test_a_folder_without_a_tokenizer_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer that loads"):
        load_tokenizer(str(tmp_path))


def test_a_missing_folder_is_reported_before_transformers_is_imported():
    code = (
        "import sys\nfrom common.errors import UserError\nfrom model.tokenizer import load_tokenizer\n"
        "try: load_tokenizer('./no/model')\nexcept UserError as error: print(error)\n"
        "assert not {'transformers', 'torch'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=limit(60))
    assert result.returncode == 0, result.stderr
    assert "model './no/model': no such folder" in result.stdout


def test_a_hub_model_that_cannot_be_had_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError) as error:
        load_tokenizer("Qwen/Qwen2.5-1.5B-Instruct")
    for words in ("'Qwen/Qwen2.5-1.5B-Instruct'", "HF_HUB_OFFLINE=1", "hf download Qwen/", "HF_ENDPOINT"):
        assert words in str(error.value)

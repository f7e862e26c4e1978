"""From a row to the text that rewards read, on the way of a run: rendered, tokenised, decoded, with what was begun."""

import json

import pytest

from common.errors import UserError
from common.paths import ROOT
from common.types import Problem
from model.tokenizer import load_tokenizer
from rewards.built_in import boxed_format, gated_format, strict_format
from rewards.built_in import format as format_reward
from sampler.engine.engine_arguments import ends
from sampler.prompts.many_prompts import make_prompts
from sampler.prompts.prompts import make_prompt, turn_prefix_of
from sampler.prompts.reading import logged_reader, reader, unwritten_end
from tests.support.configs import config_of
from tests.support.vision import byte_tokenizer

CHATML, THINKING = ROOT / "configs/templates/chatml.jinja", ROOT / "tests/support/templates/qwen3_thinking.jinja"
QWEN = ROOT.parent / "shared/models/qwen2.5-tokenizer"
ASK = {"role": "user", "content": "2+2?"}


@pytest.fixture(scope="module", params=["bytes", "qwen2.5"])
def qwen(request):
    """The real one, and one of bytes, with the real template."""
    if request.param == "bytes":
        made = byte_tokenizer("<|im_start|>", "<|im_end|>")
        made.chat_template = (ROOT / "tests/support/templates/qwen2.5.jinja").read_text()
        return made
    if not QWEN.is_dir():
        pytest.skip(f"the tokenizer of Qwen2.5 is not at {QWEN}")
    return load_tokenizer(str(QWEN))


def prompt_of(tokenizer, question="2+2?", columns=None, template=CHATML, tools=None, **prompt):
    rewards = {"rollout": {"tools": ["my.py:f"]}, "rewards": {"reward_funcs": ["answer"]}} if tools else {}
    config = config_of(data={"max_prompt_length": 2000}, prompt={"chat_template": template, **prompt}, **rewards)
    row = Problem(3, {"question": question, "answer": "4", **(columns or {})})
    return make_prompt(row, tokenizer, config, tools=tools)


def read(tokenizer, text, stop=(), **rewards):
    config = config_of(model={"path": str(ROOT / "tests")}, rewards=rewards, sampler={"stop": list(stop)})
    return reader(config, tokenizer)([tokenizer(text, add_special_tokens=False)["input_ids"]])[0]


# ---- what the template has begun


@pytest.mark.parametrize(
    ("end", "turn_prefix"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<｜Assistant｜><think>\n", "<think>\n"),
        ("<|im_start|>assistant\n[THINK]", "[THINK]"),
        ("<|CHATBOT_TOKEN|><|START_THINKING|>", "<|START_THINKING|>"),
        ("<seed:bos>assistant\n<seed:think>", "<seed:think>"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),  # closed: the model's answer is all its own
        ("<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>", ""),
        ("<|assistant|>\n", ""),
        ("<think>2+2?<|im_end|>\n<|im_start|>assistant\n", ""),
    ],
)
def test_what_a_generation_prompt_opens_is_begun_and_no_header_is(end, turn_prefix):
    assert turn_prefix_of(end) == turn_prefix


@pytest.mark.parametrize("reward", [format_reward, strict_format, boxed_format, gated_format])
def test_a_template_that_opens_a_thought_lets_its_form_be_earned_and_a_second_tag_earns_nothing(qwen, reward):
    turn_prefix = prompt_of(qwen, template=THINKING).turn_prefix
    rest = r"2+2</think><answer>\boxed{4}</answer>"
    gold = {"answer": ["4", "4"]} if reward is gated_format else {}
    right, twice = reward(completions=[turn_prefix + rest, f"{turn_prefix}<think>{rest}"], **gold)
    assert right in (1.0, 1.25) and twice <= 0


def test_a_row_that_begins_the_answer_gives_its_words_back_and_the_gold_answer_is_left_off(qwen, capsys):
    made = prompt_of(qwen, [ASK, {"role": "assistant", "content": "<think> Two and"}])
    assert made.turn_prefix == "<think> Two and" and made.text.endswith("assistant\n<think> Two and")
    for told in ("It is 4.", "<answer>4</answer>", r"$\boxed{4}$.", "#### 4"):
        made = prompt_of(qwen, [ASK, {"role": "assistant", "content": told}])
        assert made.text.endswith("<|im_start|>assistant\n") and made.turn_prefix == "", told
    rows = [Problem(i, {"question": [ASK, {"role": "assistant", "content": "4"}], "answer": "4"}) for i in range(2)]
    make_prompts(rows, qwen, config_of(prompt={"chat_template": CHATML}))
    assert "2 of 2 rows end in an assistant's message that holds the gold answer (row 0)" in capsys.readouterr().err


# ---- what a row may bring


CALL = {"type": "function", "function": {"name": "times", "arguments": '{"a": 6, "b": 4}'}}
OTHER = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
SCHEMA = {"type": "function", "function": {"name": "times", "description": "Multiplies.", "parameters": {"x": None}}}


@pytest.mark.parametrize("content", ["", None, [{"type": "text", "text": ""}]])
def test_calls_in_a_rows_history_are_shown_as_the_template_writes_them(qwen, content):
    history = [ASK, {"role": "assistant", "content": content, "tool_calls": [CALL]}, {"role": "tool", "content": "24"}]
    text = prompt_of(qwen, [*history, {"role": "user", "content": "And twice?"}], template=None).text
    assert '<tool_call>\n{"name": "times", "arguments": {"a": 6, "b": 4}}\n</tool_call>' in text
    assert "<tool_response>\n24\n</tool_response>" in text


@pytest.mark.parametrize(
    "extra", [{"name": "Ann"}, {"reasoning_content": "Two and two."}, {"tool_call_id": "c1", "weight": None}]
)
def test_what_else_a_message_holds_reaches_the_template(qwen, tmp_path, extra):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m | tojson }}\n{% endfor %}")
    message = {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}], **extra}
    shown = json.loads(prompt_of(qwen, [message], template=tmp_path / "t.jinja").text)
    assert shown == ASK | {key: value for key, value in extra.items() if value is not None}


@pytest.mark.parametrize("tools", [[SCHEMA], json.dumps([SCHEMA]), [json.dumps(SCHEMA)]])
def test_the_tools_of_a_row_are_in_its_prompt_and_nulls_of_other_rows_are_not(qwen, tools):
    text = prompt_of(qwen, columns={"tools": tools}, template=None).text
    assert '"name": "times"' in text and "null" not in text.split("</tools>")[0].split("<tools>")[-1]


@pytest.mark.parametrize("tools", ["hammer, saw", ["hammer"], None, [], 3])
def test_a_column_called_tools_that_holds_no_schemas_is_a_column(qwen, tools):
    assert "<tools>" not in prompt_of(qwen, columns={"tools": tools}, template=None).text


@pytest.mark.parametrize("given", [{"enable_thinking": False, "mood": None}, '{"enable_thinking": false}'])
def test_template_arguments_of_a_row_stand_above_those_of_the_config(qwen, given):
    columns, of_config = {"chat_template_kwargs": given}, {"enable_thinking": True}
    made = prompt_of(qwen, columns=columns, template=THINKING, chat_template_kwargs=of_config)
    assert made.text.endswith("<think>\n\n</think>\n\n") and made.turn_prefix == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"chat_template_kwargs": {"enable_thinkng": False}}, "reads no 'enable_thinkng'"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "add_generation_prompt is Tandem's own"),
        ({"columns": {"tools": [SCHEMA]}}, r"row 3: the chat template has no place for tools.*data\.rename"),
        ({"columns": {"tools": [SCHEMA]}, "tools": [OTHER]}, r"row 3 offers .*'times'; there are f: .*unused_tools}"),
        ({"columns": {"chat_template_kwargs": {"x": 1}}}, "row 3: the chat template reads no 'x'"),
        ({"question": [{"role": "user", "content": [{"type": "image"}]}]}, "row 3: a message .* shows an image; set"),
    ],
)
def test_what_the_template_would_not_show_is_refused_by_name(qwen, given, said):
    with pytest.raises(UserError, match=said):
        prompt_of(qwen, **given)


# ---- the first and the last token


def with_first_token():
    from tokenizers import processors

    made = byte_tokenizer("<s>", "</s>", "<|im_start|>", "<|im_end|>")
    made.bos_token = "<s>"
    special = [("<s>", made.convert_tokens_to_ids("<s>"))]
    made._tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=special)
    return made


def test_prompts_begin_as_the_model_was_trained_once_and_it_is_said(tmp_path, capsys):
    tokenizer, own = with_first_token(), tmp_path / "own.jinja"
    own.write_text("{{ bos_token }}{{ messages[0].content }}")
    for template, text in ((CHATML, "<s><|im_start|>user\n2+2?"), (own, "<s>2+2?")):
        made = prompt_of(tokenizer, template=template)
        assert made.text.startswith(text) and tokenizer.decode(made.token_ids) == made.text
        assert made.text.count("<s>") == 1
    config = config_of(prompt={"chat_template": CHATML})
    make_prompts([Problem(0, {"question": "2+2?", "answer": "4"})], tokenizer, config)
    assert "prompts begin with <s>, as the tokenizer's texts do" in capsys.readouterr().err


def test_marks_of_thoughts_are_text_for_who_judges_answers():
    made, text = byte_tokenizer("<|channel>", "<channel|>", "<|im_end|>"), "<|channel>thought\nIt is 7<channel|>8"
    assert read(made, text, reward_funcs=["answer"]) == text
    assert read(made, text, reward_funcs=["format"]) == "thought\nIt is 78"


def test_a_completion_ends_at_every_end_that_model_tokenizer_and_template_have(tmp_path, capsys):
    base = byte_tokenizer("<|im_start|>", "<|im_end|>", "<|endoftext|>", "</answer>")
    base.eos_token = "<|endoftext|>"  # as a base model's, whose template for chats ends in another
    im_end, end, tag = (base.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>", "</answer>"))
    base.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 7]}))
    model = {"model": {"path": str(tmp_path)}}
    config = config_of(**model, prompt={"chat_template": CHATML}, sampler={"stop": ["</answer>", "\n\n", 9]})
    found = ends(config)
    assert found.own == (end, 7, im_end) and found.ids == (end, 7, im_end, tag, 9) and found.texts == ("\n\n",)
    logged_reader(config, base)
    said = capsys.readouterr().err
    assert "also end at <|im_end|>, which the model's own generation_config.json lacks" in said
    assert f'write there "eos_token_id": [{end}, 7, {im_end}]' in said
    logged_reader(config_of(**model), base)
    assert "also end" not in capsys.readouterr().err
    assert ends(config_of(**model, sampler={"ignore_eos": True})).ids == ()
    with pytest.raises(UserError, match=r"sampler\.stop: 9000 is no token"):
        ends(config_of(**model, sampler={"stop": [9000]}))


def test_a_template_whose_end_of_a_turn_is_no_token_is_said(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<|over|>\n{% endfor %}")
    config = config_of(prompt={"chat_template": tmp_path / "t.jinja"})
    assert "ends a turn with <|over|>, which is no token" in str(unwritten_end(config, byte_tokenizer("<|eot|>")))
    assert unwritten_end(config, byte_tokenizer("<|over|>")) is None


# ---- special tokens in the texts of rewards


def test_tags_that_are_special_tokens_stay_and_ends_and_others_go(qwen, tmp_path):
    special = byte_tokenizer("<|im_end|>", "<|pic|>", "<think>", "</think>", "<answer>", "</answer>")
    text = "<think>2+2</think><|pic|><answer>4</answer>"
    assert read(special, text + "<|im_end|>") == text.replace("<|pic|>", "")
    assert read(special, text + "<|im_end|>", special_tokens="drop") == "2+24"
    assert read(special, text + "<|im_end|>", special_tokens="keep") == text
    (tmp_path / "mine.py").write_text('def right(completions): return [float("<|pic|>" in c) for c in completions]\n')
    assert read(special, text, reward_funcs=[f"{tmp_path}/mine.py:right"]) == text
    asks = config_of(model={"path": str(ROOT / "tests")}, rollout={"agent": f"{tmp_path}/mine.py:right"})
    assert reader(asks, special)([special(text, add_special_tokens=False)["input_ids"]]) == [text]
    assert read(qwen, text + "<|im_end|>") == text, "tags that are no special tokens are text"


def test_a_stop_of_the_user_stays_in_the_text_and_the_models_own_end_does_not():
    special = byte_tokenizer("<|im_end|>", "</stop>")
    assert read(special, "4</stop>", stop=["</stop>"], special_tokens="keep") == "4</stop>"
    assert read(special, "4<|im_end|>", stop=["<|im_end|>"]) == "4"

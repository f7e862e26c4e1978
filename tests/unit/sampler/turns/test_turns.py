"""What stands between two turns, in tokens: for real chat templates, and what is refused of others."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import PromptTemplate
from common.errors import UserError
from common.paths import ROOT
from common.types import Problem, Prompt, sequences
from environments import Message, Turn
from sampler.prompts.chat_template import render
from sampler.prompts.prompts import turn_prefix_of
from sampler.turns.episode import Episode
from sampler.turns.turns import TurnTemplate
from tests.unit.sampler.prompts.test_chat_template import NO_TRL, REAL
from tests.unit.sampler.turns.test_episodes import turn

TEMPLATES = {path.stem: path for path in (ROOT / "tests" / "support" / "templates").glob("*.jinja")}
TEMPLATES |= {path.stem: path for path in REAL if path.stem.startswith("qwen3_5")}
TEMPLATES |= {name: ROOT / f"configs/templates/{name}.jinja" for name in ("chatml", "hermes_tools")}
ASK = [{"role": "user", "content": "12*34?"}]
SEEN = [{"role": "tool", "content": "408"}]
CALL = '<tool_call>\n{"name": "multiply"}\n</tool_call>'
MARKS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>")


@cache
def tokenizer() -> Any:
    from examples.tokenizer import byte_level  # and with it transformers, which not every worker needs

    made = byte_level(["12*34? 408 tool user assistant"], 400, 256, (), "", special=MARKS)
    made.bos_token = "<|begin_of_text|>"
    return made


def tokens(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def rendered(template: str | Path) -> Any:
    """By the template of this name or file."""
    path = TEMPLATES[template] if isinstance(template, str) else template
    return partial(render, tokenizer(), prompt=PromptTemplate(chat_template=path))


def of(template: str | Path, *roles: str) -> TurnTemplate:
    return TurnTemplate.of(rendered(template), tokens, ASK, roles)


TOOL = "<|im_end|>\n<|im_start|>tool\n408<|im_end|>\n<|im_start|>assistant\n"
QWEN = TOOL.replace("tool\n408", "user\n<tool_response>\n408\n</tool_response>")
LLAMA = (
    "<|eot_id|><|start_header_id|>tool<|end_header_id|>\n\n408<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)


@pytest.mark.parametrize(
    ("name", "expected"), [("qwen2.5", QWEN), ("smollm2", TOOL), ("chatml", TOOL), ("llama3", LLAMA)]
)
def test_what_follows_a_turn_is_what_the_template_writes_between_it_and_the_next(name: str, expected: str) -> None:
    assert of(name, "tool", "user").difference(SEEN) == expected


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2", "chatml", "hermes_tools", "llama3", "qwen3"])
def test_prompt_turn_and_difference_are_the_tokens_of_the_whole_conversation(name: str) -> None:
    """Byte pairs of one special token and the next never merge, so pieces and the whole have the same ids here."""
    end = tokens("<|eot_id|>" if name == "llama3" else "<|im_end|>")[0]
    text = rendered(name)
    pieces = [*tokens(text(ASK)), *tokens(CALL), end, *of(name, "tool").continuation(end, SEEN)]
    assert pieces == tokens(text([*ASK, {"role": "assistant", "content": CALL}, *SEEN]))


def test_answers_of_tools_stand_in_one_turn_behind_the_templates_own_end_of_turn() -> None:
    template = of("qwen2.5", "tool")
    text = template.difference([*SEEN, {"role": "tool", "content": "9"}])
    assert text.count("<|im_start|>user") == 1 and text.count("<tool_response>") == 2
    end, other = tokens("<|im_end|>")[0], tokens("<|endoftext|>")[0]  # the model may have written another one
    assert template.continuation(other, SEEN).tolist() == [end, *template.continuation(end, SEEN).tolist()]


# ---- templates that rewrite

THOUGHT = "<think>\nA thought.\n</think>\n\n"
USER = {"role": "user", "content": "And by 2?"}
END = "<|im_end|>"


class Conversation:
    """A rollout under a template, in text: what each turn was asked behind, and what trains of it."""

    def __init__(self, template: str | Path) -> None:
        self.template, self.render = of(template, "user"), rendered(template)
        text = self.render(ASK)
        ids = np.array(tokens(text), np.int32)
        self.prompt = Prompt(Problem(0, {}), ASK, text, ids, turn_prefix=turn_prefix_of(text))
        self.episode, self.asked = Episode(9, 10_000), [text]

    def says(self, text: str, *seen: Message, end: str = END) -> None:
        turn_prefix = self.template.turn_prefix if self.episode.num_turns else self.prompt.turn_prefix
        self.episode = self.episode.sampled(turn(*tokens(text + end)), turn_prefix + text)
        self.episode = self.episode.answered(Turn(list(seen)))
        ids = self.template.conversation(self.prompt, self.episode.said())
        self.episode = self.episode.asked(self.prompt.token_ids, ids)
        self.asked.append(text_of(self.episode.sequence(self.prompt.token_ids)))

    @property
    def kept(self) -> list[str]:
        """What each fork keeps, in text."""
        whole, length = [*self.prompt.token_ids, *self.episode.token_ids], len(self.episode.token_ids)
        places = sequences(len(self.prompt.token_ids), length, self.episode.forks)
        return [text_of([whole[p] for p in of[:n]]) for of, (_, n) in zip(places, self.episode.forks, strict=False)]


def text_of(ids: Any) -> str:
    return tokenizer().decode(list(ids))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_5_nothink"])
def test_a_template_that_drops_thoughts_forks_behind_the_last_question_and_keeps_all_before(name: str) -> None:
    if name not in TEMPLATES:
        pytest.skip(NO_TRL)
    talk = Conversation(name)
    thought = THOUGHT if not talk.prompt.turn_prefix else THOUGHT.removeprefix("<think>\n")
    said = [*ASK]
    for text in ("408.", "816."):
        talk.says(thought + text, USER)
        said += [{"role": "assistant", "content": THOUGHT + text}, USER]
        assert talk.asked[-1] == talk.render(said), "what the model sees is what the template writes"
        assert "A thought" not in talk.asked[-1]
    assert len(talk.episode.forks) == 2
    bare = talk.asked[0].removesuffix("<think>\n").removesuffix("<think>\n\n</think>\n\n")
    assert talk.kept[0] == bare, "the prompt, without the thought that it opened"
    assert talk.kept[1].startswith(bare + "408.<|im_end|>")


@pytest.mark.parametrize("path", REAL or [None], ids=lambda path: path and path.stem)
def test_before_each_turn_the_model_sees_what_a_real_template_writes_and_sampled_tokens_count_once(path: Any) -> None:
    talk = Conversation(path or pytest.skip(NO_TRL))
    thought = THOUGHT.removeprefix(talk.prompt.turn_prefix)
    texts = [thought + "408.", "816.", thought + "1632."]
    for text in texts:
        talk.says(text, USER, end="")
    said = [m for i in range(3) for m in ({"role": "assistant", "content": talk.episode.said()[i][0]}, USER)]
    for i in range(1, 4):
        assert talk.asked[i] == talk.render([*ASK, *said[: 2 * i]])
    played = talk.episode.sampled(turn(1), "").played()
    mask = np.ones(len(played.token_ids), bool)
    mask[np.r_[tuple(slice(*span) for span in played.observed)]] = False
    assert text_of(played.token_ids[mask][:-1]) == "".join(texts)


def test_a_turn_whose_text_stays_keeps_its_sampled_ids_and_extends_the_sequence() -> None:
    """Nothing to drop: as it would be without rewriting, though sampled ids are not those of the tokenizer."""
    talk = Conversation("qwen3")
    talk.episode = talk.episode.sampled(turn(*[tokens(c)[0] for c in "408"], tokens(END)[0]), "408")
    talk.episode = talk.episode.answered(Turn([USER]))
    ids = talk.template.conversation(talk.prompt, talk.episode.said())
    expected = of("chatml", "user").continuation(tokens(END)[0], [USER])
    assert ids.tolist() == [*talk.prompt.token_ids, *talk.episode.token_ids, *expected]
    assert talk.episode.asked(talk.prompt.token_ids, ids).forks == ()


@pytest.mark.parametrize(
    ("text", "end", "forks"),
    [
        ("Words.\n", END, 0),
        ("Words.\n", "<|endoftext|>", 0),  # another end: the template's own follows
        ("", END, 0),
        ("⟦turn 0⟧", END, 0),  # our own mark: its ids may be made anew, its text stays
        ("<think>\nNever closed", END, 0),
        ("</think>", END, 1),
        ("<think>a</think>\n\nb</think>c", END, 1),
    ],
)
def test_whatever_a_model_writes_it_goes_on_behind_what_a_template_makes_of_it(text: str, end: str, forks: int) -> None:
    talk = Conversation("qwen3")
    talk.says(text, USER, end=end)
    said = [*ASK, {"role": "assistant", "content": text}, USER]
    assert talk.asked[1].replace("<|endoftext|>", "") == talk.render(said)
    assert len(talk.episode.forks) == forks


@pytest.mark.parametrize("shown", [2, 4, 6])
def test_a_template_may_leave_out_observations_and_whole_turns_but_not_the_last(tmp_path: Path, shown: int) -> None:
    window = (
        f"{{% set shown = {shown} %}}"
        + "{% for m in messages[:1] + messages[1:][-shown:] %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    )
    (tmp_path / "x.jinja").write_text(window + "{% if add_generation_prompt %}assistant: {% endif %}")
    talk = Conversation(tmp_path / "x.jinja")
    for text in "1234":
        talk.says(text, USER)
    first, said = "user: 12*34?<|im_end|>", "assistant: {}<|im_end|>user: And by 2?<|im_end|>"
    assert talk.asked[4] == "".join([first, *map(said.format, "1234"[-shown // 2 :]), "assistant: "])
    assert talk.kept == [first + "assistant: "] * (4 - shown // 2)


def test_a_template_that_rewrites_as_the_arguments_of_a_row_say_is_followed_for_that_row(tmp_path: Path) -> None:
    drops = "{{ m.content.split('</think>')[-1] if drop is defined else m.content }}"
    text = f"{{% for m in messages %}}{{{{ m.role }}}}: {drops}<|im_end|>{{% endfor %}}assistant: "
    (tmp_path / "x.jinja").write_text(text)
    template = of(tmp_path / "x.jinja", "user")
    assert not template.rewrites and not template.of_row(Problem(0, {})).rewrites
    row = template.of_row(Problem(0, {"chat_template_kwargs": {"drop": True}}))
    assert row.rewrites and "A thought" not in row.render([*ASK, {"role": "assistant", "content": THOUGHT}, USER])


def test_two_turns_with_nothing_between_them_are_refused_as_the_wire_would(tmp_path: Path) -> None:
    (tmp_path / "bare.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    template = of(tmp_path / "bare.jinja", "user")
    assert template.continuation(0, [{"role": "user", "content": "4"}]).tolist() == tokens("4")
    with pytest.raises(ValueError, match="between two turns it writes nothing of"):
        template.continuation(0, [{"role": "user", "content": ""}])


NO_TOOLS = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}"
NO_WORDS = "{{ m.content if m.role != 'assistant' }}"
ONE_USER = "{{ raise_exception('again') if m.role == 'user' and not loop.first }}{{ m.content }}{{ m.tool_calls }}"


@pytest.mark.parametrize(
    ("writes", "role", "said"),
    [
        (NO_TOOLS, "tool", r"role 'tool'.*no tools"),
        (NO_WORDS, "user", "not show a message of the role 'assistant'"),
        (ONE_USER, "user", "role 'user'.*again"),
    ],
)
def test_a_template_that_cannot_write_the_turns_is_refused(tmp_path: Path, writes: str, role: str, said: str) -> None:
    (tmp_path / "x.jinja").write_text(f"{{% for m in messages %}}{writes}<|im_end|>{{% endfor %}}")
    with pytest.raises(UserError, match=said):
        of(tmp_path / "x.jinja", role)

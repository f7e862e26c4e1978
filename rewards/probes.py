r"""Completions whose worth is known without a model: right and wrong answers, in several forms.

    gold answer ─► notations (1/2, 0.5, \frac{1}{2}) ─► forms (tags, box, …) ─► right completions
               ─► near misses (7/2, 2, 1.5), answers of other rows ─► forms ─► wrong completions

Reward functions are tried on them before anything is sampled.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rewards.answers import same_answer
from rewards.mathematics.contradictions import (
    in_another_order,
    of_another_noun,
    of_another_unit,
)
from rewards.mathematics.gold import gold_texts
from rewards.mathematics.near_misses import near_misses, wrong_answer
from rewards.mathematics.notations import AS_WRITTEN, is_equal, notations

THOUGHT = "I work it out."
FORMS = {  # templates of completions; a thought stands before all but the last two
    "tags": "<answer>{}</answer>",
    "box in tags": r"<answer>\boxed{{{}}}</answer>",
    "box": r" The answer is \boxed{{{}}}.",
    "sentence": "The answer is {}.",
    "alone": "{}",
}
_THOUGHTLESS = ("sentence", "alone")
EMPTY = "empty"
UNIT = "another unit"
NOUN = "another noun"
ORDER = "another order"
NEAR = "a near miss"
OTHER = "the answer of another row"
THOUGHT_OF = "another answer, with the right one in its thought"
UNFINISHED = "a guess in an unfinished thought"

_MAX_OTHER = 2  # the most answers of other rows that are tried
_LATEX = re.compile(r"[\\^_{]")


@dataclass(frozen=True)
class Probe:
    """A completion.

    Probe("tags", True, "<answer>72</answer>", thought="I work it out.", what="as written")
    """

    form: str
    is_right: bool
    rest: str  # the text without its thought
    thought: str | None = None
    what: str = AS_WRITTEN  # the notation of a right answer, or what a wrong answer is
    answer: str = ""  # as the completion writes it

    @property
    def text(self) -> str:
        if self.thought is None:
            return self.rest
        return f"<think>{self.thought}</think>{self.rest}"

    def behind(self, turn_prefix: str) -> str:
        """Returns the text behind a prompt that begins the model's turn.

        If the prompt has opened a thought, the text ends it.
        """
        opened = turn_prefix.strip()
        if self.what == UNFINISHED:
            return self.text.removeprefix(opened)
        if not re.fullmatch(r"[<\[].*[>\]]", opened):
            return self.text
        return f"{self.thought or THOUGHT}{_closing(opened)}{self.rest}"


def _closing(tag: str) -> str:
    """Returns the tag that closes a thought.

    <think> → </think>    [THINK] → [/THINK]    <|START_THINKING|> → <|END_THINKING|>
    """
    if tag[1] == "|":
        return tag.replace("START", "END").replace("begin", "end")
    return f"{tag[0]}/{tag[1:]}"


def probes(answer: Any, others: Sequence[str] = (), thorough: bool = False) -> list[Probe]:
    """Returns the right and wrong answers of a row in every form, and an empty completion.

    Without a gold answer, it returns only the empty completion.

    others: gold answers of other rows. thorough: whether to add the right answer in all its
    notations, and more wrong ones.
    """
    empty = Probe(EMPTY, False, "", what=EMPTY)
    golds = gold_texts(answer)
    if not golds:
        return [empty]
    gold = golds[0]
    right = {AS_WRITTEN: gold}
    if thorough:
        right = notations(gold)
    made = list[Probe]()
    for what, text in right.items():
        made += _in_forms(True, text, what)
    for what, text in _wrong_answers(golds, right, others, thorough):
        made += _in_forms(False, text, what)
    if thorough:
        guess = rf"Perhaps it is \boxed{{{gold}}}, but let me"
        for thought in (guess, f"Perhaps the answer is {gold}"):
            rest = f"<think>{thought}"
            made.append(Probe(UNFINISHED, False, rest, what=UNFINISHED, answer=gold))
        near = [probe for probe in made if probe.what == NEAR]
        num_with_thought = len(FORMS) - len(_THOUGHTLESS)
        for probe in near[:num_with_thought]:
            made.append(replace(probe, thought=f"{guess} see. No.", what=THOUGHT_OF))
    return [*made, empty]


def _wrong_answers(
    golds: Sequence[str], right: Mapping[str, str], others: Sequence[str], thorough: bool
) -> Iterator[tuple[str, str]]:
    """Yields wrong answers, each once, behind what they are.

    golds: the texts that count as right. right: notations of the first one, by their names.
    """
    gold = golds[0]
    seen = {*golds, *right.values()}
    if thorough:
        for what, texts in contradictions(gold).items():
            for text in texts:
                if text not in seen:
                    seen.add(text)
                    yield what, text
    candidates = [(NEAR, wrong_answer(gold))]
    if thorough:
        candidates += [(NEAR, text) for text in near_misses(gold)]
    candidates += [(OTHER, text) for text in _of_other_rows(gold, others)]
    for what, text in candidates:
        if text in seen:
            continue
        if thorough and any(is_equal(text, one) for one in golds):
            continue
        seen.add(text)
        yield what, text


def _of_other_rows(gold: str, others: Sequence[str]) -> list[str]:
    """Returns some answers of other rows that mean something else than the gold one."""
    different = list[str]()
    for text in others:
        if gold not in text and text not in gold and not same_answer(text, gold):
            different.append(text)
    return different[:_MAX_OTHER]


def contradictions(gold: str) -> dict[str, list[str]]:
    """Returns answers with the right number and another unit, noun or order, by what is wrong."""
    return {
        UNIT: of_another_unit(gold),
        NOUN: of_another_noun(gold),
        ORDER: in_another_order(gold),
    }


def _in_forms(is_right: bool, text: str, what: str) -> Iterator[Probe]:
    """Yields a probe for each form. LaTeX stands between $ where nothing else shows that it is."""
    inline = text
    if _LATEX.search(text) and "$" not in text:
        inline = f"${text}$"
    for form, template in FORMS.items():
        if form in _THOUGHTLESS:
            yield Probe(form, is_right, template.format(inline), None, what, text)
        else:
            yield Probe(form, is_right, template.format(text), THOUGHT, what, text)

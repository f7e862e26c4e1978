r"""Completions whose worth is known without a model: right and wrong answers, in every form that a model may choose.

    gold answer ─► notations (1/2, 0.5, \frac{1}{2}) ─► forms (tags, box, a sentence, …) ─► right completions
               ─► near misses (7/2, 2, 1.5), answers of other rows, its parts ─► forms ─► wrong completions

Reward functions are tried on them before anything is sampled.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rewards.answers import same_answer
from rewards.mathematics.contradictions import (
    in_another_order,
    of_another_noun,
    of_another_unit,
)
from rewards.mathematics.gold import gold_texts
from rewards.mathematics.notations import (
    AS_WRITTEN,
    is_equal,
    near_misses,
    notations,
    wrong_answer,
)

THOUGHT = "I work it out."
FORMS = {  # the thought comes before, except of the last two
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

_LATEX = re.compile(r"[\\^_{]")


@dataclass(frozen=True)
class Probe:
    """A completion.  Probe("tags", True, "<answer>72</answer>", thought="I work it out.", what="as written")"""

    form: str
    is_right: bool
    rest: str
    thought: str | None = None  # None: there is none
    what: str = AS_WRITTEN  # the notation of a right answer; of a wrong one, what it is
    answer: str = ""  # as the completion writes it

    @property
    def text(self) -> str:
        return self.rest if self.thought is None else f"<think>{self.thought}</think>{self.rest}"

    def behind(self, turn_prefix: str) -> str:
        """Returns the text after a prompt that starts the model's turn: it ends the thought that is already open."""
        opened = turn_prefix.strip()
        if self.what == UNFINISHED:
            return self.text.removeprefix(opened)
        if not re.fullmatch(r"[<\[].*[>\]]", opened):
            return self.text
        return f"{self.thought or THOUGHT}{_closing(opened)}{self.rest}"


def _closing(tag: str) -> str:
    """Returns the closing tag: <think> -> </think>, [THINK] -> [/THINK], <|START_THINKING|> -> <|END_THINKING|>"""
    if tag[1] == "|":
        return re.sub("begin", "end", tag.replace("START", "END"))
    return f"{tag[0]}/{tag[1:]}"


def probes(answer: Any, others: Sequence[str] = (), thorough: bool = False) -> list[Probe]:
    """Returns the right and a wrong answer in every form, and an empty completion; without a gold answer only this.

    thorough: the right one in all its notations, and more wrong ones. others: gold answers of other rows.
    """
    empty = Probe(EMPTY, False, "", what=EMPTY)
    if not (right := gold_texts(answer)):
        return [empty]
    gold = right[0]
    writings = notations(gold) if thorough else {AS_WRITTEN: gold}
    wrong = {
        NEAR: [wrong_answer(gold), *(near_misses(gold) if thorough else ())],
        OTHER: [t for t in others if gold not in t and t not in gold and not same_answer(t, gold)][:2],
    }
    made = [probe for what, text in writings.items() for probe in _in_forms(True, text, what)]
    seen = set(right) | set(writings.values())
    if thorough:
        for what, texts in contradictions(gold).items():
            for text in texts:
                if text not in seen:
                    seen.add(text)
                    made += _in_forms(False, text, what)
    for what, texts in wrong.items():
        for text in texts:
            if text not in seen and not (thorough and any(is_equal(text, one) for one in right)):
                seen.add(text)
                made += _in_forms(False, text, what)
    if thorough:
        guesses = [rf"Perhaps it is \boxed{{{gold}}}, but let me", f"Perhaps the answer is {gold}"]
        made += [Probe(UNFINISHED, False, f"<think>{text}", what=UNFINISHED, answer=gold) for text in guesses]
        wrongs = [probe for probe in made if probe.what == NEAR][: len(FORMS) - len(_THOUGHTLESS)]
        made += [replace(probe, thought=f"{guesses[0]} see. No.", what=THOUGHT_OF) for probe in wrongs]
    return [*made, empty]


def contradictions(gold: str) -> dict[str, list[str]]:
    """Returns answers with the right number and another unit, noun or order, by what is wrong."""
    return {
        UNIT: of_another_unit(gold),
        NOUN: of_another_noun(gold),
        ORDER: in_another_order(gold),
    }


def _in_forms(is_right: bool, text: str, what: str) -> Iterator[Probe]:
    for form, template in FORMS.items():
        inline = f"${text}$" if form in _THOUGHTLESS and _LATEX.search(text) and "$" not in text else text
        thought = None if form in _THOUGHTLESS else THOUGHT
        yield Probe(form, is_right, template.format(inline), thought, what, text)

"""Makes the prompts of a whole data set: all are rendered together before the run, and each is made on request."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config import Config
from common.errors import UserError
from common.processes.exits import say
from common.types import Problem, Prompt
from model.files.images import Vision
from sampler.prompts.bad_rows import usable
from sampler.prompts.chat_template import about_first_token
from sampler.prompts.messages import leaves_gold_off
from sampler.prompts.pictures import image_size
from sampler.prompts.progress import counted
from sampler.prompts.prompts import make_prompt, rendered

_AT_ONCE = 1000  # prompts that are tokenised together


@dataclass(frozen=True, eq=False)
class Prompts(Sequence[Prompt]):
    """A sequence of prompts that are made on request: of a million rows neither tokens nor resized images are held."""

    problems: Sequence[Problem]
    largest: NDArray[np.int64]  # largest token id in each prompt
    make: Callable[[Problem], Prompt]
    _early: dict[int, Future[Prompt]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, place: int) -> Prompt:  # type: ignore[override]  # no slices: see `only`
        early = self._early.pop(place, None)
        return early.result() if early else self.make(self.problems[place])

    def begin(self, place: int) -> None:
        """Starts to make the prompt at this index in another thread, if it has images."""
        if self.problems[place].images and place not in self._early:
            self._early[place] = _threads().submit(self.make, self.problems[place])

    @classmethod
    def joined(cls, parts: Mapping[str, Prompts]) -> Prompts:
        """Returns the prompts of one or several sources, keyed by name, as one sequence."""
        largest = np.concatenate([part.largest for part in parts.values()])
        return cls([p for part in parts.values() for p in part.problems], largest, lambda p: parts[p.source].make(p))

    def only(self, places: Sequence[int] | NDArray[np.int64]) -> Prompts:
        return Prompts([self.problems[i] for i in places], self.largest[np.asarray(places, np.int64)], self.make)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)))


def make_prompts(
    problems: Sequence[Problem],
    tokenizer: Any,
    config: Config,
    vision: Vision | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[Prompts, int]:
    """Returns the prompts of at most data.max_prompt_length tokens, in order, and the number of longer ones.

    Rows that make no prompt are named, and a few are left out. Raises UserError when none is left.
    """
    sizes, bad = list[tuple[int, int]](), dict[int, str]()
    for start in counted(range(0, len(problems), _AT_ONCE), "making prompts", len(problems), _AT_ONCE):
        part = problems[start : start + _AT_ONCE]
        sizes += _sizes(part, tokenizer, config, vision, tools, bad)
        if len(bad) == start + len(part):  # the cause is common, such as the chat template
            raise UserError(f"row {min(bad)}: {bad[min(bad)]}")
    lengths, largest = np.array(sizes, np.int64).reshape(-1, 2).T
    problems = usable("prompts", problems, bad, config.data)
    limit = config.data.max_prompt_length
    every = Prompts(problems, largest, lambda problem: make_prompt(problem, tokenizer, config, vision, tools))
    short = every.only(np.flatnonzero(lengths <= limit))
    if not short:
        longest = max(lengths, default=0)
        raise UserError(
            f"no prompt left: all {len(problems)} are longer than data.max_prompt_length {limit} tokens. "
            f"The longest has {longest}; set data.max_prompt_length: {longest}"
        )
    if text := about_first_token(tokenizer, config.prompt, short[0].text):
        say(text)
    if not vision and (text := _about_lost_text(tokenizer, short[0])):
        say(text)
    if answered := [problem.index for problem in problems if leaves_gold_off(problem, config.data)]:
        say(
            f"{len(answered)} of {len(problems)} rows end in an assistant's message that holds the gold answer (row "
            f"{answered[0]}): it is left off, and the model answers"
        )
    return short, len(every) - len(short)


def _about_lost_text(tokenizer: Any, prompt: Prompt) -> str:
    """Returns a note if the prompt's tokens are another text than it, such as one without spaces; else ""."""
    read = tokenizer.decode(prompt.token_ids, clean_up_tokenization_spaces=False)
    at = next((i for i, (a, b) in enumerate(zip_longest(prompt.text, read)) if a != b), None)
    if at is None:
        return ""
    written, kept = (text[max(0, at - 20) : at + 20] for text in (prompt.text, read))
    return f"the tokenizer changes row {prompt.problem.index}'s prompt: {written!r} becomes {kept!r}, which is trained"


def _sizes(
    problems: Sequence[Problem],
    tokenizer: Any,
    config: Config,
    vision: Vision | None,
    tools: Sequence[Mapping[str, Any]] | None,
    bad: dict[int, str],
) -> list[tuple[int, int]]:
    """Returns (tokens, largest id) of each prompt that can be made; stores why others cannot in `bad`, by index.

    Prompts are tokenised together, which takes a third of the time; image headers tell how many tokens images become.
    """
    texts, added = list[str](), list[int]()
    for problem in problems:
        try:
            text = rendered(problem, tokenizer, config, vision, tools)[0]
            sizes = [image_size(source) for source in problem.images] if vision else []
            added.append(sum(vision.form.num_tokens_of(*size, config.data) - 1 for size in sizes) if vision else 0)
            texts.append(text)
        except (UserError, ValueError) as error:
            bad[problem.index] = str(error).removeprefix(f"row {problem.index}: ")
    if not texts:
        return []
    return [(len(ids) + more, max(ids, default=0)) for ids, more in zip(_ids(tokenizer, texts), added, strict=True)]


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Tokenises on all cores, without the masks that transformers makes in Python, which take as long again."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return list(tokenizer(texts, add_special_tokens=False)["input_ids"])
    backend.no_padding()
    backend.no_truncation()
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

"""Makes the prompts of a data set: measures all before the run, and makes each on request."""

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
from sampler.prompts.prompts import make_prompt, render_problem

_NUM_AT_ONCE = 1000  # prompts that are tokenised together


@dataclass(frozen=True, eq=False)
class Prompts(Sequence[Prompt]):
    """A sequence of prompts. Each is made on request, so memory holds neither tokens nor images."""

    problems: Sequence[Problem]
    largest_ids: NDArray[np.int64]  # [N] largest token id in each prompt
    make: Callable[[Problem], Prompt]
    # The prompts that another thread has begun to make, keyed by index.
    _begun: dict[int, Future[Prompt]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> Prompt:  # type: ignore[override]  # no slices: see `only`
        begun = self._begun.pop(index, None)
        if begun is not None:
            return begun.result()
        return self.make(self.problems[index])

    def begin(self, index: int) -> None:
        """Begins to make the prompt at this index in another thread, if it has images."""
        problem = self.problems[index]
        if problem.images and index not in self._begun:
            self._begun[index] = _threads().submit(self.make, problem)

    @classmethod
    def empty(cls) -> Prompts:
        def make(problem: Problem) -> Prompt:
            raise LookupError(f"no prompt of row {problem.index}")

        return cls([], np.array([], np.int64), make)

    @classmethod
    def joined(cls, by_source: Mapping[str, Prompts]) -> Prompts:
        """Returns the prompts of several sources, keyed by their names, as one sequence."""
        problems: list[Problem] = []
        largest_ids = []
        for prompts in by_source.values():
            problems += prompts.problems
            largest_ids.append(prompts.largest_ids)
        return cls(
            problems,
            np.concatenate(largest_ids),
            lambda problem: by_source[problem.source].make(problem),
        )

    def only(self, indices: Sequence[int] | NDArray[np.int64]) -> Prompts:
        """Returns the prompts at these indices."""
        problems = [self.problems[i] for i in indices]
        return Prompts(problems, self.largest_ids[np.asarray(indices, np.int64)], self.make)


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
    """Returns the prompts, in order, and the number of others that are too long.

    Too long are prompts of more than data.max_prompt_length tokens. Rows of which no prompt can be
    made are named, and left out if they are few. vision: the model's image format, if rows have
    images. tools: JSON schemas for the chat template. Raises UserError if many rows make no prompt,
    or if no prompt is left.
    """
    sizes = _Sizes()
    starts = range(0, len(problems), _NUM_AT_ONCE)
    for start in counted(starts, "making prompts", len(problems), _NUM_AT_ONCE):
        batch = problems[start : start + _NUM_AT_ONCE]
        sizes.add(batch, tokenizer, config, vision, tools)
        if len(sizes.errors) == start + len(batch):  # all rows fail, for example in the template
            first = min(sizes.errors)
            raise UserError(f"row {first}: {sizes.errors[first]}")
    problems = usable("prompts", problems, sizes.errors, config.data)
    limit = config.data.max_prompt_length
    prompts = Prompts(
        problems,
        np.array(sizes.largest_ids, np.int64),
        lambda problem: make_prompt(problem, tokenizer, config, vision, tools),
    )
    short = prompts.only(np.flatnonzero(np.array(sizes.lengths) <= limit))
    if not short:
        longest = max(sizes.lengths, default=0)
        raise UserError(
            f"no prompt left: all {len(problems)} are longer than data.max_prompt_length {limit} "
            f"tokens. The longest has {longest}; set data.max_prompt_length: {longest}"
        )
    _log_notes(problems, short[0], tokenizer, config, vision)
    return short, len(prompts) - len(short)


@dataclass
class _Sizes:
    """The sizes of the prompts that can be made, in order, and why the others cannot."""

    lengths: list[int] = field(default_factory=list)  # tokens of each prompt
    largest_ids: list[int] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)  # keyed by the index of the row

    def add(
        self,
        problems: Sequence[Problem],
        tokenizer: Any,
        config: Config,
        vision: Vision | None,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Adds some problems.

        Their prompts are tokenised together, which takes a third of the time.
        """
        texts = []
        num_more = []  # tokens that the images of each prompt add to those of its text
        for problem in problems:
            try:
                text = render_problem(problem, tokenizer, config, vision, tools).text
                num_more.append(_num_more_tokens(problem, config, vision))
                texts.append(text)
            except (UserError, ValueError) as error:
                self.errors[problem.index] = str(error).removeprefix(f"row {problem.index}: ")
        if not texts:
            return
        for token_ids, more in zip(_tokenize(tokenizer, texts), num_more, strict=True):
            self.lengths.append(len(token_ids) + more)
            self.largest_ids.append(max(token_ids, default=0))


def _num_more_tokens(problem: Problem, config: Config, vision: Vision | None) -> int:
    """Returns how many tokens a problem's images become, beside one placeholder for each.

    Reads only the headers of the images. Raises ValueError.
    """
    if vision is None:
        return 0
    num_more = 0
    for image in problem.images:
        height, width = image_size(image)
        num_more += vision.form.num_tokens_of(height, width, config.data) - 1
    return num_more


def _tokenize(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Returns the token ids of texts, made on all cores.

    Calling a fast tokenizer would take twice the time, for masks that transformers makes in Python.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return list(tokenizer(texts, add_special_tokens=False)["input_ids"])
    backend.no_padding()
    backend.no_truncation()
    encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def _log_notes(
    problems: Sequence[Problem],
    first: Prompt,
    tokenizer: Any,
    config: Config,
    vision: Vision | None,
) -> None:
    """Logs what the user should know about the prompts. first: the first of them."""
    notes = [about_first_token(tokenizer, config.prompt, first.text)]
    if vision is None:  # the token ids of images are not those of the text
        notes.append(_about_lost_text(tokenizer, first))
    answered = [problem.index for problem in problems if leaves_gold_off(problem, config.data)]
    if answered:
        notes.append(
            f"{len(answered)} of {len(problems)} rows end in an assistant's message that holds the "
            f"gold answer (row {answered[0]}): it is left off, and the model answers"
        )
    for note in notes:
        if note is not None:
            say(note)


def _about_lost_text(tokenizer: Any, prompt: Prompt) -> str | None:
    """Returns a note if the prompt's tokens decode to other text, for example without spaces."""
    decoded = tokenizer.decode(prompt.token_ids, clean_up_tokenization_spaces=False)
    for i, (before, after) in enumerate(zip_longest(prompt.text, decoded)):
        if before != after:
            around = slice(max(0, i - 20), i + 20)
            return (
                f"the tokenizer changes row {prompt.problem.index}'s prompt: "
                f"{prompt.text[around]!r} becomes {decoded[around]!r}, which is trained"
            )
    return None

"""A judge that scores completions by your rubric, through OpenAI's API of chat completions.

    system     the rubric, and the form of the answer
    user       {"prompt": …, "completions": ["…", …], and the columns that you name}
    assistant  {"scores": [0.5, …]}

Completions are sent as JSON, so that none can pose as another or as the rubric. One may still
flatter the judge. The `openai` package repeats failed requests. The API key is the environment's
OPENAI_API_KEY.
"""

import asyncio
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.outcomes import finite_number, shorten
from common.user_code.paid_calls import PaidCalls
from rewards import prompt_before

_TRIES = 4  # requests until one is answered
_ANSWERS = 3  # answers until one has scores
# Parts of rewards.timeout_s: a try that hangs leaves time for two others.
_SHARE_OF_TRY = 0.3
_SHARE_OF_ALL = 0.9
_FORM = (
    'Answer with JSON alone: {"scores": [one number for each of the completions, in their order]}'
)


@dataclass
class Judge:
    """A reward function that asks a model to score the completions of a group by a rubric."""

    rubric: str  # a file
    model: str
    timeout_s: float  # for a group: rewards.timeout_s
    base_url: str | None = None  # None: OPENAI_BASE_URL, or OpenAI
    one_by_one: bool = False  # whether each completion has a request of its own
    columns: Sequence[str] = ()  # columns of the row that the judge sees, too
    cache: str | None = None  # a file
    budget: float | None = None  # USD, for all calls that the cache holds
    price: Sequence[float] = (0.0, 0.0)  # USD for a million tokens in, and out
    options: dict[str, Any] = field(default_factory=dict)  # further fields of the request
    is_costly = True  # `launch.sh check` does not try it

    def __post_init__(self) -> None:
        """Raises UserError for a budget without a cache or prices, and for unreadable files."""
        has_costs = bool(self.cache) and any(self.price)
        if len(self.price) != 2 or (self.budget is not None and not has_costs):
            raise UserError(
                "a budget needs a cache, where costs are kept, and price: "
                "[USD for 1M tokens in, out]"
            )
        self._paid: PaidCalls | None = None
        if self.cache:
            self._paid = PaidCalls(Path(self.cache).expanduser())
        try:
            rubric = Path(self.rubric).expanduser().read_text().strip()
            if self._paid:
                self._paid.begin()
        except Exception as error:
            raise UserError(
                f"its rubric {self.rubric} or cache {self.cache} cannot be opened: {error}"
            ) from None
        self._instructions = f"{rubric}\n\n{_FORM}"

    async def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        log_metric: Callable[[str, float], None],
        **columns: Any,
    ) -> list[float]:
        """Returns the judge's score of each completion of a group.

        Raises ValueError if a column is absent, if the judge gives no scores or if the budget is
        spent, TimeoutError, and RuntimeError for the client's errors.
        """
        contents = self._contents(prompts, completions, columns)
        num_scores = len(completions)  # of each request
        if self.one_by_one:
            num_scores = 1
        unique = list(dict.fromkeys(contents))
        time_limit_s = _SHARE_OF_ALL * self.timeout_s
        try:
            async with asyncio.timeout(time_limit_s):
                requests = [self._scores(content, num_scores) for content in unique]
                outcomes = await asyncio.gather(*requests, return_exceptions=True)
        except TimeoutError:
            raise TimeoutError(
                f"no judgement within {time_limit_s:g} s; "
                f"allow more: rewards.timeout_s={2 * self.timeout_s:g}"
            ) from None
        if self._paid:
            name = Path(str(self.cache)).stem  # a mean over several caches would say nothing
            log_metric(f"{name}_usd", self._paid.spent().usd)
        scores_of = dict[str, list[float]]()
        for content, outcome in zip(unique, outcomes, strict=True):
            if isinstance(outcome, ValueError):
                raise outcome
            if isinstance(outcome, BaseException):
                address = self.base_url or os.environ.get("OPENAI_BASE_URL", "OpenAI")
                raise RuntimeError(f"{address}: {type(outcome).__name__}: {outcome}")
            scores_of[content] = outcome
        scores = list[float]()
        for content in contents:
            scores += scores_of[content]
        return scores

    def _contents(
        self, prompts: list[Any], completions: list[Any], columns: Mapping[str, Any]
    ) -> list[str]:
        """Returns the user's message of each request, as JSON."""
        absent = sorted(set(self.columns) - set(columns))
        if absent:
            raise ValueError(
                f"the row has no column {absent[0]!r} for the judge; it has {', '.join(columns)}"
            )
        row = {"prompt": prompt_before(prompts[0], completions[0])}
        for name in self.columns:
            row[name] = columns[name][0]
        parts = [completions]
        if self.one_by_one:
            parts = [[completion] for completion in completions]
        contents = list[str]()
        for part in parts:
            request = row | {"completions": part}
            contents.append(json.dumps(request, ensure_ascii=False, default=str))
        return contents

    async def _scores(self, content: str, count: int) -> list[float]:
        """Returns so many scores for the completions of a message, from the cache or the judge.

        Raises the client's errors, and ValueError if the answers have no scores.
        """
        content = content.encode(errors="replace").decode()  # the row may hold half a surrogate
        messages = [
            {"role": "system", "content": self._instructions},
            {"role": "user", "content": content},
        ]
        request = {"model": self.model, "messages": messages, **self.options}
        identity = json.dumps([self.base_url, request], sort_keys=True)
        key = hashlib.sha256(identity.encode()).hexdigest()
        if self._paid:
            known = self._paid.answer(key)
            if known is not None:
                return read_scores(known, count) or []
        output = ""
        for _ in range(_ANSWERS):
            output = await self._ask(request, key, count)
            scores = read_scores(output, count)
            if scores is not None:
                return scores
            correction = f"These are not {count} scores. {_FORM}"
            messages.append({"role": "assistant", "content": output})
            messages.append({"role": "user", "content": correction})
        raise ValueError(f"the judge gave no {count} scores: {shorten(output)}")

    async def _ask(self, request: dict[str, Any], key: str, count: int) -> str:
        """Returns the judge's answer, and writes its cost to the cache.

        The answer itself is cached under the key if it has so many scores. Raises ValueError if
        the budget is spent.
        """
        if self._paid and self.budget is not None:
            usd = self._paid.spent().usd
            if usd >= self.budget:
                raise ValueError(
                    f"{usd:.2f} USD are spent ({self.cache}) of a budget of {self.budget:g}; "
                    "make it larger"
                )
        response = await self._client.chat.completions.create(**request)
        if response.choices and response.choices[0].message:
            message = response.choices[0].message
            output = str(message.content or message.refusal or "")
        else:
            output = str(response.to_json(indent=None))  # an error
        if self._paid:
            self._note_cost(self._paid, key, output, count, response.usage)
        return output

    def _note_cost(self, paid: PaidCalls, key: str, output: str, count: int, usage: Any) -> None:
        """Writes a call to the cache. usage: the numbers of tokens, or None."""
        num_in = 0
        num_out = 0
        if usage:
            num_in = usage.prompt_tokens
            num_out = usage.completion_tokens
        answer = None
        if read_scores(output, count) is not None:
            answer = output
        usd = (self.price[0] * num_in + self.price[1] * num_out) / 1e6
        paid.add(key, answer, num_in, num_out, usd)

    @functools.cached_property
    def _client(self) -> Any:
        """Returns the process's one client, because it belongs to the process's event loop."""
        import openai

        return openai.AsyncOpenAI(
            api_key=os.environ.get("OPENAI_API_KEY", "none"),  # one's own servers need none
            base_url=self.base_url,
            timeout=_SHARE_OF_TRY * self.timeout_s,
            max_retries=_TRIES - 1,
        )


def read_scores(text: str, count: int) -> list[float] | None:
    """Returns the `scores` of a text's last JSON object with so many numbers; None without one.

    Other text may stand around the object.
    """
    decoder = json.JSONDecoder()
    for brace in reversed(list(re.finditer("{", text))):
        try:
            found, _ = decoder.raw_decode(text, brace.start())
            scores = [finite_number(score) for score in found["scores"]]
        except (ValueError, LookupError, TypeError):
            continue
        numbers = [score for score in scores if score is not None]
        if len(numbers) == len(scores) == count:
            return numbers
    return None

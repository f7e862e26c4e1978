"""A judge that scores completions by your rubric: a model at an address with OpenAI's chat completions API.

    system     the rubric, and the form of the answer
    user       {"prompt": …, "completions": ["…", …], and the columns that you name}
    assistant  {"scores": [0.5, …]}

Completions are sent as JSON, so that none can pose as another or as the rubric; one may still flatter the judge. The
`openai` package repeats failed requests. The API key is the environment's OPENAI_API_KEY.
"""

import asyncio
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.outcomes import finite_number, shorten
from common.user_code.paid_calls import PaidCalls
from rewards import prompt_before

_TRIES, _ANSWERS = 4, 3  # requests until one is answered; answers until one has scores
_SHARE_OF_TRY, _SHARE_OF_ALL = 0.3, 0.9  # parts of rewards.timeout_s: a try that hangs leaves time for two others
_FORM = 'Answer with JSON alone: {"scores": [one number for each of the completions, in their order]}'


@dataclass
class Judge:
    rubric: str  # a file
    model: str
    timeout_s: float  # for a group: rewards.timeout_s
    base_url: str | None = None  # None: OPENAI_BASE_URL, or OpenAI
    one_by_one: bool = False
    columns: Sequence[str] = ()  # columns of the row that the judge sees, too
    cache: str | None = None  # a file
    budget: float | None = None  # USD, for all calls that the cache holds
    price: Sequence[float] = (0.0, 0.0)  # USD for a million tokens in, and out
    options: dict[str, Any] = field(default_factory=dict)  # further fields of the request
    is_costly = True  # `launch.sh check` does not try it

    def __post_init__(self) -> None:
        if len(self.price) != 2 or (self.budget is not None and not (self.cache and any(self.price))):
            raise UserError("a budget needs a cache, where costs are kept, and price: [USD for 1M tokens in, out]")
        self._paid = PaidCalls(Path(self.cache).expanduser()) if self.cache else None
        try:
            self._rubric = f"{Path(self.rubric).expanduser().read_text().strip()}\n\n{_FORM}"
            if self._paid:
                self._paid.begin()
        except Exception as error:
            raise UserError(f"its rubric {self.rubric} or cache {self.cache} cannot be opened: {error}") from None

    async def __call__(
        self, prompts: list[Any], completions: list[Any], log_metric: Callable[[str, float], None], **columns: Any
    ) -> list[float]:
        if absent := sorted({*self.columns} - {*columns}):
            raise ValueError(f"the row has no column {absent[0]!r} for the judge; it has {', '.join(columns)}")
        row = {"prompt": prompt_before(prompts[0], completions[0])} | {name: columns[name][0] for name in self.columns}
        parts = [[one] for one in completions] if self.one_by_one else [completions]
        texts = [json.dumps(row | {"completions": part}, ensure_ascii=False, default=str) for part in parts]
        unique = dict.fromkeys(texts)
        try:
            async with asyncio.timeout(_SHARE_OF_ALL * self.timeout_s):
                found = await asyncio.gather(*(self._scores(t, len(parts[0])) for t in unique), return_exceptions=True)
        except TimeoutError:
            more = f"allow more: rewards.timeout_s={2 * self.timeout_s:g}"
            raise TimeoutError(f"no judgement within {_SHARE_OF_ALL * self.timeout_s:g} s; {more}") from None
        if self._paid:
            log_metric(f"{Path(str(self.cache)).stem}_usd", self._paid.spent().usd)  # not the mean of two files
        scores = dict[str, list[float]]()
        for text, one in zip(unique, found, strict=True):
            if isinstance(one, BaseException):
                where = self.base_url or os.environ.get("OPENAI_BASE_URL", "OpenAI")
                raise one if isinstance(one, ValueError) else RuntimeError(f"{where}: {type(one).__name__}: {one}")
            scores[text] = one
        return [score for text in texts for score in scores[text]]

    async def _scores(self, text: str, count: int) -> list[float]:
        """Returns scores of a text's completions. Raises the client's errors, and ValueError if answers have none."""
        text = text.encode(errors="replace").decode()  # the row may hold half a surrogate
        messages = [{"role": "system", "content": self._rubric}, {"role": "user", "content": text}]
        request = {"model": self.model, "messages": messages, **self.options}
        key = hashlib.sha256(json.dumps([self.base_url, request], sort_keys=True).encode()).hexdigest()
        if self._paid and (known := self._paid.answer(key)) is not None:
            return read_scores(known, count) or []
        output = ""
        for _ in range(_ANSWERS):
            output = await self._ask(request, key, count)
            if (scores := read_scores(output, count)) is not None:
                return scores
            mend = f"These are not {count} scores. {_FORM}"
            messages += [{"role": "assistant", "content": output}, {"role": "user", "content": mend}]
        raise ValueError(f"the judge gave no {count} scores: {shorten(output)}")

    async def _ask(self, request: dict[str, Any], key: str, count: int) -> str:
        if self._paid and self.budget is not None and (usd := self._paid.spent().usd) >= self.budget:
            raise ValueError(f"{usd:.2f} USD are spent ({self.cache}) of a budget of {self.budget:g}; make it larger")
        response = await self._client.chat.completions.create(**request)
        message, usage = response.choices[0].message if response.choices else None, response.usage
        output = (message.content or message.refusal or "") if message else response.to_json(indent=None)  # an error
        sent, got = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
        if self._paid:
            usd = (self.price[0] * sent + self.price[1] * got) / 1e6
            self._paid.add(key, output if read_scores(output, count) is not None else None, sent, got, usd)
        return str(output)

    @functools.cached_property
    def _client(self) -> Any:
        """Returns the client, one for the process, because it belongs to the process's event loop."""
        import openai

        key = os.environ.get("OPENAI_API_KEY", "none")  # one's own servers need none
        timeout = _SHARE_OF_TRY * self.timeout_s
        return openai.AsyncOpenAI(api_key=key, base_url=self.base_url, timeout=timeout, max_retries=_TRIES - 1)


def read_scores(text: str, count: int) -> list[float] | None:
    """Returns the `scores` of a text's last object with so many numbers, whatever is around it; None without one."""
    for found in reversed([*re.finditer("{", text)]):
        try:
            scores = [finite_number(score) for score in json.JSONDecoder().raw_decode(text, found.start())[0]["scores"]]
        except (ValueError, LookupError, TypeError):
            continue
        if len(scores) == count and None not in scores:
            return scores  # type: ignore[return-value]
    return None

"""Agents: real processes, the real openai client, a chat template, and an engine that is a function."""

import asyncio
import collections
import functools
import json
import random
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from common.config import Config
from common.errors import UserError
from common.paths import ROOT
from common.types import Failure, Group, Problem, sequences
from common.wire.group_limits import check_spans
from environments.chat_completions import ChatRequest, ModelAnswer, RequestError, end_of_stream
from environments.endpoint import Endpoint, PendingRequest
from environments.pool import EnvironmentPool
from examples.tokenizer import byte_level
from rewards import text_of
from sampler.engine.completions import Completion
from sampler.engine.engine_arguments import looks_for_texts
from sampler.prompts.prompts import make_prompt
from sampler.turns.episode import as_rollout
from sampler.turns.failures import with_failures
from sampler.turns.multi_turn import open_multi_turn
from sampler.turns.sampled import Sampled
from sampler.turns.scheduler import Turns
from sampler.turns.task import held_out_params
from tests.support.configs import config_in
from tests.support.speed import limit, until

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "417*382"}}\n</tool_call>'
PROBLEM = Problem(3, {"question": "417*382?", "answer": "#### 159294"})
CLIENT = """
import asyncio, json, os, random, time
from openai import AsyncOpenAI, OpenAI, BadRequestError

client = AsyncOpenAI()

async def said(*messages, **more):
    asked = [{"role": "user" if i % 2 == 0 else "assistant", "content": m} for i, m in enumerate(messages)]
    response = await client.chat.completions.create(model="any", messages=asked, **more)
    return response.choices[0].message.content

async def solve(question, answer, base_url, **row):
"""


@pytest.fixture(autouse=True)
def _with_a_row_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sampler.turns.multi_turn.vocabulary", lambda _: 400)


@functools.cache
def tokenizer() -> Any:
    return byte_level(["What is 417*382? tool_call name calculator"], 400, 2048, (), "")


class Model:
    """An engine that writes what a function says of the prompt: (rollout, prompt) -> text."""

    def __init__(self, writes: Callable[[int, str], str]) -> None:
        self._writes, self._running = writes, dict[Any, tuple[list[int], Any]]()
        self.turns: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []  # rollout, what it followed, what it wrote
        self.seeds: list[int] = []
        self.keeps_seed: list[bool] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, key: Any, ids: Any, params: Any, images: Any = ()) -> None:
        assert key not in self._running
        self._running[key] = ([int(i) for i in ids], params)
        self.seeds.append(params.seed)
        self.keeps_seed.append(params.keeps_seed)

    def abort(self, keys: Any) -> None:
        self._running = {key: what for key, what in self._running.items() if key not in keys}

    def step(self) -> list[tuple[Any, list[Completion]]]:
        running, self._running = self._running, {}
        return [(key, [self._completion(self.rollout_of(key), *what)]) for key, what in running.items()]

    def rollout_of(self, key: Any) -> Any:
        return key[1][0]

    def _completion(self, rollout: int, asked: list[int], params: Any) -> Completion:
        text = self._writes(rollout, tokenizer().decode(asked))
        ids = [*tokenizer()(text, add_special_tokens=False)["input_ids"], tokenizer().eos_token_id]
        stops = [n for n in range(len(ids)) if any(stop in tokenizer().decode(ids[:n]) for stop in params.stop)]
        ids = ids[: min(stops, default=len(ids))]  # whole tokens, as vLLM's
        reason: Any = "stop" if len(ids) <= params.max_tokens else "length"
        ids = ids[: params.max_tokens]
        self.turns.append((rollout, tuple(asked), tuple(ids)))
        return Completion(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), reason)


def config(folder: Path, body: str = "", template: str = "hermes_tools", **settings: Any) -> Config:
    """body: what the agent does, which returns 1.0 behind it."""
    (folder / "mine.py").write_text(CLIENT + textwrap.indent(f"{body}\nreturn 1.0\n", "    "))
    rollout = {"agent": f"{folder}/mine.py:solve", "timeout_s": limit(20)} | settings.pop("rollout", {})
    return config_in(
        folder,
        data={"max_prompt_length": 600},
        prompt={"chat_template": ROOT / f"configs/templates/{template}.jinja"} | settings.pop("prompt", {}),
        sampler={"num_generations": 2, "max_completion_length": 1000} | settings.pop("sampler", {}),
        eval={"num_generations": 2, "temperature": 1} | settings.pop("eval", {}),
        rollout=rollout,
        **settings,
    )


def played(given: Config, model: Any, problem: Problem = PROBLEM, decode: Any = None) -> Any:
    decode = decode or functools.partial(tokenizer().batch_decode, skip_special_tokens=True)
    with open_multi_turn(given, tokenizer(), problem, problem.columns) as multi_turn:
        assert multi_turn is not None
        prompt = make_prompt(problem, tokenizer(), given, tools=multi_turn.pool.tools)
        agents = Turns(model, decode, {"": multi_turn})
        agents.start("key", prompt, held_out_params(given, 0))
        while not (over := agents.step()):
            pass
        assert agents.num_running == 0 and model.num_running == 0
        return over[0][1]


def trained(sampled: Sampled) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(what it follows, what was sampled) of every turn, as the trainer gets it."""
    prompt = sampled.prompt.token_ids
    for c in sampled.completions:
        whole, edges = np.concatenate([prompt, c.token_ids]), [0, *np.ravel(c.observed).tolist(), len(c.token_ids)]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            if start == end:
                continue  # it begins with what is observed
            places = next(s for s in sequences(len(prompt), len(c.token_ids), c.forks) if len(prompt) + start in s)
            at = places.tolist().index(len(prompt) + start)
            yield tuple(whole[places[:at]].tolist()), tuple(c.token_ids[start:end].tolist())


def play(given: Config, writes: Any, problem: Problem = PROBLEM) -> tuple[Any, Model]:
    """An agent whose every sampled token is trained once, as the wire takes it. writes: what a Model writes, or one."""
    model = writes if isinstance(writes, Model) else Model(writes)
    sampled = played(given, model, problem)
    sampled_once = collections.Counter((asked, wrote) for _, asked, wrote in model.turns)
    assert collections.Counter(trained(sampled)) == sampled_once
    logprobs = [float(c.logprobs.sum()) for c in sampled.completions]
    assert sum(logprobs) == -0.5 * sum(len(wrote) for _, _, wrote in model.turns)
    rollouts = tuple(as_rollout(c, None, {"environment": 1.0}, 1.0) for c in sampled.completions)
    check_spans(Group(0, 0, 0, sampled.prompt.token_ids, rollouts))
    return sampled, model


BEGINNING = """
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}}}]
messages = [{"role": "user", "content": question}]
"""
LOOP = """
while True:
    response = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
    message = response.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        assert response.choices[0].finish_reason == "stop"
        return 1.0 if message.content == answer else 0.0
    assert response.choices[0].finish_reason == "tool_calls"
    for call in message.tool_calls:
        a, b = json.loads(call.function.arguments)["expression"].split("*")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(int(a) * int(b))})
"""


def test_a_loop_with_tools_is_one_sequence_whose_sampled_ids_are_kept(tmp_path: Path) -> None:
    sloppy = CALL.replace('{"name"', '{ "name"')  # as no template would write it
    given = config(tmp_path, BEGINNING + LOOP)
    sampled, _ = play(given, lambda i, prompt: "#### 159294" if "159294" in prompt else (sloppy if i == 0 else "7"))
    called, direct = sampled.completions
    assert (called.turns, called.tool_calls, called.tool_errors, called.environment_reward) == (2, 1, 0, 1.0)
    assert (direct.turns, direct.tool_calls, direct.environment_reward, direct.finish_reason) == (1, 0, 0.0, "stop")
    assert called.forks == () and sampled.failures == ()
    [(start, end)] = called.observed
    assert tokenizer().decode(called.token_ids[start:end]) == (
        "\n<|im_start|>user\n<tool_response>\n159294\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert [m["role"] for m in called.messages] == ["assistant", "tool", "assistant"]


def test_the_agent_of_the_page_looks_a_word_up_and_is_rewarded(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    [block] = re.findall(r"^```python\n# my_agent.py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    call = CALL.replace("calculator", "lookup").replace("expression", "word").replace("417*382", "apple")
    given, problem = config(tmp_path), Problem(3, {"question": "What is an apple?", "answer": "fruit"})
    (tmp_path / "mine.py").write_text(block)
    sampled, _ = play(given, lambda i, prompt: "a fruit" if "a fruit" in prompt else (call if i else "What?"), problem)
    assert [(c.turns, c.environment_reward) for c in sampled.completions] == [(1, 0.0), (2, 1.0)]


def test_whatever_agents_ask_every_sampled_token_is_trained_once_behind_what_it_followed(tmp_path: Path) -> None:
    code = """
known = [(), (question,)]
for _ in range(random.randint(1, 4)):
    start = [random.choice(known) for _ in range(random.randint(1, 3))]
    asked = [(*s, random.choice("abc")) if len(s) % 2 == 0 else s for s in start]
    for s, text in zip(asked, await asyncio.gather(*(said(*s) for s in asked))):
        known += [(*s, text), (*s, text, "More."), (*s, text.strip("0"), "More.")]
return random.random()
"""
    for seed in range(4):
        given = config(tmp_path, code, run={"seed": seed}, rollout={"max_turns": 20}, sampler={"num_generations": 4})
        sampled, _ = play(given, lambda i, prompt: random.choice(["0", "1 2", "0 1", "2"]))
        assert sampled.failures == () and len(sampled.completions) == 2


def test_a_template_that_drops_thoughts_forks_and_one_that_opens_them_and_keeps_them_does_not(tmp_path: Path) -> None:
    code = """
first = await said(question)
assert first.endswith("Words.")
await said(question, first, "And ⟦turn⟧ now?")
"""
    chatml = (ROOT / "configs/templates/chatml.jinja").read_text()
    opens = chatml.replace("<|im_start|>assistant\\n'", "<|im_start|>assistant\\n<think>'")
    (tmp_path / "opens.jinja").write_text(opens)
    drops = ROOT / "tests/support/templates/qwen3.jinja"
    for template, text, forks in (
        (drops, "<think>\nHm.\n</think>\n\n", 1),
        (tmp_path / "opens.jinja", "Hm.</think>", 0),
    ):
        given = config(tmp_path, code, prompt={"chat_template": template})
        sampled, model = play(given, lambda i, prompt, text=text: text + "Words.")
        assert [len(c.forks) for c in sampled.completions] == [forks] * 2
        assert ("Hm." in tokenizer().decode(model.turns[-1][1])) == (not forks), "as the template has it"


def test_a_stream_comes_as_it_is_sampled_without_a_stop_that_begins_or_ends_in_a_token(tmp_path: Path) -> None:
    code = """
asked = dict(model="m", messages=[{"role": "user", "content": [{"type": "text", "text": question}]}])
for stop, stays in ("tool_c", "one 😀 "), ("e 😀", "on"):
    told = [c async for c in await client.chat.completions.create(
        **asked, stream=True, stop=[stop], stream_options={"include_usage": True})]
    texts = [c.choices[0].delta.content for c in told if c.choices and c.choices[0].delta.content]
    assert "".join(texts) == stays and len(texts) > 1, texts
    assert told[-1].usage.completion_tokens > 0 and told[-2].choices[0].finish_reason == "stop"
sync = OpenAI(base_url=base_url).chat.completions.create(**asked, max_completion_tokens=2, temperature=1, n=1)
assert sync.choices[0].finish_reason == "length" and sync.usage.completion_tokens == 2
"""

    class Slow(Model):  # it has no end of an answer to what is slow
        def step(self) -> list[tuple[Any, list[Completion]]]:
            for _, params in self._running.values():
                ids = tokenizer()("one 😀 tool_call", add_special_tokens=False)["input_ids"]
                for end in range(1, 11 if params.stop == ("tool_c",) else 8) if params.hears else ():
                    params.hears(ids[:end])
            return super().step()

    sampled, _ = play(config(tmp_path, code), Slow(lambda i, prompt: "one 😀 tool_call four"))
    assert sampled.failures == ()
    assert {c.finish_reason for c in sampled.completions} == {"stop"}, "its own limit is no limit of the rollout"


def test_a_stream_of_which_the_end_was_cut_off_tells_nothing_twice() -> None:
    said = ModelAnswer({"role": "assistant", "content": "a b"}, "length", {})
    rest = end_of_stream({}, said, "a b c", {}).decode()
    assert '"delta": {"content": ""}' in rest and "a b" not in rest


REFUSED = {
    "temperature=0.2": "temperature 0.2 is not that of the run, 1",
    "top_p=0.9": "top_p 0.9",
    "presence_penalty=1": "presence_penalty 1",
    "n=2": "n: ",
    "logprobs=True": "logprobs",
    "tool_choice='required'": "tool_choice: ",
    "response_format={'type': 'json_object'}": "response_format",
    "extra_body={'guided_json': {}}": "guided_json",
    "tools=[{'type': 'function'}]": "tools: each is",
    "the responses API": "what is served is POST …/chat/completions",
    "extra_body={'messages': [{'role': 'bard', 'content': ''}]}": "no role 'bard'",
    "extra_body={'messages': []}": "messages: ",
    "extra_body={'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]}": "parts that are text",
    "extra_body={'messages': [{'role': 'user', 'content': 'x' * (1 << 20)}]}": "Request Entity Too Large",
}


def test_what_would_be_trained_wrong_is_refused_by_name_and_what_says_what_holds_is_served(tmp_path: Path) -> None:
    code = f"""
await said(question, temperature=1, top_p=1.0, frequency_penalty=0, user="me", response_format={{"type": "text"}})
errors = []
for given in {list(REFUSED)}:
    try:
        if given == "the responses API":
            await client.responses.create(model="any", input=question)
        await said(question, **eval(f"dict({{given}})"))
        errors.append("served")
    except Exception as error:
        errors.append(f"{{type(error).__mro__}} {{error}}")
return json.dumps(errors)
"""
    sampled = played(config(tmp_path, code), Model(lambda i, prompt: "fine"))
    for completion in sampled.completions:
        assert completion.finish_reason == "stop" and completion.turns == 1
        for error, named in zip(json.loads(completion.messages[-1]["content"]), REFUSED.values(), strict=True):
            assert named in error and "APIStatusError" in error


def test_bytes_that_are_no_request_are_answered_as_openai_does_and_cost_nothing(tmp_path: Path) -> None:
    code = """
import urllib.error, urllib.request

GARBAGE = [
    b"", b"\\xff", b"[" * 100_000, b"[]", b'{"messages": 3}', b'{"messages": [{}]}', b'{"messages": [{"role": []}]}',
    b'{"messages": [{"role": "user", "content": {"a": 1}}]}', b'{"messages": [{"role": "user", "content": 1e999}]}',
    b'{"messages": [{"role": "user", "content": "\\\\ud800"}]}',
    b'{"messages": [{"role": "assistant", "tool_calls": [3]}]}', b'{"messages": [{"role": "tool", "tool_calls": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "tools": [' + b'{"function": ' * 300 + b'3' + b'}' * 300 + b']}',
    b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": 3}}',
    b'{"messages": [{"role": "user", "content": "x"}], "stop": [""]}',
    b'{"messages": [{"role": "tool", "tool_call_id": [1], "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": 3}}]}',
]

await said(question)
for garbage in GARBAGE:
    try:
        urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", garbage))
        return f"served {garbage[:90]}"
    except urllib.error.HTTPError as error:
        if error.code != 400 or not json.load(error)["error"]["message"]:
            return f"{error.code} {garbage[:90]}"
return "all refused"
"""
    sampled = played(config(tmp_path, code), Model(lambda i, prompt: "fine"))
    assert [c.messages[-1]["content"] for c in sampled.completions] == ["all refused"] * 2


def test_agents_whose_first_prompts_differ_train_behind_what_they_have_in_common(tmp_path: Path) -> None:
    code = """
for _ in range(2):
    text = await said(f"{random.random()} {question}")
"""
    sampled, _ = play(config(tmp_path, code), lambda i, prompt: "fine")
    assert tokenizer().decode(sampled.prompt.token_ids).startswith("<|im_start|>user\n")
    assert [c.observed[0][0] for c in sampled.completions] == [0, 0], "they begin with their own words"


def test_an_agent_whose_first_prompt_has_nothing_in_common_with_its_group_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "bare.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    code = "await said(chr(97 + int(random.random() * 26)) * 5)"
    given = config(tmp_path, code, prompt={"chat_template": tmp_path / "bare.jinja"}, eval={"num_generations": 3})
    model = Model(lambda i, prompt: "fine")
    sampled = played(given, model)
    most = max(collections.Counter(asked[0] for _, asked, _ in model.turns).values())
    assert len(sampled.prompt.token_ids) == 5 and len(sampled.failures) == 3 - most
    assert all("no token in common" in reason for reason in sampled.failures)


GONE = {  # what the agent does with its second request, and how many turns of it train
    "await asyncio.wait_for(said(question, text, 'slow'), 0.3)": 1,
    "await client.with_options(timeout=0.3, max_retries=0).chat.completions.create(model='', messages=SLOW)": 1,
    "await client.with_options(timeout=0.3, max_retries=1).chat.completions.create(model='', messages=SLOW)": 1,
    "await (await client.chat.completions.create(model='', messages=SLOW, stream=True)).close()": 1,
    "asyncio.ensure_future(said(question, text, 'slow')); await asyncio.sleep(0.2)": 1,
    "await said(question, text, 'quick')": 2,
}


class Slow(Model):
    def step(self) -> list[tuple[Any, list[Completion]]]:
        slow = {k: v for k, v in self._running.items() if "slow" in tokenizer().decode(v[0])}
        for key, (_, params) in slow.items():
            del self._running[key]
            (params.hears or len)(tokenizer()("Hm").input_ids)
        out = super().step()
        self._running |= slow
        return out


def test_an_answer_that_its_agent_did_not_wait_for_does_not_train(tmp_path: Path) -> None:
    code = "SLOW = [{'role': 'user', 'content': 'slow'}]\ntext = await said(question)\ntry:\n"
    code += "".join(f"    if text == '{i}': {how}\n" for i, how in enumerate(GONE))
    code += "except Exception: pass"
    sampled, _ = play(config(tmp_path, code, eval={"num_generations": len(GONE)}), Slow(lambda i, prompt: str(i)))
    assert [c.turns for c in sampled.completions] == list(GONE.values()) and sampled.failures == ()
    assert sampled.unread == 6  # one each but of the last, and two of the one that tries again


def test_a_prompt_is_no_longer_than_prompts_may_be_though_the_first_request_was_left_unread(tmp_path: Path) -> None:
    code = """
first = asyncio.ensure_future(said("slow"))
await asyncio.sleep(0.2)
await said("7" * 800)
"""
    sampled, model = play(given := config(tmp_path, code), Slow(lambda i, prompt: "fine"))
    assert sampled.failures == () and len(model.turns[0][1]) > given.data.max_prompt_length
    assert len(sampled.prompt.token_ids) == given.data.max_prompt_length, "the trainer refuses a longer one"


def test_a_history_that_the_agent_rewrites_keeps_the_turns_that_stay(tmp_path: Path) -> None:
    code = """
first = await said(question)
second = await said(question, first, "More.")
await client.chat.completions.create(model="", messages=[
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "A summary."},
    {"role": "assistant", "content": second}, {"role": "user", "content": "And now?"}])
"""
    odd = [tokenizer()(c, add_special_tokens=False)["input_ids"][0] for c in "What is"]  # as no tokenizer would cut it

    class Odd(Model):
        def _completion(self, rollout: int, asked: list[int], params: Any) -> Completion:
            ids = [*odd, tokenizer().eos_token_id]
            self.turns.append((rollout, tuple(asked), tuple(ids)))
            return Completion(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), "stop")

    sampled, model = play(config(tmp_path, code), Odd(lambda i, prompt: ""))
    assert [len(c.forks) for c in sampled.completions] == [1, 1]
    last = tokenizer().decode(model.turns[-1][1])
    assert "Be brief." in last and str(odd)[1:-1] in str(list(model.turns[-1][1])), "its sampled ids"


def test_a_history_that_ends_in_a_turn_of_the_model_is_gone_on_with_behind_its_words(tmp_path: Path) -> None:
    code = """
for _ in range(2):
    response = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
    messages.append(response.choices[0].message)
"""
    sampled, model = play(config(tmp_path, BEGINNING + code), lambda i, prompt: f"a {CALL} b")
    assert sampled.failures == () and [c.turns for c in sampled.completions] == [2, 2]
    assert tokenizer().decode(model.turns[-1][1]).endswith("</tool_call> b"), "and not behind the token that ended it"


def test_what_an_agent_asks_when_it_has_just_ended_is_refused() -> None:
    endpoint, heard = Endpoint({}), list[PendingRequest]()
    with endpoint.address(SimpleNamespace(deadline=0.0), 9.0, heard.append) as address:
        pass
    late: Any = address._answer(None, ChatRequest([{}]))
    with pytest.raises(RequestError, match="the rollout is over"):
        asyncio.run_coroutine_threadsafe(late, endpoint._loop).result(9)
    endpoint.close()
    assert heard == [], "what it asked would run in the engine, and nobody knows it there"


def test_agents_that_are_not_wanted_before_their_process_is_there_end_with_it(tmp_path: Path) -> None:
    given = config(tmp_path, "await said(question)").rollout
    with EnvironmentPool(given, columns=PROBLEM.columns) as pool:
        for key in range(20):
            pool.start(key, PROBLEM.columns)
        pool.close_all()
        server = psutil.Process(pool._workers._server._process.pid)
        until(lambda: not server.children(), limit(20))


def test_a_flood_of_connections_is_held_to_its_own_address(tmp_path: Path) -> None:
    code = """
port = base_url.split(":")[2].split("/")[0]
held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(400)]
await asyncio.sleep(0.5)
kept = [writer.close() for reader, writer in held if not reader.at_eof() and not reader.exception()]
await said(question)
return float(256 <= len(kept) < 360)
"""
    sampled = played(config(tmp_path, code), Model(lambda i, prompt: "fine"))
    assert [c.environment_reward for c in sampled.completions] == [1.0, 1.0]


# ---- limits


def test_beyond_its_turns_or_tokens_a_rollout_is_truncated_and_what_it_returns_counts(tmp_path: Path) -> None:
    code = """
try:
    while True:
        await said(question)
except BadRequestError as error:
    return 0.25 if "max_turns" in str(error) else -1
"""
    sampled, _ = play(config(tmp_path, code, rollout={"max_turns": 3}), lambda i, prompt: "fine")
    assert [(c.turns, c.finish_reason, c.environment_reward) for c in sampled.completions] == [(3, "length", 0.25)] * 2


@pytest.mark.parametrize("rewritten", ["a", "z a"])
def test_a_history_rewritten_up_to_the_limit_is_truncated_wherever_it_is_sorted(tmp_path: Path, rewritten: str) -> None:
    code = f"""
await said(question)
while True:
    await said(question, {rewritten!r}, "More.")
"""
    given = config(tmp_path, code, rollout={"max_turns": 50}, sampler={"max_completion_length": 100})
    sampled, _ = play(given, lambda i, prompt: "z z z z")
    assert sampled.failures == () and [c.finish_reason for c in sampled.completions] == ["length"] * 2
    assert all(98 < len(c.token_ids) <= 100 for c in sampled.completions)


def test_side_by_side_requests_share_the_tokens_that_are_left(tmp_path: Path) -> None:
    code = """
await asyncio.gather(*(said(question) for _ in range(3)))
await said(question)
"""
    rewards = {"reward_funcs": ["environment"]}
    given = config(tmp_path, code, sampler={"max_completion_length": 20}, rewards=rewards)
    sampled = played(given, model := Model(lambda i, prompt: "a b c d e f g"))
    assert len({*model.seeds}) == len(model.seeds), "the same question asked again is not answered with the same words"
    for completion in sampled.completions:
        assert len(completion.token_ids) <= 20 and completion.finish_reason == "length" and completion.turns < 4
    assert [c.environment_reward for c in sampled.completions] == [0.0, 0.0], "who stumbles over a limit ended by it"


def test_an_accelerator_keeps_the_seeds_that_requests_name_and_no_others(tmp_path: Path) -> None:
    code = 'await said(question, seed=5)\nawait said(question, "fine", "And?")'
    played(config(tmp_path, code), model := Model(lambda i, prompt: "fine"))
    assert sorted(model.keeps_seed) == [False, False, True, True]


SILENT = "the agent neither asked the model nor ended within 2 s, so its process was killed"
ENDS = {
    "raise KeyError('x')": ("agent solve raised KeyError: 'x' (mine.py:", "error"),
    "raise SystemExit(3)": ("agent solve raised SystemExit: 3", "error"),
    "return [1]": ("the agent gave [1], expected its reward", "error"),
    "return float('nan')": ("the agent gave nan", "error"),
    "return None": ("the agent gave no reward", "no_reward"),
    "time.sleep(99)": (SILENT, "timeout"),
    "await asyncio.sleep(99)": (SILENT, "timeout"),
    "os.kill(os.getpid(), 9)": ("the agent died of signal 9", "crash"),
    "os._exit(0)": ("the agent ended with exit code 0", "crash"),
    "x = bytearray(3 << 30)": ("agent solve raised MemoryError", "error"),
    "while True: await asyncio.gather(said('again', n=2), return_exceptions=True)": (
        "neither asked the model nor ended",
        "timeout",
    ),
}


def test_an_agent_that_fails_is_named_and_costs_its_rollout_alone(tmp_path: Path) -> None:
    code = "i = int(await said(question))\n"
    code += "".join(f"if i == {i}:\n    {how}\n" for i, how in enumerate(ENDS))
    code += "return i"
    rewards = {"reward_funcs": ["environment"]}
    given = config(tmp_path, code, rollout={"timeout_s": 2}, rewards=rewards, eval={"num_generations": len(ENDS) + 1})
    sampled = played(given, Model(lambda i, prompt: f"{i}"))
    *failed, ended = sampled.completions
    assert ended.environment_reward == len(ENDS) and sampled.failures == ()
    for completion, (named, kind) in zip(failed, ENDS.values(), strict=True):
        assert completion.failure is not None and named in completion.failure.reason
        assert completion.failure.kind == kind and completion.environment_reward is None


def test_an_agent_that_does_not_read_its_stream_has_no_more_time_than_its_own(tmp_path: Path) -> None:
    code = """
asked = dict(model="m", messages=[{"role": "user", "content": question}])
await client.chat.completions.create(**asked, stream=True)
time.sleep(99)
"""

    class Long(Model):
        def step(self) -> list[tuple[Any, list[Completion]]]:
            for _, params in self._running.values():
                for end in range(1, 100):
                    params.hears([5] * end)
            return super().step()

    def decode(ids: list[list[int]]) -> list[str]:
        return ["x" * 90_000 * len(one) for one in ids]  # more than the kernel holds for it

    given = config(tmp_path, code, rollout={"timeout_s": 2})
    sampled = played(given, Long(lambda i, prompt: "fine"), decode=decode)
    assert {c.failure for c in sampled.completions} == {Failure("timeout", f"{SILENT}.")}, "it wrote something"


@pytest.mark.parametrize("lengths", [(3, 40), (40, 3)])
def test_of_side_by_side_requests_rewards_read_the_answer_to_the_last_however_long_it_is(
    lengths: tuple[int, int], tmp_path: Path
) -> None:
    class OneTokenAStep(Model):
        """A model whose shorter answers are finished first."""

        def step(self) -> list[tuple[Any, list[Completion]]]:
            waiting = dict(self._running)
            if len(waiting) < 2:
                return super().step() if self.turns else []
            by_length = {key: len(self._completion(self.rollout_of(key), *of).token_ids) for key, of in waiting.items()}
            self.turns.clear()
            shortest = min(waiting, key=lambda key: by_length[key])
            self._running = {shortest: waiting[shortest]}
            out = super().step()
            self._running |= {key: of for key, of in waiting.items() if key != shortest}
            return out

    first, second = lengths
    code = """
async def later(text):
    await asyncio.sleep(0.2)
    return await said(text)
await asyncio.gather(said("first"), later("second"))
return None
"""
    given = config(tmp_path, code, eval={"num_generations": 1})
    sampled = played(given, OneTokenAStep(lambda i, prompt: "F" * first if "first" in prompt else "S" * second))
    assert [text_of(list(c.messages)) for c in sampled.completions] == ["S" * second]


def test_an_agent_that_cannot_parse_what_the_model_wrote_fails_at_the_models_cost(tmp_path: Path) -> None:
    code = "import json\nreturn float(json.loads(await said(question))['answer'])"
    rewards = {"reward_funcs": ["environment"]}
    given = config(tmp_path, code, rewards=rewards, eval={"num_generations": 3})
    sampled = played(given, Model(lambda i, prompt: '{"answer": 1}' if i == 1 else "The answer is 1"))
    assert [c.failure and c.failure.kind for c in sampled.completions] == ["error", None, "error"]
    scores = with_failures(sampled.completions, [({"environment": 1.0}, 1.0)], given, PROBLEM)
    assert [reward for _, reward in scores] == [0.0, 1.0, 0.0]
    assert [len(c.token_ids) > 0 for c in sampled.completions] == [True] * 3


def test_a_rollout_that_its_own_first_prompt_makes_too_long_keeps_the_turns_that_fit(tmp_path: Path) -> None:
    code = """
begin = question + " " + str(random.random()) + " word" * 20
text = await said(begin)
await said(begin, text, "And?")
"""
    given = config(tmp_path, code, sampler={"max_completion_length": 160})
    sampled = played(given, Model(lambda i, prompt: "a b c d e f g h i j"))
    assert sampled.failures == () and all(0 < len(c.token_ids) <= 160 for c in sampled.completions)
    assert [c.finish_reason for c in sampled.completions] == ["length"] * 2


CATCHES = """
try:
    await asyncio.wait_for(said(question), 0.3)
except asyncio.TimeoutError:
    return -1.0
"""
BY_CLIENT = """
hasty = client.with_options(timeout=0.3, max_retries=0)
await hasty.chat.completions.create(model="m", messages=[{"role": "user", "content": question}])
"""
GIVES_UP = {  # what it does while its first answer is decoded -> (the kind of failure, its own reward)
    "await asyncio.wait_for(said(question), 0.3)": ("error", None),
    CATCHES: (None, -1.0),
    BY_CLIENT: ("error", None),
}


@pytest.mark.parametrize(("code", "ends"), GIVES_UP.items())
def test_an_agent_that_gives_up_on_its_only_answer_trains_on_it_when_it_is_finished(
    code: str, ends: tuple[str | None, float | None], tmp_path: Path
) -> None:
    """Left out, long answers would cost nothing."""

    class Late(Model):
        """A model whose first rollout decodes for longer than its agent waits."""

        begun_s = 0.0

        def step(self) -> list[tuple[Any, list[Completion]]]:
            self.begun_s = self.begun_s or time.monotonic()
            late = {k: of for k, of in self._running.items() if self.rollout_of(k) == 0}
            if time.monotonic() - self.begun_s > limit(2):
                late = {}
            self._running = {k: of for k, of in self._running.items() if k not in late}
            out = super().step()
            self._running |= late
            return out

    given = config(tmp_path, code, rewards={"reward_funcs": ["environment"]})
    sampled = played(given, Late(lambda i, prompt: "a b c" if i == 0 else "fine"))
    assert sampled.failures == ()
    late, ended = sampled.completions
    assert (late.failure and late.failure.kind, late.environment_reward) == ends and late.num_sampled > 3
    assert ended.failure is None and ended.environment_reward == 1.0


def test_a_long_first_answer_is_cut_and_not_left_out_where_first_prompts_differ(tmp_path: Path) -> None:
    code = 'await said(str(random.random()) + " word" * 20 + question)'
    given = config(tmp_path, code, sampler={"max_completion_length": 160})
    sampled = played(given, Model(lambda i, prompt: "a b " * (60 if i else 2)))
    short, long = sampled.completions
    assert sampled.failures == () and short.finish_reason == "stop"
    assert (len(long.token_ids), long.finish_reason) == (160, "length") and long.num_sampled > short.num_sampled


def test_an_agent_that_asks_nothing_is_a_failure(tmp_path: Path) -> None:
    given = config(tmp_path)
    (tmp_path / "mine.py").write_text("def solve(**row): return 1.0")
    sampled = played(given, Model(lambda i, prompt: ""))
    assert not sampled.completions and set(sampled.failures) == {"the agent has ended without a completion."}


PROGRAM = f"{ROOT}/tests/support/agents/program.py"
LEAVES_SOMETHING = ["sh", "-c", f"sleep 99 & exec python3 {PROGRAM}"]  # that holds its output when it has ended


@pytest.mark.parametrize("agent", [["python3", PROGRAM], LEAVES_SOMETHING], ids=["alone", "leaves something"])
def test_a_command_gets_the_row_and_its_last_line_is_the_reward(agent: list[str], tmp_path: Path) -> None:
    given = config(tmp_path, rollout={"agent": agent})
    sampled, _ = play(given, lambda i, prompt: "#### 159294" if "<tool_response>" in prompt else CALL)
    assert [(c.turns, c.environment_reward) for c in sampled.completions] == [(2, 1 - 0.11)] * 2


def test_the_engine_looks_for_texts_where_one_of_several_sources_has_an_agent(tmp_path: Path) -> None:
    sources = [{"path": "a.jsonl", "rollout": {"agent": ["node", "agent.js"]}}, {"path": "b.jsonl"}]
    assert [looks_for_texts(config_in(tmp_path, data={"train": s})) for s in (sources, sources[1:])] == [True, False]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("echo 1; exit 3", "exit code 3; its last line: b'1"),
        ("echo words", "expected a reward"),
        (":", "without"),
        ("head -c 3G /dev/zero; echo; echo 1", "without"),  # more output than the process may hold
    ],
)
def test_a_command_that_fails_is_named(command: str, named: str, tmp_path: Path) -> None:
    sampled = played(config(tmp_path, rollout={"agent": ["sh", "-c", command]}), Model(lambda i, prompt: ""))
    assert not sampled.completions and all(named in reason for reason in sampled.failures)


@pytest.mark.parametrize(
    ("agent", "named"),
    [
        (["no-such-program"], "no program 'no-such-program'"),
        ("mine.py:nothing", "no file mine.py"),
        ("{}/mine.py:sove", "Did you mean solve"),
        ("{}/mine.py:wants", "agent wants wants 'colour'; it gets base_url, question, answer"),
    ],
)
def test_an_agent_that_cannot_be_called_ends_the_run_at_once(agent: Any, named: str, tmp_path: Path) -> None:
    agent = agent.format(tmp_path) if isinstance(agent, str) else agent
    given = config(tmp_path, rollout={"agent": agent})
    (tmp_path / "mine.py").write_text("def solve(**row): pass\ndef wants(colour): pass\n")
    with pytest.raises(UserError, match=named):
        played(given, Model(lambda i, prompt: ""))

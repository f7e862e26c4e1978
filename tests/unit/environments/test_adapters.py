"""The adapters for verifiers and OpenEnv, with stand-ins of what they call; they were tried with the packages, too."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.sync.server import serve

from common.wire.ports import free_port
from environments import Done, of_verifiers
from environments.openenv import OpenEnv
from tests.support.speed import limit

FILES = {
    "verifiers/__init__.py": "import importlib\n"
    "def load_environment(name, **settings): return importlib.import_module(name).load_environment(**settings)",
    "verifiers/types.py": "from types import SimpleNamespace as ClientConfig",
    "agents.py": "theirs = True",
    "sums.py": """
import agents
assert agents.theirs

class Env:
    def get_dataset(self):
        return [{"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}], "answer": "4"}]

    async def run_rollout(self, task, client, model, sampling):
        if task["answer"] == "none":
            return {"error": "the model was refused", "reward": 0.0}
        return {"error": None, "reward": float(task["answer"]) / 8 if client.api_base_url == "http://model" else -1.0}

def load_environment(n): return Env()
""",
    "verifiers/v1/__init__.py": "from types import SimpleNamespace as EvalClientConfig\n"
    "def ModelContext(model, client): return client.base_url",
    "verifiers/v1/utils/loaders.py": "import tasks\n"
    "def resolve_env_config(given): return given\n"
    "def load_environment(config): return tasks.Env(config)",
    "tasks.py": """
import contextlib
from types import SimpleNamespace as Some

class Data(Some):
    prompt_text = "2+2?"
    def model_dump(self, **how): return dict(vars(self))
    model_validate = classmethod(lambda cls, given: cls(**given))

class Task:
    def __init__(self, data, config): self.data = data
    data_type = classmethod(lambda cls: Data)

class Set(list):
    task_type = classmethod(lambda cls: Task)

class Env:
    def __init__(self, config):
        assert config == {"taskset": {"id": "tasks", "n": 1}, "agent": {"harness": {"id": "mine"}}}
        self.taskset, self.config = Set([Task(Data(answer=4), None)]), Some(taskset=Some(task=None))

    @contextlib.asynccontextmanager
    async def serving(self): yield
    def slots(self, task): return [task]

    async def run_slot(self, task, url):
        errors = [Some(message="the model was refused")] if task.data.answer == "none" else []
        traces = [] if errors else [Some(reward=task.data.answer / 4, errors=[]), Some(reward=0.0, errors=[])]
        return Some(ok=url == "http://model" and not errors, errors=errors, traces=traces)
""",
}


@pytest.fixture(
    params=[("sums", '{"n": 1}'), ("tasks", '{"taskset": {"n": 1}, "agent": {"harness": {"id": "mine"}}}')],
    ids=lambda p: p[0],
)
def served(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The row of that environment, and the server that plays it."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    port = free_port()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERIFIERS_PORT", str(port))
    monkeypatch.setattr(of_verifiers, "PORT", port)
    command = [sys.executable, of_verifiers.__file__]
    row = json.loads(subprocess.check_output([*command, "rows", *request.param]))
    with subprocess.Popen([*command, "serve", *request.param]) as server:
        yield row, server
        server.kill()


def test_a_rollout_of_an_environment_for_verifiers_has_its_reward_or_fails_with_its_words(served: Any) -> None:
    row, server = served
    assert row["question"].endswith("2+2?") and int(row["task"]["answer"]) == 4
    until, reward = time.monotonic() + limit(20), None
    while reward is None:
        try:
            reward = of_verifiers.solve(row["task"], "http://model")
        except RuntimeError as error:
            assert "no server on port" in str(error)
            assert server.poll() is None and time.monotonic() < until
            time.sleep(0.05)
    assert reward == 0.5
    with pytest.raises(RuntimeError, match="the model was refused"):
        of_verifiers.solve(row["task"] | {"answer": "none"}, "http://model")


# ---- OpenEnv, with a server that speaks as openenv-core 0.3 does


@pytest.fixture
def address() -> Iterator[tuple[str, list[Any]]]:
    """A number is to be guessed, one of each session's own; what was asked is in the list."""
    asked: list[Any] = []

    def session(socket: Any) -> None:
        secret = 0
        for text in socket:
            asked.append(message := json.loads(text))
            kind, data = message["type"], message["data"]
            if kind == "reset":
                secret = int(data["answer"])
                answer = {"observation": {"text": "Guess."}, "reward": None, "done": False}
            elif not data["number"].isdigit():
                socket.send(json.dumps({"type": "error", "data": {"message": "no number"}}))
                continue
            else:
                is_right = int(data["number"]) == secret
                seen = {"text": "Right." if is_right else "Higher.", "left": 2}
                answer = {"observation": seen, "reward": 1.0 if is_right else -0.1, "done": is_right}
            socket.send(json.dumps({"type": "observation", "data": answer}))

    with serve(session, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}/ws", asked
        server.shutdown()


def test_each_rollout_is_a_session_and_its_rewards_are_the_turns(address: Any) -> None:
    url, asked = address
    first, second = (OpenEnv(url, "number", "text", ["answer"]) for _ in range(2))
    row = {"question": "?", "answer": "7"}
    assert (first.reset(**row), second.reset(**row | {"answer": "3"})) == ("Guess.", "Guess.")
    assert asked[0]["data"]["answer"] == "7" and asked[0]["data"]["seed"] != asked[1]["data"]["seed"]
    assert first.step("3") == ("Higher.", -0.1)
    assert second.step("3") == Done(1.0, [{"role": "user", "content": "Right."}])
    assert first.step("7") == Done(1.0, [{"role": "user", "content": "Right."}])
    first.close()
    again = OpenEnv(url, "number", columns=["answer"])
    assert again.reset(**row) == '{"text": "Guess."}' and asked[-1] == asked[0], "a rollout of the same row"
    assert again.step("1") == ('{"text": "Higher.", "left": 2}', -0.1)
    with pytest.raises(RuntimeError, match="no number"):
        again.step("?")


def test_where_the_environment_says_nothing_the_prompt_is_the_row_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([{"text": None}, {"text": None}, {"text": ["a", {"b": None}]}])
    one = OpenEnv("ws://nowhere", "number", "text")
    monkeypatch.setattr("environments.openenv.connect", lambda url: None)
    monkeypatch.setattr(one, "_request", lambda *_: {"observation": next(seen), "reward": 0.5, "done": False})
    assert one.reset() is None and one.step("1") == ("", 0.5)
    assert one.step("2") == ('["a", {"b": null}]', 0.5)


def test_what_the_type_of_an_action_refuses_the_model_is_told_and_a_field_that_is_none_fails_the_rollout() -> None:
    def refused(kind: str, field: str) -> str:
        errors = [{"type": kind, "loc": [field], "msg": "Input should be a valid integer"}]
        return json.dumps({"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": errors}})

    one: Any = OpenEnv("ws://nowhere", "number", "text")
    told = iter([refused("int_parsing", "number"), refused("extra_forbidden", "number"), refused("missing", "count")])
    one._socket = SimpleNamespace(send=len, recv=lambda: next(told))
    assert one.step("left") == '{"error": "Input should be a valid integer"}'
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refuses step"):
            one.step("left")

"""The adapter for verifiers, with stand-ins of what it calls there; it was tried with 0.2.1 and 0.4.0, too."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from environments import of_verifiers
from tests.support.speed import limit

SCRIPT = Path(of_verifiers.__file__)
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
def command(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """(what) -> the process that does it, in a folder with that environment."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(of_verifiers, "PORT", port)
    started, (name, settings), env = [], request.param, {**os.environ, "VERIFIERS_PORT": str(port)}

    def start(what: str) -> subprocess.Popen[str]:
        line = [sys.executable, str(SCRIPT), what, name, settings]
        started.append(subprocess.Popen(line, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        with process:
            process.kill()


def test_a_rollout_of_an_environment_for_verifiers_has_its_reward_or_fails_with_its_words(command: Any) -> None:
    row = json.loads(command("rows").communicate()[0])
    assert row["question"].endswith("2+2?") and int(row["task"]["answer"]) == 4
    server, until = command("serve"), time.monotonic() + limit(20)
    reward = None
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

"""Adapter that runs environments written for `verifiers` (tried: 0.2.1 and 0.4.0) as agents.

The packages of verifiers conflict with those of vLLM, so this file runs as a server in a virtual
environment of its own, where it plays rollouts. To Tandem it is the agent `solve`, which requests
one rollout. docs/environments.md shows its use. Not supported: rewards that compare rollouts of a
group, and pictures.

    python environments/of_verifiers.py rows|serve NAME [SETTINGS]
"""

import contextlib
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

PORT = int(os.environ.get("VERIFIERS_PORT", "8766"))
KEY = "OPENAI_API_KEY"  # the variable in which clients look for a key
# A chat with the environment's tools, in a process here and not in a cloud's sandbox.
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


@dataclass(frozen=True)
class VerifiersEnvironment:
    """An environment of verifiers, of either interface."""

    rows: Iterable[tuple[str, dict[str, Any]]]  # the prompt and the task of each row
    # The context in which rollouts are played.
    serving: Callable[[], AbstractAsyncContextManager[Any]]
    play: Callable[[dict[str, Any], str], Awaitable[float]]  # plays a task at a URL → its reward


def solve(task: dict[str, Any], base_url: str) -> float:
    """Returns the reward of one rollout, which the server plays with the model at base_url.

    Raises RuntimeError if it fails.
    """
    body = json.dumps({"task": task, "url": base_url})
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}", body.encode())
    try:
        with urllib.request.urlopen(request) as answer:
            return float(json.load(answer))
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from None
    except urllib.error.URLError as error:
        raise RuntimeError(
            f"no server on port {PORT}: of_verifiers.py serve … ({error.reason})"
        ) from None


def of_environment(name: str, settings: dict[str, Any]) -> VerifiersEnvironment:
    """Opens a package that has `load_environment`."""
    env = import_module("verifiers").load_environment(name, **settings)
    types = import_module("verifiers.types")

    async def play(task: dict[str, Any], url: str) -> float:
        client = types.ClientConfig(api_key_var=KEY, api_base_url=url, max_retries=0)
        output = await env.run_rollout(task, client, "policy", {})
        if output.get("error"):
            raise RuntimeError(output["error"])
        return float(output["reward"])

    def rows() -> Iterator[tuple[str, dict[str, Any]]]:
        for row in env.get_dataset():
            contents = [str(message["content"]) for message in row["prompt"]]
            yield "\n".join(contents), dict(row)

    return VerifiersEnvironment(rows(), contextlib.nullcontext, play)


def of_taskset(name: str, settings: dict[str, Any]) -> VerifiersEnvironment:
    """Opens a package that has a task set of verifiers.v1."""
    vf = import_module("verifiers.v1")
    loaders = import_module("verifiers.v1.utils.loaders")
    taskset = {"id": name} | settings.get("taskset", {})
    config = loaders.resolve_env_config({"agent": AGENT} | settings | {"taskset": taskset})
    env = loaders.load_environment(config)
    kind = type(env.taskset).task_type()

    async def play(task: dict[str, Any], url: str) -> float:
        data = kind.data_type().model_validate(task)
        [slot] = env.slots(kind(data, env.config.taskset.task))
        client = vf.EvalClientConfig(base_url=url, api_key_var=KEY)
        episode = await env.run_slot(slot, vf.ModelContext("policy", client))
        if not episode.ok:
            errors = list(episode.errors)
            for trace in episode.traces:
                errors += trace.errors
            raise RuntimeError([error.message for error in errors])
        rewards = [trace.reward for trace in episode.traces]
        return float(sum(rewards) / len(rewards))

    def rows() -> Iterator[tuple[str, dict[str, Any]]]:
        for task in env.taskset:
            data = task.data.model_dump(mode="json", exclude_defaults=True)
            yield task.data.prompt_text, data

    return VerifiersEnvironment(rows(), env.serving, play)


def main(what: str, name: str, settings: str = "{}") -> None:
    """Prints the rows as JSON lines, or serves rollouts until the process is ended."""
    if hasattr(import_module(name), "load_environment"):
        environment = of_environment(name, json.loads(settings))
    else:
        environment = of_taskset(name, json.loads(settings))
    if what == "rows":
        for question, task in environment.rows:
            print(json.dumps({"question": question, "task": task}, default=str))
    else:
        serve(environment)


def serve(environment: VerifiersEnvironment) -> None:
    """Serves rollouts on PORT until the process is ended."""
    from aiohttp import web

    async def played(request: web.Request) -> web.Response:
        try:
            asked = await request.json()
            reward = await environment.play(asked["task"], asked["url"])
            return web.json_response(reward)
        except Exception as error:  # it fails only this rollout
            return web.Response(text=f"{type(error).__name__}: {error}", status=500)

    async def served(_: web.Application) -> AsyncIterator[None]:
        async with environment.serving():
            yield

    os.environ.setdefault(KEY, "none")
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/", played)
    app.cleanup_ctx.append(served)
    # A killed rollout cancels its handler.
    web.run_app(app, host="127.0.0.1", port=PORT, handler_cancellation=True)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # not this folder, whose `agents` are not those of verifiers
    main(*sys.argv[1:])

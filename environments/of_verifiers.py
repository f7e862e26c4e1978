"""Adapter that runs environments written for `verifiers` (tried: 0.2.1 and 0.4.0) as agents: docs/environments.md.

The packages of verifiers conflict with vLLM's, so this file runs as a server, which plays rollouts, in a virtual
environment of its own. To Tandem it is the agent `solve`, which requests one rollout. Left out: rewards that compare
rollouts of a group, pictures.

    python environments/of_verifiers.py rows|serve NAME [SETTINGS]
"""

import contextlib
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any

PORT = int(os.environ.get("VERIFIERS_PORT", "8766"))
KEY = "OPENAI_API_KEY"  # the variable in which clients look for a key
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}  # a chat with its tools, not a cloud's sandbox
Opened = tuple[Any, Any, Any]  # (prompt, task) pairs; the context to serve in; the function that plays a rollout


def solve(task: dict[str, Any], base_url: str) -> float:
    """Requests one rollout, as an agent: the server plays it with the model at base_url. Raises RuntimeError."""
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}", json.dumps({"task": task, "url": base_url}).encode())
    try:
        with urllib.request.urlopen(request) as answer:
            return float(json.load(answer))
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from None
    except urllib.error.URLError as error:
        raise RuntimeError(f"no server on port {PORT}: of_verifiers.py serve … ({error.reason})") from None


def of_environment(name: str, settings: dict[str, Any]) -> Opened:
    env, types = import_module("verifiers").load_environment(name, **settings), import_module("verifiers.types")

    async def play(task: dict[str, Any], url: str) -> float:
        at = types.ClientConfig(api_key_var=KEY, api_base_url=url, max_retries=0)
        output = await env.run_rollout(task, at, "policy", {})
        if output.get("error"):
            raise RuntimeError(output["error"])
        return float(output["reward"])

    rows = (("\n".join(str(m["content"]) for m in row["prompt"]), dict(row)) for row in env.get_dataset())
    return rows, contextlib.nullcontext, play


def of_taskset(name: str, settings: dict[str, Any]) -> Opened:
    vf, loaders = import_module("verifiers.v1"), import_module("verifiers.v1.utils.loaders")
    taskset = {"id": name} | settings.get("taskset", {})
    env = loaders.load_environment(loaders.resolve_env_config({"agent": AGENT} | settings | {"taskset": taskset}))
    kind = type(env.taskset).task_type()

    async def play(task: dict[str, Any], url: str) -> float:
        [slot] = env.slots(kind(kind.data_type().model_validate(task), env.config.taskset.task))
        at = vf.EvalClientConfig(base_url=url, api_key_var=KEY)
        episode = await env.run_slot(slot, vf.ModelContext("policy", at))
        if not episode.ok:
            raise RuntimeError([error.message for one in (episode, *episode.traces) for error in one.errors])
        return float(sum(trace.reward for trace in episode.traces) / len(episode.traces))

    rows = ((task.data.prompt_text, task.data.model_dump(mode="json", exclude_defaults=True)) for task in env.taskset)
    return rows, env.serving, play


def main(what: str, name: str, settings: str = "{}") -> None:
    opened = of_environment if hasattr(import_module(name), "load_environment") else of_taskset
    rows, serving, play = opened(name, json.loads(settings))
    if what == "rows":
        lines = (json.dumps({"question": question, "task": task}, default=str) for question, task in rows)
        return print(*lines, sep="\n")
    from aiohttp import web

    async def played(request: web.Request) -> web.Response:
        try:
            return web.json_response(await play(**await request.json()))
        except Exception as error:  # an error fails this rollout alone
            return web.Response(text=f"{type(error).__name__}: {error}", status=500)

    async def served(_: web.Application) -> AsyncIterator[None]:
        async with serving():
            yield

    os.environ.setdefault(KEY, "none")
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/", played)
    app.cleanup_ctx.append(served)
    web.run_app(app, host="127.0.0.1", port=PORT, handler_cancellation=True)  # a killed rollout ends its handler


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # not this folder, whose `agents` are not those of verifiers
    main(*sys.argv[1:])

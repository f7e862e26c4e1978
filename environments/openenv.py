"""An environment on an OpenEnv server (openenv-core 0.3), in rollouts as any other:

    rollout: {environment: environments/openenv.py:OpenEnv, environment_kwargs: {url: "ws://localhost:8000/ws"}}

Of OpenEnv's packages nothing is needed here, which clash with vLLM's: the server runs where they are, and speaks JSON
over a WebSocket. A rollout is a session, so start the server with max_concurrent_envs of as many. Its rewards are the
turns'. Left out: actions of several fields, which the model would have to write as JSON, and MCP.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

from websockets.sync.client import connect

from environments import Done


class OpenEnv:
    """action: the field that gets what the model writes. observation: the one that it reads; null = JSON of them all.
    columns: of the row, that reset gets beside a seed that all rollouts of the row have in common."""

    def __init__(self, url: str, action: str, observation: str | None = None, columns: Sequence[str] = ()) -> None:
        self._url, self._action, self._observation, self._columns = url, action, observation, columns

    def reset(self, **row: Any) -> str | None:
        """The first observation; the row's own prompt where it says nothing."""
        self._socket = connect(self._url)
        seed = zlib.crc32(json.dumps(row, sort_keys=True, default=repr).encode())
        return self._text(self._asked("reset", {"seed": seed} | {name: row[name] for name in self._columns})) or None

    def step(self, completion: str) -> Any:
        result = self._asked("step", {self._action: completion})
        if "errors" in result:
            return json.dumps({"error": result["errors"][0]["msg"]}, ensure_ascii=False)
        text, reward = self._text(result), result.get("reward")
        return Done(float(reward or 0.0), [{"role": "user", "content": text}]) if result["done"] else (text, reward)

    def close(self) -> None:
        self._socket.close()

    def _asked(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._socket.recv())
        errors = answer["data"].get("errors")  # of what the model wrote, if all are of this field
        is_its_own = errors and all(e["loc"][:1] == [self._action] and e["type"] != "extra_forbidden" for e in errors)
        if answer["type"] == "error" and not is_its_own:
            raise RuntimeError(f"the OpenEnv server refuses {kind} {data}: {answer['data']}")
        return dict(answer["data"])

    def _text(self, result: dict[str, Any]) -> str:
        seen = result["observation"]
        seen = seen[self._observation] if self._observation else seen
        return "" if seen is None else seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)

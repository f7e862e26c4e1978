"""Environment client of an OpenEnv server (openenv-core 0.3), used in rollouts as any other environment:

    rollout: {environment: environments/openenv.py:OpenEnv, environment_kwargs: {url: "ws://localhost:8000/ws"}}

A rollout is a session of JSON over a WebSocket; docs/environments.md starts the server. Left out: actions of several
fields, which the model would have to write as JSON, and MCP.
"""

import json
import zlib
from collections.abc import Sequence
from typing import Any

from websockets.sync.client import connect

from environments import Done


class OpenEnv:
    """A session on an OpenEnv server. action: the field that receives the completion. observation: the field that is
    read; None = all fields as JSON. columns: the row's, which reset receives beside a seed common to its rollouts."""

    def __init__(self, url: str, action: str, observation: str | None = None, columns: Sequence[str] = ()) -> None:
        self._url, self._action, self._observation, self._columns = url, action, observation, columns

    def reset(self, **row: Any) -> str | None:
        """Opens a session and returns its first observation, or None if it is empty, to keep the row's own prompt."""
        self._socket = connect(self._url)
        seed = zlib.crc32(json.dumps(row, sort_keys=True, default=repr).encode())
        return self._text(self._request("reset", {"seed": seed} | {name: row[name] for name in self._columns})) or None

    def step(self, completion: str) -> Any:
        result = self._request("step", {self._action: completion})
        if "errors" in result:
            return json.dumps({"error": result["errors"][0]["msg"]}, ensure_ascii=False)
        text, reward = self._text(result), result.get("reward")
        return Done(float(reward or 0.0), [{"role": "user", "content": text}]) if result["done"] else (text, reward)

    def close(self) -> None:
        self._socket.close()

    def _request(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._socket.recv())
        errors = answer["data"].get("errors")  # errors in the action's field are the model's, if there are no others
        is_its_own = errors and all(e["loc"][:1] == [self._action] and e["type"] != "extra_forbidden" for e in errors)
        if answer["type"] == "error" and not is_its_own:
            raise RuntimeError(f"the OpenEnv server refuses {kind} {data}: {answer['data']}")
        return dict(answer["data"])

    def _text(self, result: dict[str, Any]) -> str:
        shown = result["observation"]
        shown = shown[self._observation] if self._observation else shown
        return "" if shown is None else shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
